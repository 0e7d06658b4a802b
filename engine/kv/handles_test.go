package kv_test

import (
	"bytes"
	"errors"
	"testing"

	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/kv/kvtest"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
)

func filler(t *testing.T, p *kv.Pool, owner id.Owner, credits, grant int) *kv.Filler {
	t.Helper()
	c, err := p.Reserve(owner, credits)
	assert.NoError(t, err)
	f, err := c.Fill(id.NewLease())
	assert.NoError(t, err)
	t.Cleanup(f.Abort)
	if grant > 0 {
		assert.NoError(t, f.Grant(grant))
	}
	return f
}

func TestTableRefuses(t *testing.T) {
	t.Parallel()
	p := kvtest.Pool(t, kv.Config{})
	f := filler(t, p, alice, 3, 2)
	for name, x := range map[string][2]int{
		"reads what nobody wrote": {1, 1},
		"before the start":        {-1, 2},
		"nothing":                 {0, 0},
		"negative":                {0, -1},
		"beyond the pages":        {0, 33},
		"overflow":                {0, int(^uint(0) >> 1)},
	} {
		_, err := f.Table(x[0], x[1])
		if !errors.Is(err, kv.ErrRange) {
			t.Errorf("%s: %v", name, err)
		}
	}
	table, err := f.Table(0, 20)
	assert.NoError(t, err)
	_, err = f.Table(0, 1)
	assert.ErrorIs(t, err, kv.ErrOpen)
	_, err = f.Seal(20)
	assert.ErrorIs(t, err, kv.ErrOpen)
	_, err = table.Resolve(nil, 21)
	assert.ErrorIs(t, err, kv.ErrRange)
	one, err := table.Resolve(nil, 16)
	assert.NoError(t, err)
	two, err := table.Resolve(one, 17)
	assert.NoError(t, err)
	assert.Equal(t, len(two), 3)
	assert.Equal(t, two[0], two[1])
	assert.Equal(t, two[2]-two[1], uintptr(p.Geometry().PageBytes()))
	assert.ErrorIs(t, table.Advance(21), kv.ErrRange)
	assert.NoError(t, table.Advance(5))
	table.Close()
	table.Close()
	assert.Equal(t, f.Len(), 5)
	_, err = table.Resolve(nil, 1)
	assert.ErrorIs(t, err, kv.ErrStale)
	assert.ErrorIs(t, table.Advance(1), kv.ErrStale)
	_, err = f.Table(6, 1)
	assert.ErrorIs(t, err, kv.ErrRange)
}

// Rewriting readable positions and not reporting it leaves them unreadable.
func TestUnreportedRewriteIsNotReadable(t *testing.T) {
	t.Parallel()
	p := kvtest.Pool(t, kv.Config{})
	s := kvtest.Sealed(t, p, alice, 20, 1)
	seq := kvtest.Sequence(t, s, p, 2)
	s.Release()
	defer seq.Release()
	table, err := seq.Table(19, 1)
	assert.NoError(t, err)
	table.Close()
	assert.Equal(t, seq.Len(), 19)
	_, err = seq.TokenBytes(19, nil)
	assert.ErrorIs(t, err, kv.ErrRange)
}

func TestSealRefuses(t *testing.T) {
	t.Parallel()
	p := kvtest.Pool(t, kv.Config{})
	f := filler(t, p, alice, 3, 2)
	table, err := f.Table(0, 17)
	assert.NoError(t, err)
	kvtest.Write(t, p.Geometry(), table, 0, 17, 1)
	assert.NoError(t, table.Advance(17))
	table.Close()
	for _, tokens := range []int{0, 16, 18} {
		_, err = f.Seal(tokens)
		assert.ErrorIs(t, err, kv.ErrCoverage)
	}
	assert.NoError(t, f.Grant(1)) // a page too many
	_, err = f.Seal(17)
	assert.ErrorIs(t, err, kv.ErrCoverage)
}

// Sealing defines every byte after the last position, in every layer, and
// leaves the positions as they are.
func TestSealZeroesTheTail(t *testing.T) {
	t.Parallel()
	for _, tokens := range []int{1, 15, 16, 17, 31} {
		p := kvtest.Pool(t, kv.Config{Pages: 4, Pattern: kv.NaN})
		g := p.Geometry()
		s := kvtest.Sealed(t, p, alice, tokens, 5)
		refs := kvtest.Refs(s.Extents())
		last := len(refs) - 1
		want := make([]byte, g.PageBytes())
		w := g.DType.Bytes()
		for pos := last * 16; pos < tokens; pos++ {
			n := 0
			for l := range g.Layers {
				for d := range g.HeadDim {
					copy(want[g.KIndex(l, 0, d, pos%16)*w:], kvtest.Number(g, 5, pos, n))
					n++
				}
				for d := range g.HeadDim {
					copy(want[g.VIndex(l, 0, pos%16, d)*w:], kvtest.Number(g, 5, pos, n))
					n++
				}
			}
		}
		assert.NoError(t, s.View(refs[last], func(page []byte) error {
			assert.Equal(t, page, want)
			return nil
		}))
		assert.Equal(t, s.Tokens(), tokens)
		assert.Equal(t, p.Stats().Credits, 0)
		s.Release()
	}
}

func TestConsumedHandlesAreStale(t *testing.T) {
	t.Parallel()
	p := kvtest.Pool(t, kv.Config{})
	f := filler(t, p, alice, 2, 1)
	table, err := f.Table(0, 3)
	assert.NoError(t, err)
	kvtest.Write(t, p.Geometry(), table, 0, 3, 1)
	assert.NoError(t, table.Advance(3))
	table.Close()
	s, err := f.Seal(3)
	assert.NoError(t, err)
	defer s.Release()
	_, err = f.Table(0, 1)
	assert.ErrorIs(t, err, kv.ErrStale)
	_, err = f.Seal(3)
	assert.ErrorIs(t, err, kv.ErrStale)
	assert.ErrorIs(t, f.Grant(1), kv.ErrStale)
	f.Abort() // consumed: must not free the sealed page
	assert.Equal(t, p.Stats().Sealed, 1)

	seq := kvtest.Sequence(t, s, p, 2)
	assert.NoError(t, seq.Extend(17))
	seq.Release()
	assert.ErrorIs(t, seq.Extend(17), kv.ErrStale)
	_, err = seq.Table(0, 1)
	assert.ErrorIs(t, err, kv.ErrStale)
	_, err = seq.TokenBytes(0, nil)
	assert.ErrorIs(t, err, kv.ErrStale)
	assert.NoError(t, p.Audit())
}

// Giving up while a pass is open takes effect at once, and the pages are free
// when the pass closes, not before.
func TestAbortUnderAPass(t *testing.T) {
	t.Parallel()
	p := kvtest.Pool(t, kv.Config{Pages: 4})
	f := filler(t, p, alice, 4, 3)
	table, err := f.Table(0, 32)
	assert.NoError(t, err)
	addrs, err := table.Resolve(nil, 32)
	assert.NoError(t, err)
	assert.Equal(t, len(addrs), 2)
	f.Abort()
	f.Abort()
	st := p.Stats()
	assert.Equal(t, [3]int{st.Quarantined, st.Dirty, st.Clean}, [3]int{2, 1, 1})
	assert.Equal(t, p.Page(0).Reason, kv.WriterOpen)
	_, err = table.Resolve(nil, 1)
	assert.ErrorIs(t, err, kv.ErrStale)
	assert.ErrorIs(t, table.Advance(1), kv.ErrStale)
	_, err = p.Reserve(bob, 3)
	assert.Equal(t, assert.ErrorAs[kv.ErrExhausted](t, err).Free, 2)
	// A kernel that is still at work writes into quarantined memory only.
	table.Close()
	assert.Equal(t, p.Stats().Free, 4)
	assert.NoError(t, p.Audit())
}

func TestViewRefusesAndHolds(t *testing.T) {
	t.Parallel()
	p := kvtest.Pool(t, kv.Config{Pages: 4})
	s := kvtest.Sealed(t, p, alice, 32, 1)
	refs := kvtest.Refs(s.Extents())
	nop := func([]byte) error { return nil }
	assert.ErrorIs(t, s.View(kv.PageRef{Index: 3, Generation: refs[0].Generation}, nop), kv.ErrRange)
	assert.ErrorIs(t, s.View(kv.PageRef{Index: 1 << 31, Generation: 1}, nop), kv.ErrRange)
	assert.ErrorIs(t, s.View(kv.PageRef{Index: 0, Generation: refs[0].Generation + 1}, nop), kv.ErrStale)

	// A second handle keeps the pages.
	other, err := s.Retain()
	assert.NoError(t, err)
	s.Release()
	assert.ErrorIs(t, s.View(refs[0], nop), kv.ErrStale)
	_, err = s.Retain()
	assert.ErrorIs(t, err, kv.ErrStale)
	assert.Equal(t, p.Stats().Sealed, 2)

	sentinel := errors.New("of the reader")
	assert.ErrorIs(t, other.View(refs[0], func([]byte) error {
		other.Release()
		assert.Equal(t, p.Page(refs[0].Index).State, kv.StateQuarantined)
		assert.Equal(t, p.Page(refs[0].Index).Reason, kv.ReaderOpen)
		assert.Equal(t, p.Page(refs[1].Index).State, kv.StateDirty)
		return sentinel
	}), sentinel)
	assert.Equal(t, p.Stats().Free, 4)

	// Granted again, to the same owner even: the old reference is dead.
	again := kvtest.Sealed(t, p, alice, 32, 1)
	defer again.Release()
	assert.ErrorIs(t, again.View(refs[0], nop), kv.ErrStale)
	assert.NoError(t, again.View(kvtest.Refs(again.Extents())[0], nop))
}

func TestViewSurvivesAPanic(t *testing.T) {
	t.Parallel()
	p := kvtest.Pool(t, kv.Config{Pages: 1})
	s := kvtest.Sealed(t, p, alice, 1, 1)
	func() {
		defer func() { assert.Equal(t, recover(), any("reader")) }()
		_ = s.View(kvtest.Refs(s.Extents())[0], func([]byte) error { panic("reader") })
	}()
	assert.Equal(t, p.Page(0).Readers, 0)
	s.Release()
}

func TestSequenceDecodes(t *testing.T) {
	t.Parallel()
	for _, prompt := range []int{1, 15, 16, 17, 32} {
		prefill := kvtest.Pool(t, kv.Config{})
		decode := kvtest.Pool(t, kv.Config{Pattern: kv.NaN})
		g := prefill.Geometry()
		s := kvtest.Sealed(t, prefill, alice, prompt, 3)
		seq := kvtest.Sequence(t, s, decode, g.PagesFor(prompt)+2)
		s.Release()
		assert.Equal(t, seq.Len(), prompt)
		for pos := range prompt {
			b, err := seq.TokenBytes(pos, nil)
			assert.NoError(t, err)
			assert.Equal(t, b, kvtest.Token(g, 3, pos))
			assert.Equal(t, len(b), g.TokenBytes())
		}
		_, err := seq.TokenBytes(prompt, nil)
		assert.ErrorIs(t, err, kv.ErrRange)

		// The last position is computed again; nothing before its page can be
		// written.
		if prompt > 16 {
			_, err = seq.Table(15, 1)
			assert.ErrorIs(t, err, kv.ErrRange)
		}
		step := func(pos int) {
			assert.NoError(t, seq.Extend(pos+1))
			table, err := seq.Table(pos, 1)
			assert.NoError(t, err)
			_, err = seq.TokenBytes(0, nil)
			assert.ErrorIs(t, err, kv.ErrOpen)
			kvtest.Write(t, g, table, pos, 1, 3)
			assert.NoError(t, table.Advance(1))
			table.Close()
		}
		step(prompt - 1)
		assert.Equal(t, seq.Len(), prompt)
		end := (g.PagesFor(prompt) + 2) * 16
		for pos := prompt; pos < end; pos++ {
			step(pos)
		}
		assert.Equal(t, seq.Len(), end)
		assert.ErrorIs(t, seq.Extend(end+1), kv.ErrNoCredit)
		for pos := range end {
			b, err := seq.TokenBytes(pos, nil)
			assert.NoError(t, err)
			assert.True(t, bytes.Equal(b, kvtest.Token(g, 3, pos)))
		}
		assert.Equal(t, decode.Stats().Sealed, g.PagesFor(end))
		seq.Release()
		seq.Release()
		assert.NoError(t, decode.Audit())
	}
}

// Should a page ever come to another lease behind the back of its holder, every
// use of it finds out: by generation, and by owner.
func TestEveryUseComparesOwnerAndGeneration(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*kv.PageInfo){
		"generation": func(g *kv.PageInfo) { g.Generation++ },
		"owner":      func(g *kv.PageInfo) { g.Owner = bob },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := kvtest.Pool(t, kv.Config{})
			stolen := func(s interface{ Extents() []kv.Extent }, use func() error) {
				t.Helper()
				refs := kvtest.Refs(s.Extents())
				undo := p.Steal(refs[len(refs)-1].Index, change)
				assert.ErrorIs(t, use(), kv.ErrStale)
				undo()
			}
			f := filler(t, p, alice, 2, 2)
			stolen(f, func() error { _, err := f.Table(0, 20); return err })
			table, err := f.Table(0, 20)
			assert.NoError(t, err)
			stolen(f, func() error { _, err := table.Resolve(nil, 20); return err })
			kvtest.Write(t, p.Geometry(), table, 0, 20, 1)
			assert.NoError(t, table.Advance(20))
			table.Close()
			stolen(f, func() error { _, err := f.Seal(20); return err })
			s, err := f.Seal(20)
			assert.NoError(t, err)
			defer s.Release()
			stolen(s, func() error { return s.View(kvtest.Refs(s.Extents())[1], func([]byte) error { return nil }) })
			stolen(s, func() error { _, err := s.Sums(key, 0); return err })

			seq := kvtest.Sequence(t, s, p, 2)
			stolen(seq, func() error { _, err := seq.TokenBytes(19, nil); return err })
			stolen(seq, func() error { _, err := seq.Table(19, 1); return err })
			seq.Release()

			assert.NoError(t, p.Audit())
		})
	}
}

// A handle on an earlier grant does not serve a later one of the same page, not
// even to somebody who knows the later generation.
func TestViewServesItsOwnGrantOnly(t *testing.T) {
	t.Parallel()
	p := kvtest.Pool(t, kv.Config{})
	s := kvtest.Sealed(t, p, alice, 20, 1)
	defer s.Release()
	ref := kvtest.Refs(s.Extents())[0]
	undo := p.Steal(ref.Index, func(g *kv.PageInfo) { g.Generation = 99 })
	defer undo()
	later := kv.PageRef{Index: ref.Index, Generation: 99}
	assert.ErrorIs(t, s.View(later, func([]byte) error { return nil }), kv.ErrStale)
}

// A holder that gives back what is not its own any more must not free it under
// the feet of the next one. The pool stops for good, also where the panic is
// recovered.
func TestWrongBooksStopThePool(t *testing.T) {
	t.Parallel()
	give := func(f func()) (r any) {
		defer func() { r = recover() }()
		f()
		return nil
	}
	for name, change := range map[string]func(*kv.PageInfo){
		"generation": func(g *kv.PageInfo) { g.Generation++ },
		"owner":      func(g *kv.PageInfo) { g.Owner = bob },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, err := kv.New(kv.Config{Geometry: kvtest.Geometry(), Pages: 8})
			assert.NoError(t, err)
			s := kvtest.Sealed(t, p, alice, 20, 1)
			bystander := kvtest.Sealed(t, p, bob, 20, 1)
			ref := kvtest.Refs(s.Extents())[0]
			p.Steal(ref.Index, change)
			assert.True(t, give(s.Release) != nil)
			assert.Equal(t, p.Page(ref.Index).State, kv.StateSealed)
			assert.True(t, p.Stats().Corrupt)
			_, err = p.Reserve(alice, 1)
			assert.ErrorIs(t, err, kv.ErrCorrupt)
			err = bystander.View(kvtest.Refs(bystander.Extents())[0], func([]byte) error { return nil })
			assert.ErrorIs(t, err, kv.ErrCorrupt)
			assert.ErrorIs(t, p.Close(), kv.ErrBusy)
		})
	}
}

// What is finished can be read by others while the filler goes on, and outlives
// it.
func TestFinished(t *testing.T) {
	t.Parallel()
	p := kvtest.Pool(t, kv.Config{Pages: 8})
	g := p.Geometry()
	f := filler(t, p, alice, 4, 3)
	none, err := f.Finished()
	assert.NoError(t, err)
	assert.True(t, none == nil)
	write := func(pos, n int) {
		table, err := f.Table(pos, n)
		assert.NoError(t, err)
		_, err = f.Finished()
		assert.ErrorIs(t, err, kv.ErrOpen)
		kvtest.Write(t, g, table, pos, n, 1)
		assert.NoError(t, table.Advance(n))
		table.Close()
	}
	write(0, 20)
	first, err := f.Finished()
	assert.NoError(t, err)
	assert.Equal(t, first.Tokens(), 16)
	assert.Equal(t, first.Pages(), 1)
	assert.Equal(t, first.Extents(), []kv.Extent{{First: 0, Count: 1, Generation: 1}})
	assert.Equal(t, p.Page(0).State, kv.StateSealed)
	// It cannot be written again, and the page that is not full still can.
	_, err = f.Table(10, 4)
	assert.ErrorIs(t, err, kv.ErrRange)
	write(20, 20)
	assert.NoError(t, f.Grant(1))
	second, err := f.Finished()
	assert.NoError(t, err)
	assert.Equal(t, second.Tokens(), 32)
	assert.ErrorIs(t, first.View(kv.PageRef{Index: 1, Generation: 1}, nil), kv.ErrRange)

	write(40, 24)
	whole, err := f.Seal(64)
	assert.NoError(t, err)
	sums, err := whole.Sums(key, 0)
	assert.NoError(t, err)
	whole.Release()
	assert.Equal(t, p.Stats().Sealed, 2)
	early, err := second.Sums(key, 1)
	assert.NoError(t, err)
	assert.Equal(t, early, sums[1:2])
	_, err = second.Sums(key, 3)
	assert.ErrorIs(t, err, kv.ErrRange)
	second.Release()
	assert.Equal(t, p.Stats().Sealed, 1)
	first.Release()
	assert.Equal(t, p.Stats().Free, 8)
}
