package sample

import (
	"strings"
	"testing"
	"unicode/utf8"

	"bulkhead.dev/infra/assert"
	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

var allow = cmp.AllowUnexported(candidate{})

// cut is the reference: the text before the first occurrence of any stop.
func cut(text string, stops []string) (string, bool) {
	first := -1
	for _, s := range stops {
		if s == "" {
			continue
		}
		if at := strings.Index(text, s); at >= 0 && (first < 0 || at < first) {
			first = at
		}
	}
	if first < 0 {
		return text, false
	}
	return text[:first], true
}

// feed pushes the chunks and returns all that was let out.
func feed(t interface{ Fatalf(string, ...any) }, s *Stop, chunks []string) (string, bool) {
	var out strings.Builder
	for _, c := range chunks {
		emit, stopped := s.Push(c)
		out.WriteString(emit)
		if !utf8.ValidString(emit) {
			t.Fatalf("let out half a character")
		}
		if stopped != s.Stopped() {
			t.Fatalf("Push says stopped=%v, Stopped says otherwise", stopped)
		}
	}
	out.WriteString(s.Flush())
	if s.Flush() != "" {
		t.Fatalf("flushed twice")
	}
	return out.String(), s.Stopped()
}

func TestStopTable(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		stops   []string
		chunks  []string
		emits   []string // of each push, then of the flush
		stopped bool
	}{
		"none":              {nil, []string{"ab", "c"}, []string{"ab", "c", ""}, false},
		"empty stop":        {[]string{""}, []string{"ab"}, []string{"ab", ""}, false},
		"inside one chunk":  {[]string{"X"}, []string{"abXcd"}, []string{"ab", ""}, true},
		"across chunks":     {[]string{"XYZ"}, []string{"aX", "Y", "Zb", "c"}, []string{"a", "", "", "", ""}, true},
		"prefix released":   {[]string{"XYZ"}, []string{"aX", "Y", "b"}, []string{"a", "", "XYb", ""}, false},
		"prefix flushed":    {[]string{"XYZ"}, []string{"aXY"}, []string{"a", "XY"}, false},
		"self overlap":      {[]string{"aab"}, []string{"aaa", "b"}, []string{"a", "", ""}, true},
		"earlier wins":      {[]string{"c", "bcd"}, []string{"abc", "d"}, []string{"a", "", ""}, true},
		"later wins":        {[]string{"c", "bcd"}, []string{"abc", "x"}, []string{"a", "b", ""}, true},
		"later wins at end": {[]string{"c", "bcd"}, []string{"abc"}, []string{"a", "b"}, true},
		"same start":        {[]string{"ab", "a"}, []string{"xa"}, []string{"x", ""}, true},
		"characters":        {[]string{"é!"}, []string{"caf\xc3", "\xa9", "?"}, []string{"caf", "", "é?", ""}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := NewStop(c.stops)
			var got []string
			for _, x := range c.chunks {
				emit, _ := s.Push(x)
				got = append(got, emit)
			}
			got = append(got, s.Flush())
			assert.Equal(t, got, c.emits)
			assert.Equal(t, s.Stopped(), c.stopped)
		})
	}
}

func TestStopAnyChunking(t *testing.T) {
	t.Parallel()
	// A small alphabet, so that stops occur, overlap and almost occur.
	word := func(lo, hi int) *rapid.Generator[string] {
		return rapid.StringOfN(rapid.SampledFrom([]rune("abé")), lo, hi, -1)
	}
	rapid.Check(t, func(t *rapid.T) {
		stops := rapid.SliceOfN(word(0, 5), 0, 4).Draw(t, "stops")
		text := word(0, 40).Draw(t, "text")
		want, wantStopped := cut(text, stops)

		// Chunks at any byte: the decoder gives whole characters, this does not.
		var chunks []string
		for rest := text; rest != ""; {
			n := rapid.IntRange(0, len(rest)).Draw(t, "chunk")
			chunks = append(chunks, rest[:n])
			rest = rest[n:]
			if len(chunks) > 60 {
				chunks, rest = append(chunks, rest), ""
			}
		}
		got, stopped := feed(t, NewStop(stops), chunks)
		if got != want || stopped != wantStopped {
			t.Fatalf("let out %q (%v), want %q (%v)", got, stopped, want, wantStopped)
		}
	})
}

func FuzzStop(f *testing.F) {
	f.Add("hello world", "lo w", "or", uint8(3))
	f.Add("aaab", "aab", "", uint8(1))
	f.Add("é€😀", "€", "😀", uint8(2))
	f.Fuzz(func(t *testing.T, text, a, b string, size uint8) {
		if !utf8.ValidString(text) || !utf8.ValidString(a) || !utf8.ValidString(b) || size == 0 {
			t.Skip()
		}
		stops := []string{a, b}
		var chunks []string
		for rest := text; rest != ""; {
			n := min(int(size), len(rest))
			chunks, rest = append(chunks, rest[:n]), rest[n:]
		}
		got, stopped := feed(t, NewStop(stops), chunks)
		want, wantStopped := cut(text, stops)
		if got != want || stopped != wantStopped {
			t.Fatalf("let out %q (%v), want %q (%v)", got, stopped, want, wantStopped)
		}
	})
}

func TestStopCloseOverwrites(t *testing.T) {
	t.Parallel()
	s := NewStop([]string{"secret stop"})
	emit, _ := s.Push("a secret st")
	assert.Equal(t, emit, "a ")
	held := s.held[:cap(s.held)]
	s.Close()
	assert.True(t, allZero(held))
	emit, stopped := s.Push("more")
	assert.Equal(t, emit, "")
	assert.True(t, stopped)
}
