package kv_test

import (
	"bytes"
	"errors"
	"fmt"
	"sync"
	"testing"

	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/kv/kvtest"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
)

var alice, bob = kvtest.Owner(1), kvtest.Owner(2)

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]kv.Config{
		"no geometry": {Pages: 1},
		"no pages":    {Geometry: kvtest.Geometry()},
		"policy":      {Geometry: kvtest.Geometry(), Pages: 1, Scrub: 9},
		"pattern":     {Geometry: kvtest.Geometry(), Pages: 1, Pattern: 9},
		"memory":      {Geometry: kvtest.Geometry(), Pages: 1, Memory: 9},
	} {
		_, err := kv.New(c)
		if err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

func TestArena(t *testing.T) {
	t.Parallel()
	for _, kind := range []kv.Memory{kv.Anonymous, kv.Memfd} {
		p := kvtest.Pool(t, kv.Config{Memory: kind, Lock: true})
		info := p.Arena()
		assert.Equal(t, info.Bytes, 16*kvtest.Geometry().PageBytes())
		assert.NoError(t, info.DumpErr)
		assert.NoError(t, info.MergeErr)
		assert.Equal(t, info.Locked, info.LockErr == nil)
		// The memory works, and the books of both kinds are the same.
		s := kvtest.Sealed(t, p, alice, 40, 1)
		seq := kvtest.Sequence(t, s, p, 3)
		s.Release()
		seq.Release()
		assert.NoError(t, p.Audit())
	}
}

func TestCredits(t *testing.T) {
	t.Parallel()
	p := kvtest.Pool(t, kv.Config{Pages: 4})
	_, err := p.Reserve(id.Owner{}, 1)
	assert.ErrorIs(t, err, kv.ErrOwner)
	_, err = p.Reserve(alice, 0)
	assert.ErrorIs(t, err, kv.ErrRange)

	three, err := p.Reserve(alice, 3)
	assert.NoError(t, err)
	_, err = p.Reserve(bob, 2)
	assert.Equal(t, assert.ErrorAs[kv.ErrExhausted](t, err), kv.ErrExhausted{Want: 2, Free: 1})
	one, err := p.Reserve(bob, 1)
	assert.NoError(t, err)
	one.Return()
	one.Return()
	assert.Equal(t, p.Stats().Free, 1)
	_, err = one.Fill(id.NewLease())
	assert.ErrorIs(t, err, kv.ErrStale)

	f, err := three.Fill(id.NewLease())
	assert.NoError(t, err)
	three.Return() // taken: does nothing
	_, err = three.Land(id.NewLease())
	assert.ErrorIs(t, err, kv.ErrStale)
	assert.Equal(t, p.Stats().Free, 1)
	assert.NoError(t, f.Grant(2))
	assert.ErrorIs(t, f.Grant(2), kv.ErrNoCredit)
	assert.ErrorIs(t, f.Grant(0), kv.ErrRange)
	assert.Equal(t, p.Stats().Credits, 1)
	assert.ErrorIs(t, p.Close(), kv.ErrBusy)
	f.Abort()
	f.Abort()
	assert.ErrorIs(t, f.Grant(1), kv.ErrStale)
	assert.Equal(t, p.Stats().Free, 4)
	assert.NoError(t, p.Audit())
}

// Whatever the interleaving, no more is promised than there is.
func TestCreditsAreExactUnderConcurrency(t *testing.T) {
	t.Parallel()
	p := kvtest.Pool(t, kv.Config{Pages: 10})
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			for i := range 300 {
				c, err := p.Reserve(kvtest.Owner(uint64(g)), 1+i%7)
				if err != nil {
					if _, ok := errors.AsType[kv.ErrExhausted](err); !ok {
						t.Error(err)
					}
					continue
				}
				f, err := c.Fill(id.NewLease())
				if err != nil {
					t.Error(err)
					return
				}
				// Never short of what was promised: step would panic.
				if err := f.Grant(1 + i%7); err != nil {
					t.Error(err)
				}
				f.Abort()
				c.Return()
			}
		})
	}
	wg.Wait()
	assert.NoError(t, p.Audit())
	assert.Equal(t, p.Stats().Free, 10)
}

func TestGenerationsAndExtents(t *testing.T) {
	t.Parallel()
	p := kvtest.Pool(t, kv.Config{Pages: 8})
	fill := func(owner id.Owner, credits int, grants ...int) *kv.Filler {
		c, err := p.Reserve(owner, credits)
		assert.NoError(t, err)
		f, err := c.Fill(id.NewLease())
		assert.NoError(t, err)
		for _, n := range grants {
			assert.NoError(t, f.Grant(n))
		}
		return f
	}
	a := fill(alice, 3, 2, 1)
	assert.Equal(t, a.Extents(), []kv.Extent{{First: 0, Count: 2, Generation: 1}, {First: 2, Count: 1, Generation: 2}})
	b := fill(bob, 2, 2)
	assert.Equal(t, b.Extents(), []kv.Extent{{First: 3, Count: 2, Generation: 3}})
	a.Abort()
	// Four pages in a row are nowhere: 0-2 and 5-7 are free.
	c := fill(bob, 4, 4)
	assert.Equal(t, c.Extents(), []kv.Extent{
		{First: 0, Count: 3, Generation: 4, Scrubbed: 3}, {First: 5, Count: 1, Generation: 4},
	})
	c.Abort()
	// Three in a row are: no need to cut them.
	d := fill(bob, 3, 3)
	assert.Equal(t, d.Extents(), []kv.Extent{{First: 0, Count: 3, Generation: 5}})
	b.Abort()
	d.Abort()
	assert.Equal(t, d.Extents()[0].Generation, uint64(5)) // still told after release
	assert.Equal(t, p.Stats().Generation, uint64(5))
	assert.Equal(t, p.Stats().ScrubbedPages, uint64(3))
	assert.Equal(t, p.Stats().Grants, uint64(5))
	assert.Equal(t, p.Stats().GrantedPages, uint64(12))
}

// What one owner wrote is never there for another, and always one's own pages
// are wiped only where the policy says so.
func TestScrubOnTenantChange(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name    string
		policy  kv.ScrubPolicy
		pattern kv.Pattern
		next    id.Owner
		want    func(b []byte) bool
	}{
		{"other owner, zeros", kv.OnTenantChange, kv.Zero, bob, func(b []byte) bool { return all(b, 0) }},
		{"other owner, NaN", kv.OnTenantChange, kv.NaN, bob, func(b []byte) bool { return all(b, 0xFF) }},
		{"same owner", kv.OnTenantChange, kv.Zero, alice, func(b []byte) bool { return !all(b, 0) }},
		{"same owner, always", kv.Always, kv.Zero, alice, func(b []byte) bool { return all(b, 0) }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			p := kvtest.Pool(t, kv.Config{Pages: 2, Scrub: tc.policy, Pattern: tc.pattern})
			kvtest.Sealed(t, p, alice, 32, 7).Release()
			c, err := p.Reserve(tc.next, 2)
			assert.NoError(t, err)
			f, err := c.Fill(id.NewLease())
			assert.NoError(t, err)
			defer f.Abort()
			assert.NoError(t, f.Grant(2))
			table, err := f.Table(0, 32)
			assert.NoError(t, err)
			defer table.Close()
			for _, page := range kvtest.Pages(t, p.Geometry(), table, 32) {
				assert.True(t, tc.want(page))
			}
		})
	}
}

func all(b []byte, v byte) bool { return bytes.Equal(b, bytes.Repeat([]byte{v}, len(b))) }

// Scrubbing a page changes that page and not one byte of its neighbors, also
// where the numbers of a page do not end on a cache line.
func TestScrubLeavesNeighborsAlone(t *testing.T) {
	t.Parallel()
	for _, g := range []kv.Geometry{
		{Layers: 1, KVHeads: 1, HeadDim: 1, PageTokens: 16, DType: kv.F16, Layout: 1},
		{Layers: 3, KVHeads: 1, HeadDim: 1, PageTokens: 16, DType: kv.F16, Layout: 1},
		{Layers: 1, KVHeads: 3, HeadDim: 5, PageTokens: 16, DType: kv.F32, Layout: 1},
		{Layers: 5, KVHeads: 3, HeadDim: 7, PageTokens: 16, DType: kv.F16, Layout: 1},
	} {
		t.Run(fmt.Sprint(g), func(t *testing.T) {
			t.Parallel()
			p := kvtest.Pool(t, kv.Config{Geometry: g, Pages: 3})
			left := kvtest.Sealed(t, p, alice, 16, 1)
			mid := kvtest.Sealed(t, p, alice, 16, 2)
			right := kvtest.Sealed(t, p, alice, 16, 3)
			defer left.Release()
			defer right.Release()
			bytesOf := func(s *kv.Sealed) (out []byte) {
				assert.NoError(t, s.View(kvtest.Refs(s.Extents())[0], func(page []byte) error {
					out = bytes.Clone(page)
					return nil
				}))
				return out
			}
			wantLeft, wantRight := bytesOf(left), bytesOf(right)
			mid.Release()
			again := kvtest.Sealed(t, p, bob, 1, 4)
			defer again.Release()
			assert.Equal(t, again.Extents(), []kv.Extent{{First: 1, Count: 1, Generation: 4, Scrubbed: 1}})
			assert.Equal(t, bytesOf(left), wantLeft)
			assert.Equal(t, bytesOf(right), wantRight)
			assert.Equal(t, p.Page(0).Scrubs+p.Page(2).Scrubs, 0)
		})
	}
}

// The history has no gaps and tells the life of the pages.
func TestEvents(t *testing.T) {
	t.Parallel()
	var events []kv.Event
	p := kvtest.Pool(t, kv.Config{Pages: 4, OnEvent: func(e kv.Event) { events = append(events, e) }})
	a := kvtest.Sealed(t, p, alice, 32, 1)
	ref := kvtest.Refs(a.Extents())[1]
	assert.NoError(t, a.View(ref, func([]byte) error { a.Release(); return nil }))
	kvtest.Sealed(t, p, bob, 32, 1).Release()
	var got []string
	for i, e := range events {
		assert.Equal(t, e.Seq, uint64(i+1))
		who := map[id.Owner]string{alice: "alice", bob: "bob"}[e.Owner]
		got = append(got, fmt.Sprintf("%v %d+%d gen %d %s", e.Kind, e.First, e.Count, e.Generation, who))
	}
	assert.Equal(t, got, []string{
		"grant 0+1 gen 1 alice", "grant 1+1 gen 2 alice",
		"seal 0+1 gen 1 alice", "seal 1+1 gen 2 alice",
		"free 0+1 gen 1 alice", "quarantine 1+1 gen 2 alice", "clear 1+1 gen 2 alice",
		"grant 0+1 gen 3 bob", "scrub 0+1 gen 3 bob",
		"grant 1+1 gen 4 bob", "scrub 1+1 gen 4 bob",
		"seal 0+1 gen 3 bob", "seal 1+1 gen 4 bob",
		"free 0+1 gen 3 bob", "free 1+1 gen 4 bob",
	})
	assert.Equal(t, events[5].Reason, kv.ReaderOpen)
}
