package kv_test

import (
	"fmt"
	"hash/fnv"
	"testing"

	"pgregory.net/rapid"

	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/kv/kvtest"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
)

func scope(owner id.Owner) kv.CacheScope { return kv.CacheScope{Owner: owner, Model: [32]byte{1}} }

// tokens makes ids that are equal for equal seeds, up to their length.
func tokens(n, seed int) []int32 {
	out := make([]int32, n)
	for i := range out {
		out[i] = int32(i*7 + seed*1000)
	}
	return out
}

// remember runs a prompt through the pool and leaves it in the cache.
func remember(t testing.TB, p *kv.Pool, sc kv.CacheScope, ids []int32, seed uint64) {
	t.Helper()
	s := kvtest.Sealed(t, p, sc.Owner, len(ids), seed)
	assert.NoError(t, s.Remember(sc, ids))
	s.Release()
}

func recalled(t testing.TB, p *kv.Pool, sc kv.CacheScope, ids []int32) int {
	t.Helper()
	s, err := p.Recall(sc, ids)
	assert.NoError(t, err)
	if s == nil {
		return 0
	}
	defer s.Release()
	assert.Equal(t, s.Owner(), sc.Owner)
	return s.Tokens()
}

func TestRecall(t *testing.T) {
	t.Parallel()
	p := kvtest.Pool(t, kv.Config{Pages: 32, CachePerOwner: 8})
	ids := tokens(40, 1)
	remember(t, p, scope(alice), ids, 7)
	assert.Equal(t, p.Stats().Sealed, 2) // whole pages only
	assert.Equal(t, p.Stats().CachedPages, 2)

	for _, tc := range []struct {
		name string
		ids  []int32
		want int
	}{
		{"the same", ids, 32},
		{"longer", tokens(100, 1), 32},
		{"as long as the pages: the last position is left", ids[:32], 16},
		{"one more", ids[:33], 32},
		{"shorter than a page", ids[:16], 0},
		{"nothing", nil, 0},
		{"other", tokens(40, 2), 0},
		{"other from the second page on", append(tokens(16, 1), tokens(40, 2)...), 16},
		{"shifted", ids[1:], 0},
		{"the second page first", append(append([]int32{}, ids[16:32]...), 1), 0},
	} {
		if got := recalled(t, p, scope(alice), tc.ids); got != tc.want {
			t.Errorf("%s: %d positions, want %d", tc.name, got, tc.want)
		}
	}
	other := scope(alice)
	other.Model[31]++
	adapter := scope(alice)
	adapter.Adapter = "a"
	for name, sc := range map[string]kv.CacheScope{"owner": scope(bob), "model": other, "adapter": adapter} {
		if got := recalled(t, p, sc, ids); got != 0 {
			t.Errorf("another %s finds %d positions", name, got)
		}
	}
	p.Forget(bob)
	assert.Equal(t, recalled(t, p, scope(alice), ids), 32)
	p.Forget(alice)
	assert.Equal(t, recalled(t, p, scope(alice), ids), 0)
	assert.Equal(t, p.Stats().Free, 32)
	assert.NoError(t, p.Audit())
}

func TestRememberRefuses(t *testing.T) {
	t.Parallel()
	p := kvtest.Pool(t, kv.Config{CachePerOwner: 8})
	s := kvtest.Sealed(t, p, alice, 40, 7)
	assert.ErrorIs(t, s.Remember(scope(alice), tokens(39, 1)), kv.ErrRange)
	assert.ErrorIs(t, s.Remember(scope(bob), tokens(40, 1)), kv.ErrOwner)
	s.Release()
	assert.ErrorIs(t, s.Remember(scope(alice), tokens(40, 1)), kv.ErrStale)
	assert.Equal(t, p.Stats().Free, 16)
}

// A prompt that begins with remembered pages computes the rest only, and holds
// them however the cache changes.
func TestFillAfter(t *testing.T) {
	t.Parallel()
	p := kvtest.Pool(t, kv.Config{Pages: 8, CachePerOwner: 8})
	g := p.Geometry()
	remember(t, p, scope(alice), tokens(40, 1), 7)
	credits, err := p.Reserve(alice, 4)
	assert.NoError(t, err)
	start, err := p.Recall(scope(alice), tokens(50, 1))
	assert.NoError(t, err)
	f, err := credits.FillAfter(id.NewLease(), start)
	assert.NoError(t, err)
	start.Release() // consumed: does nothing
	p.Forget(alice)
	assert.Equal(t, f.Len(), 32)
	assert.Equal(t, p.Stats().Credits, 2)
	_, err = f.Table(20, 4)
	assert.ErrorIs(t, err, kv.ErrRange) // it cannot write what others share
	assert.NoError(t, f.Grant(2))
	table, err := f.Table(32, 18)
	assert.NoError(t, err)
	kvtest.Write(t, g, table, 32, 18, 7)
	assert.NoError(t, table.Advance(18))
	table.Close()
	s, err := f.Seal(50)
	assert.NoError(t, err)
	seq := kvtest.Sequence(t, s, p, 4)
	s.Release()
	for pos := range 50 {
		b, err := seq.TokenBytes(pos, nil)
		assert.NoError(t, err)
		assert.True(t, string(b) == string(kvtest.Token(g, 7, pos)))
	}
	seq.Release()
	assert.Equal(t, p.Stats().Free, 8)

	// Pages of another owner are no beginning.
	remember(t, p, scope(alice), tokens(40, 1), 7)
	start, err = p.Recall(scope(alice), tokens(50, 1))
	assert.NoError(t, err)
	credits, err = p.Reserve(bob, 4)
	assert.NoError(t, err)
	_, err = credits.FillAfter(id.NewLease(), start)
	assert.ErrorIs(t, err, kv.ErrOwner)
	credits.Return()
	// Nor are pages that are not all full, or were released.
	whole := kvtest.Sealed(t, p, alice, 20, 1)
	credits, err = p.Reserve(alice, 4)
	assert.NoError(t, err)
	_, err = credits.FillAfter(id.NewLease(), whole)
	assert.ErrorIs(t, err, kv.ErrStale)
	assert.Equal(t, p.Stats().Credits, 0)
}

// An owner has its share, and no more: what is newer drives out its own oldest.
func TestCacheShare(t *testing.T) {
	t.Parallel()
	p := kvtest.Pool(t, kv.Config{Pages: 32, CachePerOwner: 4})
	remember(t, p, scope(bob), tokens(64, 9), 1)
	for seed := range 6 {
		remember(t, p, scope(alice), tokens(32, seed), 1)
	}
	assert.Equal(t, p.Stats().CachedPages, 8)
	assert.Equal(t, recalled(t, p, scope(bob), tokens(65, 9)), 64) // untouched
	assert.Equal(t, recalled(t, p, scope(alice), tokens(33, 5)), 32)
	assert.Equal(t, recalled(t, p, scope(alice), tokens(33, 4)), 32)
	assert.Equal(t, recalled(t, p, scope(alice), tokens(33, 3)), 0)
	// A prompt larger than the share keeps its beginning.
	remember(t, p, scope(alice), tokens(160, 7), 1)
	assert.Equal(t, recalled(t, p, scope(alice), tokens(161, 7)), 64)
	assert.NoError(t, p.Audit())
}

// Who needs room gets it: first out of what it remembers itself, then out of
// the least recently used of all. What somebody uses stays.
func TestCacheGivesWay(t *testing.T) {
	t.Parallel()
	p := kvtest.Pool(t, kv.Config{Pages: 8, CachePerOwner: 4})
	remember(t, p, scope(alice), tokens(32, 1), 1)
	remember(t, p, scope(bob), tokens(32, 2), 1)
	remember(t, p, scope(bob), tokens(32, 3), 1)
	assert.Equal(t, p.Stats().Free, 2)
	inUse, err := p.Recall(scope(bob), tokens(33, 2))
	assert.NoError(t, err)
	c, err := p.Reserve(bob, 4)
	assert.NoError(t, err)
	assert.Equal(t, recalled(t, p, scope(bob), tokens(33, 3)), 0)
	assert.Equal(t, recalled(t, p, scope(alice), tokens(33, 1)), 32)
	more, err := p.Reserve(kvtest.Owner(3), 2)
	assert.NoError(t, err)
	assert.Equal(t, recalled(t, p, scope(alice), tokens(33, 1)), 0)
	_, err = p.Reserve(bob, 1)
	assert.Equal(t, assert.ErrorAs[kv.ErrExhausted](t, err), kv.ErrExhausted{Want: 1, Free: 0})
	assert.Equal(t, inUse.Tokens(), 32)
	assert.Equal(t, p.Stats().CacheEvicted, uint64(4))
	inUse.Release()
	c.Return()
	more.Return()
	assert.NoError(t, p.Audit())
}

// Whatever is remembered, recalled, reserved and forgotten in whatever order:
// who recalls gets what it wrote itself for exactly these ids. In this test the
// owner and all ids up to its end decide what is written into a page.
func TestCacheModel(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		p, err := kv.New(kv.Config{Geometry: kvtest.Geometry(), Pages: 12, CachePerOwner: 4})
		noError(rt, err)
		owner := func() id.Owner { return kvtest.Owner(rapid.Uint64Range(1, 3).Draw(rt, "owner")) }
		recalled := 0
		rt.Repeat(map[string]func(*rapid.T){
			"prompt": func(rt *rapid.T) {
				var ids []int32
				for range rapid.IntRange(1, 3).Draw(rt, "pages") {
					ids = append(ids, tokens(16, rapid.IntRange(1, 2).Draw(rt, "ids"))...)
				}
				ids = append(ids, make([]int32, rapid.IntRange(0, 3).Draw(rt, "rest"))...)
				recalled += cachedPrompt(t, rt, p, owner(), ids)
			},
			"reserve": func(rt *rapid.T) {
				c, err := p.Reserve(owner(), rapid.IntRange(1, 12).Draw(rt, "n"))
				noError(rt, err) // nobody holds anything: there is always room
				c.Return()
			},
			"forget": func(*rapid.T) { p.Forget(owner()) },
			"": func(rt *rapid.T) {
				noError(rt, p.Audit())
				if st := p.Stats(); st.Free+st.CachedPages != 12 || st.Sealed != st.CachedPages || st.CacheHits != uint64(recalled) {
					rt.Fatalf("%+v", st)
				}
			},
		})
		p.Forget(id.Owner{})
		noError(rt, p.Close())
	})
}

func noError(rt *rapid.T, err error) {
	if err != nil {
		rt.Fatal(err)
	}
}

// cachedPrompt runs a prompt as the prefill leg does and returns how many pages
// were there already.
func cachedPrompt(t *testing.T, rt *rapid.T, p *kv.Pool, owner id.Owner, ids []int32) (hit int) {
	g := p.Geometry()
	seed := func(page int) uint64 {
		h := fnv.New64a()
		fmt.Fprint(h, owner, ids[:min(16*(page+1), len(ids))])
		return h.Sum64()
	}
	c, err := p.Reserve(owner, g.PagesFor(len(ids)))
	noError(rt, err)
	start, err := p.Recall(scope(owner), ids)
	noError(rt, err)
	var f *kv.Filler
	if start == nil {
		f, err = c.Fill(id.NewLease())
	} else {
		hit = start.Pages()
		f, err = c.FillAfter(id.NewLease(), start)
	}
	noError(rt, err)
	noError(rt, f.Grant(g.PagesFor(len(ids))-hit))
	table, err := f.Table(16*hit, len(ids)-16*hit)
	noError(rt, err)
	for i := hit; i < g.PagesFor(len(ids)); i++ {
		kvtest.Write(t, g, table, 16*i, min(16, len(ids)-16*i), seed(i))
	}
	for i, page := range kvtest.Pages(t, g, table, len(ids))[:hit] {
		if want := kvtest.Number(g, seed(i), 16*i, 0); string(page[:len(want)]) != string(want) {
			rt.Fatalf("page %d holds what was written for something else", i)
		}
	}
	noError(rt, table.Advance(len(ids)-16*hit))
	table.Close()
	s, err := f.Seal(len(ids))
	noError(rt, err)
	noError(rt, s.Remember(scope(owner), ids))
	s.Release()
	return hit
}
