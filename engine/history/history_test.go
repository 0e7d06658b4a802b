package history

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/kv/kvtest"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	epoch = id.Epoch{1, 2, 3}
	noon  = time.UnixMicro(1_800_000_000_000_000).UTC()
)

// lives makes the events of so many made-up grants.
func lives(n int, seed uint64) (out []Event) {
	r := rand.New(rand.NewPCG(seed, 1))
	at := noon
	for i := range n {
		at = at.Add(time.Duration(r.IntN(1000)) * time.Microsecond)
		e := kv.Event{
			Seq: uint64(i + 1), Kind: kv.EventKind(1 + r.IntN(6)), First: r.Uint32N(1 << 20), Count: 1 + r.Uint32N(64), Generation: r.Uint64(),
			Owner: kvtest.Owner(r.Uint64N(5)), Lease: id.Lease{byte(r.IntN(9))},
		}
		switch e.Kind {
		case kv.EventScrub:
			e.Method = kv.ScrubMethod(1 + r.IntN(2))
		case kv.EventQuarantine:
			e.Reason = kv.QuarantineReason(1 + r.IntN(2))
		}
		out = append(out, Event{e, at})
	}
	return out
}

func TestBlockRoundTrip(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 2, 1000, MaxEvents} {
		want := lives(n, uint64(n))
		b := encode(epoch, 7, [32]byte{9}, want)
		h, got, err := Decode(b)
		assert.NoError(t, err)
		assert.Equal(t, got, want)
		assert.Equal(t, h.Number, uint64(7))
		assert.Equal(t, h.Prev, [32]byte{9})
		assert.Equal(t, h.Epoch, epoch)
		again, err := DecodeHeader(b)
		assert.NoError(t, err)
		assert.Equal(t, again, h)
		assert.True(t, len(b) <= MaxBlockBytes)
		if n == MaxEvents {
			t.Logf("%d bytes an event", len(b)/n)
		}
	}
	h, events, err := Decode(encodeGap(epoch, 3, [32]byte{1}, 5, 9))
	assert.NoError(t, err)
	assert.True(t, h.Gap && events == nil && h.FirstSeq == 5 && h.LastSeq == 9)
}

// Whatever is changed in a block, it is no block any more, or not the one that
// the next block names.
func TestChain(t *testing.T) {
	t.Parallel()
	events := lives(300, 1)
	var blocks [][]byte
	var link Link
	for i := 0; i < 300; i += 100 {
		blocks = append(blocks, encode(epoch, uint64(len(blocks)+1), link.Hash, events[i:i+100]))
		var err error
		_, link, err = link.Next(epoch, blocks[len(blocks)-1])
		assert.NoError(t, err)
	}
	assert.Equal(t, link, Link{3, 300, Hash(blocks[2])})
	gap := encodeGap(epoch, 4, link.Hash, 301, 400)
	_, after, err := link.Next(epoch, gap)
	assert.NoError(t, err)
	assert.Equal(t, after.LastSeq, uint64(400))

	follow := func(bs ...[]byte) error {
		var l Link
		for _, b := range bs {
			var err error
			if _, l, err = l.Next(epoch, b); err != nil {
				return err
			}
		}
		return nil
	}
	for name, bs := range map[string][][]byte{
		"missing":    {blocks[0], blocks[2]},
		"twice":      {blocks[0], blocks[0]},
		"reordered":  {blocks[1], blocks[0]},
		"beginning":  {blocks[1]},
		"other gap":  {blocks[0], encodeGap(epoch, 2, Hash(blocks[0]), 102, 200)},
		"other run":  {encode(id.Epoch{9}, 1, [32]byte{}, events[:1])},
		"other past": {blocks[0], encode(epoch, 2, [32]byte{1}, events[100:200])},
	} {
		if err := follow(bs...); !errors.Is(err, ErrBlock) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for at := range blocks[0] {
		b := append([]byte(nil), blocks[0]...)
		b[at] ^= 4
		if follow(b, blocks[1]) == nil {
			t.Fatalf("byte %d can be changed", at)
		}
		if follow(b[:at]) == nil {
			t.Fatalf("cut at %d", at)
		}
	}
	assert.True(t, follow(append(blocks[0][:len(blocks[0]):len(blocks[0])], 0)) != nil)
}

func FuzzDecode(f *testing.F) {
	f.Add(encode(epoch, 1, [32]byte{}, lives(3, 1)))
	f.Add(encodeGap(epoch, 1, [32]byte{}, 1, 2))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, events, err := Decode(b)
		if err != nil {
			if !errors.Is(err, ErrBlock) {
				t.Fatal(err)
			}
			return
		}
		if h.Gap {
			return
		}
		// The body has one form, whatever it was deflated with.
		again, _, err := Decode(encode(h.Epoch, h.Number, h.Prev, events))
		if err != nil || again != h {
			t.Fatalf("%+v, %v", again, err)
		}
	})
}

// shelf is where blocks go; it can be out of reach.
type shelf struct {
	mu     sync.Mutex
	link   Link
	events []Event
	gaps   [][2]uint64
	away   bool
	calls  int
}

func (s *shelf) ship(_ context.Context, blocks [][]byte) (uint64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls++
	if s.away {
		return 0, errors.New("away")
	}
	for _, b := range blocks {
		if h, err := DecodeHeader(b); err == nil && h.Number <= s.link.Number {
			continue // delivered before, but the answer was lost
		}
		h, link, err := s.link.Next(epoch, b)
		if err != nil {
			return s.link.Number, err
		}
		if h.Gap {
			s.gaps = append(s.gaps, [2]uint64{h.FirstSeq, h.LastSeq})
		}
		_, events, _ := Decode(b)
		s.link, s.events = link, append(s.events, events...)
	}
	return s.link.Number, nil
}

func (s *shelf) set(away bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.away = away
}

// Everything that a real pool tells arrives, in order, within a second.
func TestWriterDelivers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &shelf{}
		w := NewWriter(epoch, time.Now, s.ship)
		var told []kv.Event
		pool := kvtest.Pool(t, kv.Config{OnEvent: func(e kv.Event) { told = append(told, e); w.Note(e) }})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- w.Run(ctx) }()
		kvtest.Sealed(t, pool, kvtest.Owner(1), 60, 1).Release()
		time.Sleep(1100 * time.Millisecond)
		synctest.Wait()
		assert.Equal(t, w.Waiting(), 0)
		assert.Equal(t, len(s.events), len(told))
		kvtest.Sealed(t, pool, kvtest.Owner(2), 60, 1).Release()
		cancel() // what is left is delivered at the end
		assert.NoError(t, <-done)
		assert.Equal(t, len(s.events), len(told))
		for i, e := range s.events {
			assert.Equal(t, e.Event, told[i])
		}
	})
}

// While nobody takes blocks nothing waits for them; what does not fit is lost
// and the history says so.
func TestWriterOutage(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &shelf{away: true}
		w := NewWriter(epoch, time.Now, s.ship)
		w.limit = 50
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- w.Run(ctx) }()
		seq := uint64(0)
		note := func(n int) {
			for range n {
				seq++
				w.Note(kv.Event{Seq: seq, Kind: kv.EventGrant, Count: 1})
			}
		}
		for range 2 * maxPending { // one block a second, until no more may wait
			note(1)
			time.Sleep(time.Second)
		}
		note(100)
		s.set(false)
		time.Sleep(2100 * time.Millisecond)
		synctest.Wait()
		assert.Equal(t, w.Waiting(), 0)
		note(1)
		cancel()
		assert.NoError(t, <-done)
		assert.Equal(t, s.link.LastSeq, seq)
		assert.Equal(t, len(s.gaps), 1)
		lost := s.gaps[0][1] - s.gaps[0][0] + 1
		assert.Equal(t, uint64(len(s.events))+lost, seq)
		assert.True(t, lost > 50)
	})
}

// An end that nobody hears of is bounded, and a shelf with another history of
// the epoch is an error at once.
func TestWriterGivesUp(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := NewWriter(epoch, time.Now, (&shelf{away: true}).ship)
		w.Note(kv.Event{Seq: 1, Kind: kv.EventGrant, Count: 1})
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		began := time.Now()
		assert.True(t, w.Run(ctx) != nil)
		assert.True(t, time.Since(began) <= lastWords)

		s := &shelf{link: Link{Number: 1, LastSeq: 3}}
		w = NewWriter(epoch, time.Now, s.ship)
		w.Note(kv.Event{Seq: 1, Kind: kv.EventGrant, Count: 1})
		w.ship = func(context.Context, [][]byte) (uint64, error) { return 5, nil }
		assert.ErrorIs(t, w.Run(t.Context()), ErrBlock)
	})
}

func BenchmarkNote(b *testing.B) {
	w := NewWriter(epoch, time.Now, nil)
	for i := range b.N {
		if i%60000 == 0 {
			w.events = w.events[:0]
		}
		w.Note(kv.Event{Seq: uint64(i), Kind: kv.EventGrant, Count: 1})
	}
}
