package sim_test

import (
	"bytes"
	"context"
	"errors"
	"math"
	"slices"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sync/errgroup"

	"bulkhead.dev/engine/compute"
	"bulkhead.dev/engine/fabric"
	"bulkhead.dev/engine/fabric/fabrictest"
	"bulkhead.dev/engine/handoff"
	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/kv/kvtest"
	"bulkhead.dev/engine/sched"
	"bulkhead.dev/engine/sim"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
)

const vocab = 64

// piece spells ids as the words "aa" to "zz" and, from 26 on, as no text.
func piece(id int32) ([]byte, bool) {
	if id < 26 {
		return bytes.Repeat([]byte{'a' + byte(id)}, 2), true
	}
	return []byte{0xff, byte(id)}, true
}

func newModel(t testing.TB, change func(*sim.Options)) *sim.Model {
	t.Helper()
	o := sim.Options{Vocab: vocab, Context: 4096, Piece: piece, DType: kv.F16, Sleep: func(time.Duration) { t.Error("slept without a latency") }}
	if change != nil {
		change(&o)
	}
	m, err := sim.New(o)
	assert.NoError(t, err)
	return m
}

func prompt(n, seed int) []int32 {
	p := make([]int32, n)
	for i := range p {
		p[i] = int32((i*7 + seed*13) % vocab)
	}
	return p
}

// sequence is a prompt that is computed into pages of its own.
type sequence struct {
	filler *kv.Filler
	pos    int
}

func newSequence(t testing.TB, p *kv.Pool, owner uint64, tokens int) *sequence {
	t.Helper()
	pages := p.Geometry().PagesFor(tokens)
	credits, err := p.Reserve(kvtest.Owner(owner), pages)
	assert.NoError(t, err)
	f, err := credits.Fill(id.NewLease())
	assert.NoError(t, err)
	t.Cleanup(f.Abort)
	assert.NoError(t, f.Grant(pages))
	return &sequence{filler: f}
}

// pass computes one span for each sequence, in one pass.
func pass(t testing.TB, m *sim.Model, seqs []*sequence, tokens [][]int32) [][]float32 {
	t.Helper()
	var spans []compute.Span
	var tables []*kv.Table
	for i, s := range seqs {
		table, err := s.filler.Table(s.pos, len(tokens[i]))
		assert.NoError(t, err)
		tables = append(tables, table)
		spans = append(spans, compute.Span{Tokens: tokens[i], Pos: s.pos, Pages: table, Logits: make([]float32, vocab)})
	}
	assert.NoError(t, m.Forward(spans))
	var logits [][]float32
	for i, s := range seqs {
		assert.Equal(t, spans[i].Wrote, len(tokens[i]))
		assert.NoError(t, tables[i].Advance(spans[i].Wrote))
		tables[i].Close()
		s.pos += len(tokens[i])
		logits = append(logits, spans[i].Logits)
	}
	return logits
}

// memory is what the pages of a sealed sequence hold.
func memory(t testing.TB, s *sequence) []byte {
	t.Helper()
	sealed, err := s.filler.Seal(s.pos)
	assert.NoError(t, err)
	defer sealed.Release()
	var all []byte
	for _, ref := range kvtest.Refs(sealed.Extents()) {
		assert.NoError(t, sealed.View(ref, func(page []byte) error { all = append(all, page...); return nil }))
	}
	return all
}

// Keys, values and logits are the same to the bit whatever the chunks, the
// batch, the place in it and the pages.
func TestBatchInvariance(t *testing.T) {
	t.Parallel()
	const n = 75
	for _, dtype := range []kv.DType{kv.F16, kv.F32} {
		m := newModel(t, func(o *sim.Options) { o.DType = dtype })
		pool := kvtest.Pool(t, kv.Config{Geometry: m.Geometry(), Pages: 64})
		alone := newSequence(t, pool, 1, n)
		want := pass(t, m, []*sequence{alone}, [][]int32{prompt(n, 1)})[0]
		wantPages := memory(t, alone)
		assert.Equal(t, max(slices.Max(want), 0), 0)

		other, same, third := newSequence(t, pool, 2, n), newSequence(t, pool, 1, n), newSequence(t, pool, 3, n)
		var got []float32
		for from := 0; from < n; from += 7 {
			to := min(from+7, n)
			got = pass(t, m, []*sequence{other, same, third}, [][]int32{prompt(n, 2)[from:to], prompt(n, 1)[from:to], prompt(n, 3)[from:to]})[1]
		}
		assert.Equal(t, got, want)
		assert.True(t, bytes.Equal(memory(t, same), wantPages))
		assert.False(t, bytes.Equal(memory(t, other), wantPages))
	}
}

// A pass over memory that nobody wrote gives no logits.
func TestUnwrittenMemory(t *testing.T) {
	t.Parallel()
	m := newModel(t, nil)
	for _, pattern := range []kv.Pattern{kv.Zero, kv.NaN} {
		pool := kvtest.Pool(t, kv.Config{Geometry: m.Geometry(), Pages: 4, Pattern: pattern})
		s := newSequence(t, pool, 1, 32)
		table, err := s.filler.Table(0, 32)
		assert.NoError(t, err)
		logits := make([]float32, vocab)
		assert.NoError(t, m.Forward([]compute.Span{{Tokens: []int32{1}, Pos: 20, Pages: table, Logits: logits}}))
		table.Close()
		assert.True(t, math.IsNaN(float64(logits[0])))
	}
}

func TestSpansAreChecked(t *testing.T) {
	t.Parallel()
	m := newModel(t, nil)
	pool := kvtest.Pool(t, kv.Config{Geometry: m.Geometry(), Pages: 4})
	s := newSequence(t, pool, 1, 16)
	table, err := s.filler.Table(0, 16)
	assert.NoError(t, err)
	defer table.Close()
	good := compute.Span{Tokens: []int32{1}, Pages: table}
	for name, change := range map[string]func(*compute.Span){
		"no tokens":     func(s *compute.Span) { s.Tokens = nil },
		"foreign token": func(s *compute.Span) { s.Tokens = []int32{vocab} },
		"before":        func(s *compute.Span) { s.Pos = -1 },
		"behind":        func(s *compute.Span) { s.Pos = 4096 },
		"few logits":    func(s *compute.Span) { s.Logits = make([]float32, 1) },
		"no pages":      func(s *compute.Span) { s.Pages = nil },
	} {
		bad := good
		change(&bad)
		spans := []compute.Span{good, bad}
		if err := m.Forward(spans); !errors.Is(err, compute.ErrSpan) || spans[0].Wrote != 0 {
			t.Errorf("%s: %v, wrote %d", name, err, spans[0].Wrote)
		}
	}
	_, err = sim.New(sim.Options{Vocab: 1, DType: kv.F16, Piece: func(int32) ([]byte, bool) { return []byte("a b"), true }})
	assert.ErrorIs(t, err, sim.ErrVocabulary)
}

func TestLatency(t *testing.T) {
	t.Parallel()
	var slept time.Duration
	m := newModel(t, func(o *sim.Options) {
		o.Latency = sim.Latency{PromptToken: time.Millisecond, Step: time.Second, Sequence: 10 * time.Second}
		o.Sleep = func(d time.Duration) { slept = d }
	})
	pool := kvtest.Pool(t, kv.Config{Geometry: m.Geometry(), Pages: 8})
	a, b := newSequence(t, pool, 1, 32), newSequence(t, pool, 2, 32)
	pass(t, m, []*sequence{a, b}, [][]int32{{1}, {2}})
	assert.Equal(t, slept, 21*time.Second)
	table, err := a.filler.Table(1, 30)
	assert.NoError(t, err)
	assert.NoError(t, m.Forward([]compute.Span{{Tokens: prompt(30, 1), Pos: 1, Pages: table}}))
	table.Close()
	assert.Equal(t, slept, 30*time.Millisecond)
}

// legs are two pools with a hand-off between them and a decode loop.
type legs struct {
	src, dst *kv.Pool
	server   *fabric.Server
	receiver *handoff.Receiver
	decode   *sched.Decode
	epochs   [2]id.Epoch
	prefill  *sim.Model
	spoil    func(addrs []uintptr) // changes pages before they are sealed
	fault    fabrictest.Fault
}

func newLegs(t *testing.T) *legs {
	t.Helper()
	m := newModel(t, nil)
	l := &legs{prefill: m, server: fabric.NewServer(fabric.ServerOptions{}), epochs: [2]id.Epoch{{1}, {2}}}
	l.src = kvtest.Pool(t, kv.Config{Geometry: m.Geometry(), Pages: 64, Pattern: kv.NaN})
	l.dst = kvtest.Pool(t, kv.Config{Geometry: m.Geometry(), Pages: 64, Pattern: kv.NaN})
	l.receiver = handoff.NewReceiver(handoff.ReceiverConfig{Epoch: l.epochs[1], Geometry: m.Geometry()})
	l.decode = sched.NewDecode(sched.DecodeOptions{Model: newModel(t, nil), NewText: func() sched.Text { return &text{} },
		IsEOG: func(int32) bool { return false }, Mailbox: 1000, SlowLimit: time.Minute, Now: time.Now})
	ctx, cancel := context.WithCancel(t.Context())
	var g errgroup.Group
	g.Go(func() error { return l.decode.Run(ctx) })
	t.Cleanup(func() { cancel(); assert.NoError(t, g.Wait()) })
	return l
}

type text struct{}

func (*text) Push(id int32) string { p, _ := piece(id); return string(p) }
func (*text) Flush() string        { return "" }

// answer serves a prompt.
func (l *legs) answer(owner uint64, tokens []int32, maxOutput int) (out string, err error) {
	g := l.prefill.Geometry()
	credits, err := l.src.Reserve(kvtest.Owner(owner), g.PagesFor(len(tokens)))
	if err != nil {
		return "", err
	}
	f, err := credits.Fill(id.NewLease())
	if err != nil {
		return "", err
	}
	defer f.Abort()
	if err := f.Grant(g.PagesFor(len(tokens))); err != nil {
		return "", err
	}
	table, err := f.Table(0, len(tokens))
	if err != nil {
		return "", err
	}
	spans := []compute.Span{{Tokens: tokens, Pages: table}}
	err = newModelQuiet().Forward(spans)
	if l.spoil != nil {
		addrs, _ := table.Resolve(nil, len(tokens))
		l.spoil(addrs)
	}
	err = errors.Join(err, table.Advance(spans[0].Wrote))
	table.Close()
	if err != nil {
		return "", err
	}
	sealed, err := f.Seal(len(tokens))
	if err != nil {
		return "", err
	}
	meta := handoff.Meta{Version: handoff.Early, Request: id.Request{byte(owner)}, Transfer: id.NewTransfer(), Nonce: id.NewNonce(),
		PrefillEpoch: l.epochs[0], DecodeEpoch: l.epochs[1], TokenDigest: handoff.TokenDigest(tokens)}
	offer := handoff.NewOffer(l.server, meta)
	defer offer.Abort()
	if err := offer.Complete(sealed); err != nil {
		return "", err
	}
	if credits, err = l.dst.Reserve(kvtest.Owner(owner), g.PagesFor(len(tokens)+maxOutput)); err != nil {
		return "", err
	}
	in, err := l.receiver.Expect(handoff.Expect{Version: meta.Version, Request: meta.Request, Transfer: meta.Transfer, Nonce: meta.Nonce,
		Owner: kvtest.Owner(owner), Lease: id.NewLease(), PrefillEpoch: meta.PrefillEpoch, TokenDigest: meta.TokenDigest, Tokens: len(tokens),
	}, credits, fabrictest.Faulty{Reader: l.server.Local(), Fault: l.fault})
	if err != nil {
		return "", err
	}
	defer in.Close()
	root, err := l.receiver.Pull(context.Background(), meta.Transfer, offer.Manifest())
	if err != nil {
		return "", err
	}
	if err := offer.Ack(root); err != nil {
		return "", err
	}
	c, err := in.Wait(context.Background())
	if err != nil {
		return "", err
	}
	run, err := l.decode.Start(sched.Request{Committed: c, LastToken: tokens[len(tokens)-1], MaxOutput: maxOutput})
	if err != nil {
		return "", err
	}
	defer run.Close()
	for {
		d, err := run.Next(context.Background())
		out += d.Text
		if err != nil {
			if run.Result().Finish == sched.MaxTokens {
				return out, nil
			}
			return out, err
		}
	}
}

// newModelQuiet is a model for one pass, so that prompts may be computed at once.
func newModelQuiet() *sim.Model {
	m, err := sim.New(sim.Options{Vocab: vocab, Context: 4096, Piece: piece, DType: kv.F16})
	if err != nil {
		panic(err)
	}
	return m
}

// Greedy answers are the same alone and among others, depend on the prompt, and
// are words.
func TestAnswers(t *testing.T) {
	t.Parallel()
	l := newLegs(t)
	const many, tokens = 8, 40
	var want [many]string
	for i := range want {
		var err error
		want[i], err = l.answer(uint64(i+1), prompt(50, i), tokens)
		assert.NoError(t, err)
		assert.Equal(t, len(want[i]), 2*tokens)
		for _, b := range []byte(want[i]) {
			assert.True(t, b >= 'a' && b <= 'z')
		}
		assert.False(t, slices.Contains(want[:i], want[i]))
	}
	var g errgroup.Group
	for i := range want {
		g.Go(func() error {
			got, err := l.answer(uint64(i+1), prompt(50, i), tokens)
			if err == nil && got != want[i] {
				t.Errorf("prompt %d: another answer than alone", i)
			}
			return err
		})
	}
	assert.NoError(t, g.Wait())
}

// A page that was changed on the way does not pass its digest.
func TestWrongPageOnTheWay(t *testing.T) {
	t.Parallel()
	for _, f := range []fabrictest.Fault{fabrictest.FlipBit, fabrictest.SwapPages, fabrictest.WrongPage, fabrictest.ShortRead} {
		l := newLegs(t)
		l.fault = f
		_, err := l.answer(1, prompt(50, 1), 4)
		if _, ok := errors.AsType[*handoff.Refusal](err); !ok {
			t.Errorf("fault %d: %v", f, err)
		}
	}
}

// A page that is wrong already where its digest is made does not pass the proof,
// whichever page and byte it is.
func TestWrongPageAtItsSource(t *testing.T) {
	t.Parallel()
	l := newLegs(t)
	for page := range 3 {
		for at := range l.prefill.Geometry().PageBytes() {
			l.spoil = func(addrs []uintptr) {
				*(*byte)(unsafe.Add(*(*unsafe.Pointer)(unsafe.Pointer(&addrs[page])), at)) ^= 0x40
			}
			_, err := l.answer(1, prompt(48, 1), 4)
			if !errors.Is(err, sched.ErrRecompute) && !errors.Is(err, sched.ErrNotFinite) {
				t.Fatalf("page %d, byte %d: %v", page, at, err)
			}
		}
	}
	l.spoil = nil
	_, err := l.answer(1, prompt(48, 1), 4)
	assert.NoError(t, err)
}
