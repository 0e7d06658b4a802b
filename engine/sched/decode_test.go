package sched

import (
	"context"
	"errors"
	"io"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sync/errgroup"

	"bulkhead.dev/engine/compute"
	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/sample"
	"bulkhead.dev/infra/assert"
)

func spell(ids []int32) string {
	var f fakeText
	s := ""
	for _, id := range ids {
		s += f.Push(id)
	}
	return s + f.Flush()
}

// Sequences that join and leave at any time get what each gets alone.
func TestDecodeBatch(t *testing.T) {
	t.Parallel()
	l := startDecode(t, nil)
	var g errgroup.Group
	for i := range 12 {
		p := prompt(1+i*5, i)
		n := 1 + i*4
		r := l.start(t, owner(byte(1+i%3)), p, n)
		g.Go(func() error {
			text, ids, err := drain(t.Context(), r)
			if !errors.Is(err, io.EOF) {
				return err
			}
			want := fakeAnswer(p, n)
			assert.Equal(t, ids, want)
			assert.Equal(t, text, spell(want))
			assert.Equal(t, r.Result(), Result{Finish: MaxTokens, Output: n})
			return nil
		})
	}
	assert.NoError(t, g.Wait())
	assert.Equal(t, l.Running(), 0)
	assert.True(t, l.Tokens() > 0)
}

func TestDecodeEnds(t *testing.T) {
	t.Parallel()
	p := prompt(20, 3)
	want := fakeAnswer(p, 40)
	text := spell(want)
	for name, c := range map[string]struct {
		eog    int32 // index of the id that ends the text, or -1
		stop   []string
		max    int
		finish Finish
		n      int // ids
		text   string
	}{
		"limit":                {-1, nil, 7, MaxTokens, 7, spell(want[:7])},
		"one token":            {-1, nil, 1, MaxTokens, 1, spell(want[:1])},
		"eos":                  {0, nil, 40, EOS, 1, ""},
		"stop string":          {-1, []string{letter(want[5])}, 40, StopWord, 6, spell(want[:5])},
		"stop of two letters":  {-1, []string{letter(want[3]) + letter(want[4])}, 40, StopWord, 5, spell(want[:3])},
		"half a stop at end":   {-1, []string{letter(want[6]) + "?"}, 7, MaxTokens, 7, spell(want[:7])},
		"stop at the limit":    {-1, []string{letter(want[6])}, 7, StopWord, 7, spell(want[:6])},
		"stop that waits":      {-1, []string{letter(want[6]), letter(want[5]) + letter(want[6]) + "?"}, 7, StopWord, 7, spell(want[:6])},
		"stop that waits, eos": {7, []string{letter(want[6]), letter(want[5]) + letter(want[6]) + "?"}, 40, StopWord, 8, spell(want[:6])},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			assert.True(t, len(text) > 10)
			l := startDecode(t, func(o *DecodeOptions) {
				o.IsEOG = func(id int32) bool { return c.eog >= 0 && id == want[c.eog] }
			})
			r := l.start(t, owner(1), p, c.max, c.stop...)
			got, ids, err := drain(t.Context(), r)
			assert.ErrorIs(t, err, io.EOF)
			assert.Equal(t, got, c.text)
			assert.Equal(t, ids, want[:c.n])
			assert.Equal(t, r.Result(), Result{Finish: c.finish, Output: c.n})
		})
	}
}

// Pages are granted as positions are reached, not for the whole lease at once.
func TestDecodeGrows(t *testing.T) {
	t.Parallel()
	l := startDecode(t, nil)
	r := l.start(t, owner(1), prompt(16, 1), 100)
	_, _, err := drain(t.Context(), r)
	assert.ErrorIs(t, err, io.EOF)
	n := 0
	for _, e := range r.Extents() {
		n += int(e.Count)
	}
	// 16 prompt positions, and 99 ids that were fed back.
	assert.Equal(t, n, geometry.PagesFor(16+99))
	assert.Equal(t, len(r.Extents()) > 1, true)
}

// A prefill leg whose keys and values for the last position are not what this
// leg computes is refused before any text.
func TestDecodeRecomputeProof(t *testing.T) {
	t.Parallel()
	for name, spoiled := range map[string]int{"wrong at the last position": 19, "attended over a wrong page": 3} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := startDecode(t, nil)
			l.prefill.spoil = func(pos int, sum float32) float32 {
				if pos == spoiled {
					return sum + 1
				}
				return sum
			}
			r := l.start(t, owner(1), prompt(20, 1), 10)
			text, ids, err := drain(t.Context(), r)
			assert.ErrorIs(t, err, ErrRecompute)
			assert.Equal(t, text, "")
			assert.Equal(t, len(ids), 0)
			r.Close()
			assert.Equal(t, r.Output(), 0)
			assert.Equal(t, l.Tokens(), uint64(0))
		})
	}
}

func TestDecodeWrongLastToken(t *testing.T) {
	t.Parallel()
	l := startDecode(t, nil)
	p := prompt(20, 1)
	r, err := l.Start(Request{Committed: l.commit(t, owner(1), p, 5), LastToken: p[19] + 1, MaxOutput: 5})
	assert.NoError(t, err)
	defer r.Close()
	_, _, err = drain(t.Context(), r)
	assert.ErrorIs(t, err, ErrRecompute)
}

// A step without finite logits ends its sequence, with no text of that step and
// none that was not taken yet, and leaves the others alone.
func TestDecodeNotFinite(t *testing.T) {
	t.Parallel()
	l := startDecode(t, nil)
	l.model.spoil = func(pos int, sum float32) float32 {
		if pos == 25 {
			return float32(math.NaN())
		}
		return sum
	}
	good := l.start(t, owner(2), prompt(5, 2), 20) // ends before position 25
	bad := l.start(t, owner(1), prompt(20, 1), 20)
	_, ids, err := drain(t.Context(), bad)
	assert.ErrorIs(t, err, ErrNotFinite)
	want := fakeAnswer(prompt(20, 1), 20)
	assert.True(t, len(ids) <= 6)
	assert.Equal(t, ids, want[:len(ids)], equateEmpty)
	bad.Close()
	assert.Equal(t, bad.Output(), 6)
	_, ids, err = drain(t.Context(), good)
	assert.ErrorIs(t, err, io.EOF)
	assert.Equal(t, ids, fakeAnswer(prompt(5, 2), 20))
}

func TestDecodeRefusalDropsText(t *testing.T) {
	t.Parallel()
	l := startDecode(t, nil)
	l.model.spoil = func(pos int, sum float32) float32 {
		if pos == 25 {
			return float32(math.NaN())
		}
		return sum
	}
	r := l.start(t, owner(1), prompt(20, 1), 20)
	<-r.done
	assert.Equal(t, r.Output(), 6)
	text, ids, err := drain(t.Context(), r)
	assert.ErrorIs(t, err, ErrNotFinite)
	assert.Equal(t, text, "")
	assert.Equal(t, len(ids), 0)
}

func TestDecodeCancelTakesEffectWithinAStep(t *testing.T) {
	t.Parallel()
	l := startDecode(t, nil)
	var steps atomic.Int32
	entered, gate := make(chan struct{}), make(chan struct{})
	l.model.before = func([]compute.Span) error {
		if steps.Add(1) == 3 {
			close(entered)
			<-gate
		}
		return nil
	}
	r := l.start(t, owner(1), prompt(20, 1), 500)
	<-entered
	var g errgroup.Group
	g.Go(func() error { r.Close(); return nil })
	for !r.canceled.Load() {
		time.Sleep(time.Millisecond)
	}
	close(gate)
	assert.NoError(t, g.Wait())
	assert.Equal(t, steps.Load(), 3)
	assert.Equal(t, r.Output(), 2)
	_, err := r.Next(t.Context())
	assert.ErrorIs(t, err, ErrCanceled)
	st := l.dst.Stats()
	assert.Equal(t, st.Free, st.Pages)
}

// A run that is paused because nobody takes its text can be canceled as well.
func TestDecodeCancelPaused(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := startDecode(t, func(o *DecodeOptions) { o.Mailbox = 2; o.SlowLimit = time.Hour })
		defer l.stop()
		r := l.start(t, owner(1), prompt(20, 1), 200)
		synctest.Wait()
		began := time.Now()
		r.Close()
		assert.Equal(t, time.Since(began), 0)
		assert.Equal(t, r.Output(), 2)
	})
}

// A consumer that does not take its text neither stalls the others nor keeps
// its pages for ever.
func TestDecodeSlowConsumer(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := startDecode(t, func(o *DecodeOptions) { o.Mailbox = 4; o.SlowLimit = time.Second })
		defer l.stop()
		slow := l.start(t, owner(1), prompt(20, 1), 200)
		for range 3 { // one that keeps up is not disturbed
			r := l.start(t, owner(2), prompt(10, 2), 50)
			_, ids, err := drain(t.Context(), r)
			assert.ErrorIs(t, err, io.EOF)
			assert.Equal(t, len(ids), 50)
			r.Close()
		}
		assert.Equal(t, slow.Output(), 4)
		// One that wakes up in time goes on where it was.
		time.Sleep(900 * time.Millisecond)
		d, err := slow.Next(t.Context())
		assert.NoError(t, err)
		assert.Equal(t, d.IDs, fakeAnswer(prompt(20, 1), 4))
		synctest.Wait()
		assert.Equal(t, slow.Output(), 8)
		time.Sleep(1100 * time.Millisecond)
		_, err = slow.Next(t.Context())
		assert.ErrorIs(t, err, ErrSlowConsumer)
		slow.Close()
	})
}

// A pass that fails as a whole is repeated alone for each sequence.
func TestDecodeFailureHitsTheCulpritOnly(t *testing.T) {
	t.Parallel()
	l := startDecode(t, nil)
	boom := errors.New("boom")
	l.model.before = func(spans []compute.Span) error {
		for _, s := range spans {
			if s.Pos == 33 {
				return boom
			}
		}
		return nil
	}
	bad := l.start(t, owner(1), prompt(20, 1), 100)
	var good []*Run
	for i := range 3 {
		good = append(good, l.start(t, owner(2), prompt(3, i), 25))
	}
	for i, r := range good {
		_, ids, err := drain(t.Context(), r)
		assert.ErrorIs(t, err, io.EOF)
		assert.Equal(t, ids, fakeAnswer(prompt(3, i), 25))
	}
	_, _, err := drain(t.Context(), bad)
	assert.ErrorIs(t, err, ErrModel)
	assert.ErrorIs(t, err, boom)
}

func TestDecodeModelMustWrite(t *testing.T) {
	t.Parallel()
	l := startDecode(t, nil)
	l.model.short = true
	_, _, err := drain(t.Context(), l.start(t, owner(1), prompt(20, 1), 100))
	assert.ErrorIs(t, err, ErrModel)
}

func TestDecodeLeaseEnds(t *testing.T) {
	t.Parallel()
	l := startDecode(t, nil)
	p := prompt(16, 1)
	// A lease for 16 more positions, and a request for more than that.
	r, err := l.Start(Request{Committed: l.commit(t, owner(1), p, 16), LastToken: p[15], MaxOutput: 100})
	assert.NoError(t, err)
	defer r.Close()
	_, _, err = drain(t.Context(), r)
	assert.ErrorIs(t, err, ErrPages)
	assert.ErrorIs(t, err, kv.ErrNoCredit)
}

func TestDecodeStartRefuses(t *testing.T) {
	t.Parallel()
	l := startDecode(t, nil)
	for name, change := range map[string]func(*Request){
		"last token": func(r *Request) { r.LastToken = fakeVocab },
		"negative":   func(r *Request) { r.LastToken = -1 },
		"no output":  func(r *Request) { r.MaxOutput = 0 },
		"sampling":   func(r *Request) { r.Params = sample.Params{TopP: 2} },
	} {
		req := Request{Committed: l.commit(t, owner(1), prompt(20, 1), 10), LastToken: 1, MaxOutput: 10}
		change(&req)
		_, err := l.Start(req)
		if !errors.Is(err, ErrRequest) {
			t.Fatalf("%s: %v", name, err)
		}
		st := l.dst.Stats()
		assert.Equal(t, st.Free, st.Pages)
	}
	// A proof makes one sequence.
	p := prompt(20, 1)
	req := Request{Committed: l.commit(t, owner(1), p, 10), LastToken: p[19], MaxOutput: 10}
	r, err := l.Start(req)
	assert.NoError(t, err)
	defer r.Close()
	_, err = l.Start(req)
	assert.ErrorIs(t, err, kv.ErrStale)
}

func TestDecodeStops(t *testing.T) {
	t.Parallel()
	l := startDecode(t, func(o *DecodeOptions) { o.Mailbox = 2; o.SlowLimit = time.Hour })
	r := l.start(t, owner(1), prompt(20, 1), 100)
	waiting := l.commit(t, owner(1), prompt(20, 1), 100)
	l.stop()
	_, _, err := drain(t.Context(), r)
	assert.ErrorIs(t, err, ErrStopped)
	r.Close()
	_, err = l.Start(Request{Committed: waiting, LastToken: 1, MaxOutput: 1})
	assert.ErrorIs(t, err, ErrStopped)
	st := l.dst.Stats()
	assert.Equal(t, st.Free, st.Pages)
}

func TestDecodeNextHonoursContext(t *testing.T) {
	t.Parallel()
	l := startDecode(t, nil)
	gate := make(chan struct{})
	l.model.before = func([]compute.Span) error { <-gate; return nil }
	r := l.start(t, owner(1), prompt(20, 1), 3)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := r.Next(ctx)
	assert.ErrorIs(t, err, context.Canceled)
	close(gate)
	_, ids, err := drain(t.Context(), r)
	assert.ErrorIs(t, err, io.EOF)
	assert.Equal(t, len(ids), 3)
}

// What a run computed with is overwritten when it ends, however it does: the
// logits, the keys and values taken as proof, the ids drawn so far, the text
// that is held back.
func TestDecodeOverwritesBuffers(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		max   int
		spoil int // position whose value differs from what was pulled; 0 is none
		leave bool
		want  error
	}{
		"finished":     {max: 3, want: io.EOF},
		"canceled":     {max: 10, leave: true, want: ErrCanceled},
		"pass fails":   {max: 10, want: ErrModel},
		"proof fails":  {max: 10, spoil: 7, want: ErrRecompute},
		"left at once": {max: 10, want: ErrCanceled},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := startDecode(t, func(o *DecodeOptions) { o.Mailbox = 1; o.SlowLimit = time.Hour })
			runs := make(chan *Run, 1)
			var buffers [][]byte // of the loop until the run is done
			var logits []float32
			take := sync.OnceFunc(func() { // in the first pass
				r := <-runs
				buffers, logits = append(buffers, r.proof), r.logits
				if name == "left at once" {
					r.canceled.Store(true)
				}
			})
			l.model.before = func([]compute.Span) error {
				take()
				if name == "pass fails" {
					return errors.New("no")
				}
				return nil
			}
			l.model.spoil = func(pos int, sum float32) float32 {
				if c.spoil > 0 && pos == c.spoil {
					return sum + 1
				}
				return sum
			}
			p := prompt(20, 1)
			r, err := l.Start(Request{
				Committed: l.commit(t, owner(1), p, c.max), LastToken: p[19], MaxOutput: c.max,
				Params: sample.Params{Temperature: 1, TopP: 1, FrequencyPenalty: 1}, Stops: []string{"ABSENT"},
			})
			assert.NoError(t, err)
			t.Cleanup(r.Close)
			sampler, stop := r.sampler, r.stop
			runs <- r
			if errors.Is(c.want, io.EOF) || name == "canceled" {
				d, err := r.Next(t.Context())
				assert.NoError(t, err)
				assert.Equal(t, len(d.IDs), 1)
			}
			if c.leave {
				r.Close()
			}
			_, _, err = drain(t.Context(), r)
			assert.ErrorIs(t, err, c.want)
			<-r.done
			assert.Equal(t, len(buffers[0]), geometry.TokenBytes())
			assert.False(t, slices.ContainsFunc(buffers[0], func(b byte) bool { return b != 0 }))
			assert.Equal(t, len(logits), fakeVocab)
			assert.False(t, slices.ContainsFunc(logits, func(f float32) bool { return f != 0 }))
			_, err = sampler.Next(make([]float32, fakeVocab))
			assert.ErrorIs(t, err, sample.ErrClosed) // which overwrites, see there
			assert.True(t, stop.Stopped())
			assert.True(t, r.input == [1]int32{} && r.seq == nil && r.text == nil && r.logits == nil && r.proof == nil)
		})
	}
}
