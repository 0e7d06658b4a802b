package kv_test

import (
	"testing"

	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/kv/kvtest"
	"bulkhead.dev/infra/assert"
)

// Every number of a page has exactly one place, and together they fill it up to
// the padding.
func TestLayoutIsABijection(t *testing.T) {
	t.Parallel()
	g := kv.Geometry{Layers: 3, KVHeads: 2, HeadDim: 5, PageTokens: 16, DType: kv.F16, Layout: kv.Layout1}
	assert.NoError(t, g.Validate())
	seen := make([]int, g.Layers*g.LayerElems())
	for l := range g.Layers {
		for h := range g.KVHeads {
			for d := range g.HeadDim {
				for tok := range g.PageTokens {
					seen[g.KIndex(l, h, d, tok)]++
					seen[g.VIndex(l, h, tok, d)]++
				}
			}
		}
	}
	for at, n := range seen {
		if n != 1 {
			t.Fatalf("place %d is used %d times", at, n)
		}
	}
	assert.Equal(t, g.PageBytes()%64, 0)
	assert.True(t, g.PageBytes() >= len(seen)*g.DType.Bytes() && g.PageBytes() < len(seen)*g.DType.Bytes()+64)
	assert.Equal(t, g.TokenBytes()*g.PageTokens, len(seen)*g.DType.Bytes())
	assert.Equal(t, [4]int{g.PagesFor(0), g.PagesFor(1), g.PagesFor(16), g.PagesFor(17)}, [4]int{0, 1, 1, 2})
}

// Whatever two legs must agree on is in the fingerprint, and what this build
// cannot serve is refused.
func TestGeometryFields(t *testing.T) {
	t.Parallel()
	base := kvtest.Geometry()
	seen := map[[32]byte]bool{base.Fingerprint(): true}
	for _, f := range []func(g *kv.Geometry){
		func(g *kv.Geometry) { g.Layers++ }, func(g *kv.Geometry) { g.KVHeads++ }, func(g *kv.Geometry) { g.HeadDim++ },
		func(g *kv.Geometry) { g.PageTokens++ }, func(g *kv.Geometry) { g.DType = kv.F32 }, func(g *kv.Geometry) { g.Layout++ },
	} {
		g := base
		f(&g)
		assert.False(t, seen[g.Fingerprint()])
		seen[g.Fingerprint()] = true
	}
	for _, f := range []func(g *kv.Geometry){
		func(g *kv.Geometry) { g.Layers = 0 }, func(g *kv.Geometry) { g.KVHeads = 1 << 20 }, func(g *kv.Geometry) { g.HeadDim = -1 },
		func(g *kv.Geometry) { g.PageTokens = 8 }, func(g *kv.Geometry) { g.DType = 0 }, func(g *kv.Geometry) { g.Layout = 2 },
	} {
		g := base
		f(&g)
		assert.ErrorIs(t, g.Validate(), kv.ErrGeometry)
	}
}
