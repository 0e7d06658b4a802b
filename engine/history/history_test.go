package history

import (
	"bytes"
	"compress/flate"
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
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
		assert.True(t, slices.Equal(got, want))
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
	log    bytes.Buffer // of Run
	most   int          // bytes of the largest delivery
}

func (s *shelf) ship(_ context.Context, blocks [][]byte) (uint64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	size := 0
	for _, b := range blocks {
		size += len(b)
	}
	s.most = max(s.most, size)
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

func (s *shelf) options() Options {
	return Options{Epoch: epoch, Now: time.Now, Ship: s.ship, Log: slog.New(slog.NewTextHandler(&s.log, nil))}
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
		w := NewWriter(s.options())
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
		w := newWriter(s.options(), 5, 10)
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
		for range 2 * MaxPending { // one block a second, until no more may wait
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
		for _, line := range []string{"cannot be delivered", "delivered again", "has a gap"} {
			assert.Equal(t, strings.Count(s.log.String(), line), 1)
		}
	})
}

// An end that nobody hears of is bounded, and a shelf with another history of
// the epoch is an error at once.
func TestWriterGivesUp(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := NewWriter((&shelf{away: true}).options())
		w.Note(kv.Event{Seq: 1, Kind: kv.EventGrant, Count: 1})
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		began := time.Now()
		assert.True(t, w.Run(ctx) != nil)
		assert.True(t, time.Since(began) <= lastWords)

		for _, stored := range []uint64{0, 2} {
			o := (&shelf{}).options()
			o.Ship = func(context.Context, [][]byte) (uint64, error) { return stored, nil }
			w = NewWriter(o)
			w.Note(kv.Event{Seq: 1, Kind: kv.EventGrant, Count: 1})
			assert.ErrorIs(t, w.Run(t.Context()), ErrBlock)
		}
	})
}

// What gathered in an outage goes out in pieces that the other side takes.
func TestDeliveryIsBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &shelf{away: true}
		w := newWriter(s.options(), buffers, 256)
		w.most = 16 << 10
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- w.Run(ctx) }()
		events := lives(30*256, 5)
		for i, e := range events {
			w.Note(e.Event)
			if i%256 == 255 {
				synctest.Wait()
			}
		}
		s.set(false)
		time.Sleep(1100 * time.Millisecond)
		cancel()
		assert.NoError(t, <-done)
		assert.Equal(t, len(s.events), len(events))
		assert.Equal(t, s.link.Number, uint64(30))
		assert.True(t, s.most > 8<<10 && s.most <= 16<<10)
		assert.True(t, MaxBlockBytes < MaxDelivery)
	})
}

// A clock that is set back does not make times go back.
func TestClockSetBack(t *testing.T) {
	t.Parallel()
	clock := []time.Time{noon, noon.Add(2), noon.Add(-time.Hour), {}, noon.Add(time.Second)}
	s := &shelf{}
	o := s.options()
	o.Now = func() time.Time { now := clock[0]; clock = clock[1:]; return now }
	w := NewWriter(o)
	for seq := range uint64(5) {
		w.Note(kv.Event{Seq: seq + 1, Kind: kv.EventGrant, Count: 1})
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	assert.NoError(t, w.Run(ctx))
	var at []time.Time
	for _, e := range s.events {
		at = append(at, e.At)
	}
	assert.Equal(t, at, []time.Time{noon, noon, noon, noon, noon.Add(time.Second)})
}

// Many pools' worth of noise beside a Run that cuts: nothing is doubled, lost or
// out of order. The race detector watches the buffers change hands.
func TestNoteBesideRun(t *testing.T) {
	t.Parallel()
	s := &shelf{}
	w := newWriter(s.options(), 3, 64)
	w.every = time.Millisecond
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- w.Run(ctx) }()
	const n = 50_000
	for seq := range uint64(n) {
		w.Note(kv.Event{Seq: seq + 1, Kind: kv.EventGrant, Count: 1, Generation: seq + 1})
	}
	cancel()
	assert.NoError(t, <-done)
	assert.Equal(t, s.link.LastSeq, uint64(n))
	lost := uint64(0)
	for _, g := range s.gaps {
		lost += g[1] - g[0] + 1
	}
	assert.Equal(t, uint64(len(s.events))+lost, uint64(n))
}

// A block in any other form than the writer's is refused, whoever made it.
func TestOneForm(t *testing.T) {
	t.Parallel()
	events := []Event{
		{kv.Event{Seq: 1, Kind: kv.EventGrant, First: 1, Count: 2, Generation: 1, Owner: kvtest.Owner(1), Lease: id.Lease{1}}, noon},
		{kv.Event{Seq: 2, Kind: kv.EventScrub, First: 1, Count: 2, Generation: 1, Owner: kvtest.Owner(1), Lease: id.Lease{1}, Method: kv.AtGrant}, noon},
	}
	// owners (1), leases (1), kinds, reasons and methods, owners, leases, pages, ...
	const kinds = 1 + 16 + 1 + 16
	body := encodeBody(events)
	with := func(at int, by ...byte) []byte {
		out := append([]byte(nil), body[:at]...)
		return append(append(out, by...), body[at+len(by):]...)
	}
	for name, b := range map[string][]byte{
		"no such kind":        with(kinds, 0),
		"no such kind, above": with(kinds, 7),
		"no such method":      with(kinds+3, 3<<4),
		"no such reason":      with(kinds+2, 3),
		"grant with a method": with(kinds+2, 1<<4),
		"scrub without one":   with(kinds+3, 0),
		"quarantine for none": with(kinds, byte(kv.EventQuarantine)),
		"no such owner":       with(kinds+4, 1),
		"no such lease":       with(kinds+6, 1),
		"page below zero":     with(kinds+8, 1),
		"no pages":            with(kinds+10, 0),
		"an owner twice":      append(append(append([]byte{2}, body[1:17]...), body[1:17]...), body[17:]...),
		"nothing":             {},
		"more":                append(body[:len(body):len(body)], 0),
		"less":                body[:len(body)-1],
	} {
		if _, _, err := Decode(wrap(events, b)); !errors.Is(err, ErrBlock) {
			t.Errorf("%s: %v", name, err)
		}
	}
	_, _, err := Decode(wrap(events, body)) // what the cases differ from
	assert.NoError(t, err)
	// The header is not believed either.
	for name, change := range map[string]func(*Header){
		"page":  func(h *Header) { h.MaxPage++ },
		"grant": func(h *Header) { h.Granted++ },
		"time":  func(h *Header) { h.LastAt = h.LastAt.Add(time.Second) },
		"end":   func(h *Header) { h.LastAt = h.FirstAt.Add(-time.Second) },
	} {
		h := describe(events)
		h.Epoch, h.Number = epoch, 1
		change(&h)
		if _, _, err := Decode(append(h.append(nil, len(body)), deflate(body)...)); !errors.Is(err, ErrBlock) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func wrap(events []Event, body []byte) []byte {
	h := describe(events)
	h.Epoch, h.Number = epoch, 1
	return append(h.append(nil, len(body)), deflate(body)...)
}

func deflate(b []byte) []byte {
	var out bytes.Buffer
	w, _ := flate.NewWriter(&out, flate.BestCompression)
	_, _ = w.Write(b)
	_ = w.Close()
	return out.Bytes()
}

// Noting allocates nothing: it happens under the lock of a pool.
func TestNoteAllocatesNothing(t *testing.T) {
	w := NewWriter((&shelf{}).options())
	seq := uint64(0)
	assert.Equal(t, testing.AllocsPerRun(2*buffers*MaxEvents, func() {
		seq++
		w.Note(kv.Event{Seq: seq, Kind: kv.EventGrant, Count: 1})
	}), 0.0)
	assert.Equal(t, w.Waiting(), int(seq))
}

func BenchmarkNote(b *testing.B) {
	w := NewWriter((&shelf{}).options())
	for i := range b.N {
		w.Note(kv.Event{Seq: uint64(i) + 1, Kind: kv.EventGrant, Count: 1})
		if i%MaxEvents == MaxEvents-1 {
			events, _, _ := w.take()
			w.giveBack(events)
		}
	}
}

// BenchmarkEncode cuts a full block of what requests of a pool leave.
func BenchmarkEncode(b *testing.B) {
	events := requests(MaxEvents)
	b.ReportAllocs()
	for b.Loop() {
		block := encode(epoch, 1, [32]byte{}, events)
		b.ReportMetric(float64(len(block))/MaxEvents, "B/event")
	}
}

// requests makes events as requests make them: a few pages each, granted one by
// one while an answer grows, given back together, by 50 owners.
func requests(n int) []Event {
	r := rand.New(rand.NewPCG(1, 1))
	at, generation := noon, uint64(0)
	var out []Event
	for len(out) < n {
		base := kv.Event{Owner: kvtest.Owner(r.Uint64N(50)), Lease: id.Lease{byte(r.Uint32()), byte(r.Uint32()), byte(r.Uint32()), byte(r.Uint32())}, First: r.Uint32N(4000), Count: 1 + r.Uint32N(64)}
		add := func(kind kv.EventKind, m kv.ScrubMethod) {
			at = at.Add(time.Duration(r.IntN(3000)) * time.Microsecond)
			e := base
			e.Kind, e.Method, e.Generation = kind, m, generation
			out = append(out, Event{e, at})
		}
		for range 4 {
			generation++
			add(kv.EventGrant, kv.NotScrubbed)
			add(kv.EventScrub, kv.AtGrant)
			base.First, base.Count = base.First+base.Count, 1
		}
		add(kv.EventSeal, kv.NotScrubbed)
		add(kv.EventFree, kv.NotScrubbed)
	}
	out = out[:n]
	for i := range out {
		out[i].Seq = uint64(i + 1)
	}
	return out
}
