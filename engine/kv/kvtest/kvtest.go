// Package kvtest has what tests around pages repeat: a small geometry, a stand-in
// for a forward pass that writes recognizable tokens, and ready-made sealed
// pages.
package kvtest

import (
	"bytes"
	"encoding/binary"
	"testing"
	"unsafe"

	"bulkhead.dev/engine/kv"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
)

// Geometry is small and uneven: the numbers of a page do not fill its last
// cache line.
func Geometry() kv.Geometry {
	return kv.Geometry{Layers: 2, KVHeads: 1, HeadDim: 3, PageTokens: kv.PageTokens, DType: kv.F16, Layout: kv.Layout1}
}

// Pool makes a pool that must be empty at the end of the test. Zero fields of
// the configuration are filled: Geometry, and 16 pages.
func Pool(t testing.TB, c kv.Config) *kv.Pool {
	t.Helper()
	if c.Geometry == (kv.Geometry{}) {
		c.Geometry = Geometry()
	}
	if c.Pages == 0 {
		c.Pages = 16
	}
	p, err := kv.New(c)
	assert.NoError(t, err)
	t.Cleanup(func() {
		p.Forget(id.Owner{})
		if err := p.Close(); err != nil {
			t.Errorf("pages are still held at the end of the test: %v", err)
		}
	})
	return p
}

// Owner makes an owner out of a number.
func Owner(n uint64) (o id.Owner) {
	o[0] = 0xA0
	binary.BigEndian.PutUint64(o[8:], n)
	return o
}

// Pages gives the memory of the pages that a table resolves to. Like a kernel,
// it knows nothing but addresses.
func Pages(t testing.TB, g kv.Geometry, table *kv.Table, positions int) [][]byte {
	t.Helper()
	addrs, err := table.Resolve(nil, positions)
	assert.NoError(t, err)
	pages := make([][]byte, len(addrs))
	for i, a := range addrs {
		// The arena is outside of the Go heap and does not move.
		pages[i] = unsafe.Slice(*(**byte)(unsafe.Pointer(&a)), g.PageBytes())
	}
	return pages
}

// Number returns the n-th number of the token that Write writes at a position:
// never zero, never 0xFF in any byte, and different for different seeds.
func Number(g kv.Geometry, seed uint64, pos, n int) []byte {
	x := seed*0x9E3779B97F4A7C15 + uint64(pos)*0xC2B2AE3D27D4EB4F + uint64(n)*0x165667B19E3779F9
	x ^= x >> 29
	x *= 0xBF58476D1CE4E5B9
	b := binary.LittleEndian.AppendUint64(nil, x)[:g.DType.Bytes()]
	for i := range b {
		b[i] = 1 + b[i]%0xF0
	}
	return b
}

// Write stands in for a forward pass: it writes keys and values of count
// positions from pos on, in every layer, and nothing else.
func Write(t testing.TB, g kv.Geometry, table *kv.Table, pos, count int, seed uint64) {
	t.Helper()
	w := g.DType.Bytes()
	pages := Pages(t, g, table, pos+count)
	for p := pos; p < pos+count; p++ {
		page, slot, n := pages[p/g.PageTokens], p%g.PageTokens, 0
		put := func(at int) {
			copy(page[at*w:], Number(g, seed, p, n))
			n++
		}
		for l := range g.Layers {
			for h := range g.KVHeads {
				for d := range g.HeadDim {
					put(g.KIndex(l, h, d, slot))
				}
			}
			for h := range g.KVHeads {
				for d := range g.HeadDim {
					put(g.VIndex(l, h, slot, d))
				}
			}
		}
	}
}

// Token returns what Sequence.TokenBytes must return for a position that Write
// wrote.
func Token(g kv.Geometry, seed uint64, pos int) (b []byte) {
	for n := range g.Layers * 2 * g.KVHeads * g.HeadDim {
		b = append(b, Number(g, seed, pos, n)...)
	}
	return b
}

// Sealed runs a prompt of so many tokens through the pool, in two chunks if it
// has more than one page, and seals it.
func Sealed(t testing.TB, p *kv.Pool, owner id.Owner, tokens int, seed uint64) *kv.Sealed {
	t.Helper()
	g := p.Geometry()
	credits, err := p.Reserve(owner, g.PagesFor(tokens))
	assert.NoError(t, err)
	f, err := credits.Fill(id.NewLease())
	assert.NoError(t, err)
	chunk := g.PageTokens * ((g.PagesFor(tokens) + 1) / 2)
	for pos := 0; pos < tokens; pos += chunk {
		n := min(chunk, tokens-pos)
		assert.NoError(t, f.Grant(g.PagesFor(n)))
		table, err := f.Table(pos, n)
		assert.NoError(t, err)
		Write(t, g, table, pos, n, seed)
		assert.NoError(t, table.Advance(n))
		table.Close()
	}
	s, err := f.Seal(tokens)
	assert.NoError(t, err)
	return s
}

// Claim is the claim that the sealed pages deserve.
func Claim(t testing.TB, s *kv.Sealed, key kv.DigestKey) kv.Claim {
	t.Helper()
	sums, err := s.Sums(key, 0)
	assert.NoError(t, err)
	c := kv.Claim{Tokens: s.Tokens(), Key: key}
	for i, r := range Refs(s.Extents()) {
		c.Pages = append(c.Pages, kv.PageClaim{From: r, Sum: sums[i]})
	}
	return c
}

// Refs lists the pages of extents.
func Refs(extents []kv.Extent) (refs []kv.PageRef) {
	for _, e := range extents {
		for k := range e.Count {
			refs = append(refs, kv.PageRef{Index: e.First + k, Generation: e.Generation})
		}
	}
	return refs
}

// Key is the digest key that Copy and Sequence use.
var Key = kv.DigestKey{Alg: kv.NH, Secret: [32]byte{42}}

// Copy reads sealed pages into a landing, as a fabric would, under Key.
func Copy(t testing.TB, from *kv.Sealed, to *kv.Landing) {
	t.Helper()
	assert.NoError(t, Land(from, to, nil))
}

// Land is Copy of pages that may be changed on the way.
func Land(from *kv.Sealed, to *kv.Landing, change func(pages [][]byte)) error {
	refs := Refs(from.Extents())
	pages := make([][]byte, len(refs))
	for i, r := range refs {
		if err := from.View(r, func(page []byte) error { pages[i] = bytes.Clone(page); return nil }); err != nil {
			return err
		}
	}
	if change != nil {
		change(pages)
	}
	return to.Receive(Key, refs, func(in *kv.Intake) error {
		for i, page := range pages {
			if err := in.Copy(i, page); err != nil {
				return err
			}
		}
		return nil
	})
}

// Sequence hands sealed pages over within one process: lands, copies, commits.
// credits is the total for the sequence.
func Sequence(t testing.TB, from *kv.Sealed, to *kv.Pool, credits int) *kv.Sequence {
	t.Helper()
	c, err := to.Reserve(from.Owner(), credits)
	assert.NoError(t, err)
	l, err := c.Land(id.NewLease())
	assert.NoError(t, err)
	assert.NoError(t, l.Grant(from.Pages()))
	Copy(t, from, l)
	s, err := l.Commit(Claim(t, from, Key))
	assert.NoError(t, err)
	return s
}
