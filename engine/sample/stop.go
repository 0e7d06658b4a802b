package sample

import (
	"bytes"
	"unicode/utf8"
)

// Stop cuts a stream of text before the first occurrence of any stop string:
// the one that starts first, however the text is divided. It never lets out a
// character that is, or may still become, part of that occurrence. It is not
// safe for concurrent use.
//
// A match may have to wait: with the stops "abcd" and "bc" the text "abc"
// holds "bc", but the next character decides whether "abcd" started earlier.
// Nothing after the a is let out meanwhile.
type Stop struct {
	stops [][]byte
	held  []byte // text that was taken in and not let out
	done  bool   // a stop string was found
}

// NewStop makes a matcher. Empty strings and strings that are not UTF-8 match
// no text and are left out.
func NewStop(stops []string) *Stop {
	s := &Stop{}
	for _, x := range stops {
		if x != "" && utf8.ValidString(x) {
			s.stops = append(s.stops, []byte(x))
		}
	}
	return s
}

// Push takes in the next piece of text and returns what may be let out now,
// always whole characters. stopped means that a stop string was found: emit is
// the last of the text, and later calls return nothing and true again.
func (s *Stop) Push(text string) (emit string, stopped bool) {
	if s.done {
		return "", true
	}
	if len(s.stops) == 0 && len(s.held) == 0 && wholeRunes(text) {
		return text, false
	}
	s.hold(text)
	open := s.open()
	if at := s.find(); at >= 0 && at <= open {
		return s.end(at), true
	}
	return s.release(open), false
}

// Flush returns the text that is still held back when no more will come. If a
// stop string waited in it, the text ends before it and Stopped is true.
func (s *Stop) Flush() string {
	if s.done {
		return ""
	}
	if at := s.find(); at >= 0 {
		return s.end(at)
	}
	return s.release(len(s.held))
}

// Stopped reports whether a stop string was found.
func (s *Stop) Stopped() bool { return s.done }

// Close overwrites the text that is held back. The matcher then acts as if it
// had found a stop string. It may be called more than once.
func (s *Stop) Close() {
	clear(s.held[:cap(s.held)])
	for _, x := range s.stops {
		clear(x)
	}
	*s = Stop{done: true}
}

// find returns where the first occurrence of any stop string starts, or -1.
func (s *Stop) find() int {
	first := -1
	for _, x := range s.stops {
		if at := bytes.Index(s.held, x); at >= 0 && (first < 0 || at < first) {
			first = at
		}
	}
	return first
}

// open returns the first place in the held text from which on everything could
// still be the beginning of a stop string or of a character.
func (s *Stop) open() int {
	n := len(s.held)
	first := n
	for _, x := range s.stops {
		for at := max(0, n-len(x)+1); at < first; at++ {
			if bytes.HasPrefix(x, s.held[at:]) {
				first = at
			}
		}
	}
	for at := max(0, n-utf8.UTFMax+1); at < first; at++ {
		if utf8.RuneStart(s.held[at]) && !utf8.FullRune(s.held[at:]) {
			first = at
		}
	}
	return first
}

// hold appends the text, overwriting an array that it outgrows.
func (s *Stop) hold(text string) {
	if need := len(s.held) + len(text); need > cap(s.held) {
		const spare = 64 // a few tokens of text
		n := append(make([]byte, 0, need+spare), s.held...)
		clear(s.held)
		s.held = n
	}
	s.held = append(s.held, text...)
}

// release lets out the first n bytes.
func (s *Stop) release(n int) string {
	out := string(s.held[:n])
	rest := copy(s.held, s.held[n:])
	clear(s.held[rest:])
	s.held = s.held[:rest]
	return out
}

// end lets out the first n bytes and drops the rest for good.
func (s *Stop) end(n int) string {
	out := string(s.held[:n])
	s.Close()
	return out
}

func wholeRunes(text string) bool {
	for at := max(0, len(text)-utf8.UTFMax+1); at < len(text); at++ {
		if utf8.RuneStart(text[at]) && !utf8.FullRuneInString(text[at:]) {
			return false
		}
	}
	return true
}
