package sched

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"testing"

	"bulkhead.dev/engine/compute"
	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/kv/kvtest"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
	"golang.org/x/sync/errgroup"
)

// startPrefill runs a loop until the test ends.
func startPrefill(t *testing.T, m *fakeModel, chunk int) *Prefill {
	t.Helper()
	p := NewPrefill(PrefillOptions{Model: m, Geometry: geometry, Chunk: chunk, Now: clock})
	ctx, cancel := context.WithCancel(context.Background())
	var g errgroup.Group
	g.Go(func() error { return p.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		assert.NoError(t, g.Wait())
	})
	return p
}

func reserve(t testing.TB, p *kv.Pool, o id.Owner, pages int) *kv.Credits {
	t.Helper()
	c, err := p.Reserve(o, pages)
	assert.NoError(t, err)
	return c
}

func TestPrefillWritesEveryPosition(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 15, 16, 17, 31, 32, 33, 100} {
		for _, chunk := range []int{1, 7, 16, 40, 256} {
			pool, m := newPool(t, 10), &fakeModel{}
			p := startPrefill(t, m, chunk)
			got, err := p.Fill(t.Context(), Job{Credits: reserve(t, pool, owner(1), geometry.PagesFor(n)), Lease: id.NewLease(), Tokens: prompt(n, 1)})
			assert.NoError(t, err)
			assert.Equal(t, got.Tokens, n)
			assert.Equal(t, got.Sealed.Tokens(), n)
			assert.Equal(t, m.passes, (n+chunk-1)/chunk)
			assert.Equal(t, p.Tokens(), uint64(n))
			assert.Equal(t, p.Running(), 0)
			got.Sealed.Release()
		}
	}
}

// One long prompt delays a short one by a chunk, not by its length.
func TestPrefillTakesTurns(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 100)
	var mu sync.Mutex
	var order []int // length of the prompt of each pass
	gate := make(chan struct{})
	m := &fakeModel{}
	var once sync.Once
	m.before = func(s []compute.Span) error {
		once.Do(func() { <-gate })
		mu.Lock()
		defer mu.Unlock()
		order = append(order, s[0].Pos)
		return nil
	}
	p := startPrefill(t, m, 16)
	var g errgroup.Group
	fill := func(n int) {
		g.Go(func() error {
			got, err := p.Fill(context.Background(), Job{Credits: reserve(t, pool, owner(1), geometry.PagesFor(n)), Lease: id.NewLease(), Tokens: prompt(n, n)})
			if err == nil {
				got.Sealed.Release()
			}
			return err
		})
	}
	fill(160)
	for p.Running() < 1 {
		runtime.Gosched()
	}
	fill(16)
	for p.Running() < 2 {
		runtime.Gosched()
	}
	close(gate)
	assert.NoError(t, g.Wait())
	// The short prompt (position 0) is second or third, never last.
	assert.Equal(t, len(order), 11)
	assert.True(t, order[1] == 0 || order[2] == 0)
}

func TestPrefillFailures(t *testing.T) {
	t.Parallel()
	boom := errors.New("boom")
	for name, c := range map[string]struct {
		model   *fakeModel
		tokens  []int32
		credits int
		want    error
		wrote   int
	}{
		"no prompt":          {&fakeModel{}, nil, 1, ErrRequest, 0},
		"id too large":       {&fakeModel{}, []int32{1, fakeVocab}, 1, ErrRequest, 0},
		"id negative":        {&fakeModel{}, []int32{1, -1}, 1, ErrRequest, 0},
		"too few credits":    {&fakeModel{}, prompt(40, 1), 2, ErrPages, 32},
		"model fails":        {&fakeModel{before: func([]compute.Span) error { return boom }}, prompt(5, 1), 1, ErrModel, 0},
		"model writes less":  {&fakeModel{short: true}, prompt(5, 1), 1, ErrModel, 4},
		"fails in the third": {&fakeModel{before: failAt(32, boom)}, prompt(64, 1), 4, ErrModel, 32},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := newPool(t, 10)
			p := startPrefill(t, c.model, 16)
			credits := reserve(t, pool, owner(1), c.credits)
			defer credits.Return()
			got, err := p.Fill(t.Context(), Job{Credits: credits, Lease: id.NewLease(), Tokens: c.tokens})
			assert.ErrorIs(t, err, c.want)
			assert.True(t, got.Sealed == nil)
			assert.Equal(t, got.Tokens, c.wrote)
		})
	}
}

func failAt(pos int, err error) func([]compute.Span) error {
	return func(s []compute.Span) error {
		if s[0].Pos == pos {
			return err
		}
		return nil
	}
}

func TestPrefillCancelTakesEffectWithinAChunk(t *testing.T) {
	t.Parallel()
	for _, n := range []int{160, 32} { // in the middle, and in the last chunk
		pool := newPool(t, 10)
		ctx, cancel := context.WithCancel(t.Context())
		m := &fakeModel{}
		m.before = func(s []compute.Span) error {
			if s[0].Pos == 16 {
				cancel()
			}
			return nil
		}
		p := startPrefill(t, m, 16)
		got, err := p.Fill(ctx, Job{Credits: reserve(t, pool, owner(1), 10), Lease: id.NewLease(), Tokens: prompt(n, 1)})
		assert.ErrorIs(t, err, ErrCanceled)
		assert.Equal(t, got.Tokens, 32)
		assert.Equal(t, m.passes, 2)
	}
}

func TestPrefillStops(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 20)
	p := NewPrefill(PrefillOptions{Model: &fakeModel{}, Geometry: geometry, Chunk: 16, Now: clock})
	ctx, cancel := context.WithCancel(context.Background())
	m := p.opts.Model.(*fakeModel)
	m.before = func([]compute.Span) error { cancel(); return nil }
	var g errgroup.Group
	g.Go(func() error { return p.Run(ctx) })
	_, err := p.Fill(context.Background(), Job{Credits: reserve(t, pool, owner(1), 10), Lease: id.NewLease(), Tokens: prompt(160, 1)})
	assert.ErrorIs(t, err, ErrStopped)
	assert.NoError(t, g.Wait())
	_, err = p.Fill(context.Background(), Job{Credits: reserve(t, pool, owner(1), 10), Lease: id.NewLease(), Tokens: prompt(160, 1)})
	assert.ErrorIs(t, err, ErrStopped)
}

// Finished pages are passed on after each chunk but the last, and stay good
// while the rest is computed.
func TestPrefillSharesWhatIsFinished(t *testing.T) {
	t.Parallel()
	t.Run("in chunks of more than a page", func(t *testing.T) { sharesWhatIsFinished(t, 24, []int{16, 48, 64}) }) // of 24, 48 and 72
	t.Run("in chunks of less", func(t *testing.T) { sharesWhatIsFinished(t, 6, []int{16, 32, 48, 64, 80}) })
}

func sharesWhatIsFinished(t *testing.T, chunk int, want []int) {
	pool := newPool(t, 10)
	p := startPrefill(t, &fakeModel{}, chunk)
	var early []*kv.Sealed
	got, err := p.Fill(t.Context(), Job{
		Credits: reserve(t, pool, owner(1), 6), Lease: id.NewLease(), Tokens: prompt(90, 1),
		Early: func(s *kv.Sealed) { early = append(early, s) },
	})
	assert.NoError(t, err)
	assert.Equal(t, len(early), len(want))
	key := kv.DigestKey{Alg: kv.GMAC}
	whole, err := got.Sealed.Sums(key, 0)
	assert.NoError(t, err)
	for i, s := range early {
		assert.Equal(t, s.Tokens(), want[i])
		sums, err := s.Sums(key, 0)
		assert.NoError(t, err)
		assert.Equal(t, sums, whole[:want[i]/16])
		s.Release()
	}
	got.Sealed.Release()
	assert.Equal(t, pool.Stats().Free, 10)
}

// A prompt that begins with remembered pages computes the rest, and what it
// then has is the same.
func TestPrefillAfterRememberedPages(t *testing.T) {
	t.Parallel()
	pool, err := kv.New(kv.Config{Geometry: geometry, Pages: 10, CachePerOwner: 4})
	assert.NoError(t, err)
	defer func() { pool.Forget(id.Owner{}); assert.NoError(t, pool.Close()) }()
	p := startPrefill(t, &fakeModel{}, 24)
	scope := kv.CacheScope{Owner: owner(1)}
	first, err := p.Fill(t.Context(), Job{Credits: reserve(t, pool, owner(1), 6), Lease: id.NewLease(), Tokens: prompt(90, 1)})
	assert.NoError(t, err)
	assert.NoError(t, first.Sealed.Remember(scope, prompt(90, 1)))
	remembered := kvtest.Refs(first.Extents)[:4]
	first.Sealed.Release()
	computed := p.Tokens()

	start, err := pool.Recall(scope, prompt(90, 1))
	assert.NoError(t, err)
	again, err := p.Fill(t.Context(), Job{Credits: reserve(t, pool, owner(1), 6), Lease: id.NewLease(), Tokens: prompt(90, 1), Start: start})
	assert.NoError(t, err)
	assert.Equal(t, again.Cached, 64)
	assert.Equal(t, again.Tokens, 90)
	assert.Equal(t, p.Tokens()-computed, uint64(26))
	assert.Equal(t, kvtest.Refs(again.Extents)[:4], remembered)
	assert.Equal(t, len(kvtest.Refs(again.Extents)), 6)
	again.Sealed.Release()

	// Refused before anything was computed: the pages go back.
	start, err = pool.Recall(scope, prompt(90, 1))
	assert.NoError(t, err)
	credits := reserve(t, pool, owner(1), 4)
	_, err = p.Fill(t.Context(), Job{Credits: credits, Lease: id.NewLease(), Tokens: prompt(64, 1), Start: start})
	assert.ErrorIs(t, err, ErrRequest)
	credits.Return()
	assert.Equal(t, pool.Stats().Sealed, 4)
}
