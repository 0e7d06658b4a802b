package kv_test

import (
	"errors"
	"fmt"
	"testing"

	"pgregory.net/rapid"

	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/kv/kvtest"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
)

// The reference model: what a pool is, without bits, phases or locks. Pages are
// owned by handles; a page that no handle owns and that nobody has open is
// free.
type model struct {
	t    *testing.T
	pool *kv.Pool
	g    kv.Geometry

	last    []id.Owner // last owner of each page
	lastGen uint64
	scrubs  []int

	credits []*mCredits
	handles []*mHandle
	opens   []*mOpen
	events  []kv.Event
}

type mCredits struct {
	c     *kv.Credits
	owner id.Owner
	n     int
}

type mHandle struct {
	owner   id.Owner
	seed    uint64
	filler  *kv.Filler
	landing *kv.Landing
	seq     *kv.Sequence
	sealed  *kv.Sealed
	credits int
	pages   []kv.PageRef
	len     int
	touched int  // positions that were ever written
	open    bool // a pass is open
}

// mOpen is a hold: a table, or a view kept open by a goroutine.
type mOpen struct {
	h          *mHandle // nil once the handle was released
	pages      []uint32
	write      bool
	table      *kv.Table
	pos, count int
	end        func()
}

const modelPages = 12

func newModel(t *testing.T, rt *rapid.T) *model {
	m := &model{t: t, g: kvtest.Geometry(), last: make([]id.Owner, modelPages), scrubs: make([]int, modelPages)}
	pattern := rapid.SampledFrom([]kv.Pattern{kv.Zero, kv.NaN}).Draw(rt, "pattern")
	p, err := kv.New(kv.Config{Geometry: m.g, Pages: modelPages, Pattern: pattern, OnEvent: func(e kv.Event) { m.events = append(m.events, e) }})
	if err != nil {
		rt.Fatal(err)
	}
	m.pool = p
	return m
}

func pick[T any](rt *rapid.T, what string, from []T, ok func(T) bool) T {
	var fit []T
	for _, x := range from {
		if ok(x) {
			fit = append(fit, x)
		}
	}
	if len(fit) == 0 {
		rt.Skip("none")
	}
	return rapid.SampledFrom(fit).Draw(rt, what)
}

func (m *model) inUse() map[uint32]bool {
	used := map[uint32]bool{}
	for _, h := range m.handles {
		for _, r := range h.pages {
			used[r.Index] = true
		}
	}
	for _, o := range m.opens {
		for _, i := range o.pages {
			used[i] = true
		}
	}
	return used
}

func (m *model) promised() (n int) {
	for _, c := range m.credits {
		n += c.n
	}
	for _, h := range m.handles {
		n += h.credits
	}
	return n
}

func (m *model) reserve(rt *rapid.T) {
	owner := kvtest.Owner(rapid.Uint64Range(1, 3).Draw(rt, "owner"))
	n := rapid.IntRange(1, 6).Draw(rt, "pages")
	free := modelPages - len(m.inUse()) - m.promised()
	c, err := m.pool.Reserve(owner, n)
	if n > free {
		e, ok := errors.AsType[kv.ErrExhausted](err)
		if !ok || e != (kv.ErrExhausted{Want: n, Free: free}) {
			rt.Fatalf("reserve %d of %d: %v", n, free, err)
		}
		return
	}
	if err != nil {
		rt.Fatalf("reserve %d of %d: %v", n, free, err)
	}
	m.credits = append(m.credits, &mCredits{c, owner, n})
}

func (m *model) takeCredits(c *mCredits) {
	for i := range m.credits {
		if m.credits[i] == c {
			m.credits = append(m.credits[:i], m.credits[i+1:]...)
			return
		}
	}
}

func anyCredits(*mCredits) bool { return true }

func (m *model) giveBack(rt *rapid.T) {
	c := pick(rt, "credits", m.credits, anyCredits)
	c.c.Return()
	c.c.Return()
	m.takeCredits(c)
}

func (m *model) fill(rt *rapid.T) {
	c := pick(rt, "credits", m.credits, anyCredits)
	f, err := c.c.Fill(id.NewLease())
	if err != nil {
		rt.Fatal(err)
	}
	m.takeCredits(c)
	m.handles = append(m.handles, &mHandle{owner: c.owner, seed: rapid.Uint64Range(1, 1<<20).Draw(rt, "seed"), filler: f, credits: c.n})
}

// granted takes note of pages that a handle was just given, and checks each.
func (m *model) granted(rt *rapid.T, h *mHandle, before map[uint32]bool, n int, extents []kv.Extent, err error) {
	if n > h.credits {
		if !errors.Is(err, kv.ErrNoCredit) {
			rt.Fatalf("grant %d of %d: %v", n, h.credits, err)
		}
		return
	}
	if err != nil {
		rt.Fatalf("grant %d of %d: %v", n, h.credits, err)
	}
	m.lastGen++
	all := kvtest.Refs(extents)
	if len(all) != len(h.pages)+n {
		rt.Fatalf("%d pages after a grant of %d to %d", len(all), n, len(h.pages))
	}
	for _, r := range all[len(h.pages):] {
		if before[r.Index] {
			rt.Fatalf("page %d was granted while in use", r.Index)
		}
		if r.Generation != m.lastGen {
			rt.Fatalf("generation %d, want %d", r.Generation, m.lastGen)
		}
		if o := m.last[r.Index]; !o.IsZero() && o != h.owner {
			m.scrubs[r.Index]++
		}
		if got := m.pool.Page(r.Index).Scrubs; got != m.scrubs[r.Index] {
			rt.Fatalf("page %d scrubbed %d times, want %d", r.Index, got, m.scrubs[r.Index])
		}
		m.last[r.Index] = h.owner
	}
	h.pages = all
	h.credits -= n
}

func (m *model) grant(rt *rapid.T) {
	h := pick(rt, "filler", m.handles, func(h *mHandle) bool { return h.filler != nil })
	n := rapid.IntRange(1, 4).Draw(rt, "pages")
	before := m.inUse()
	err := h.filler.Grant(n)
	m.granted(rt, h, before, n, h.filler.Extents(), err)
}

func (m *model) extend(rt *rapid.T) {
	h := pick(rt, "sequence", m.handles, func(h *mHandle) bool { return h.seq != nil })
	to := h.len + rapid.IntRange(1, 40).Draw(rt, "positions")
	n := m.g.PagesFor(to) - len(h.pages)
	before := m.inUse()
	err := h.seq.Extend(to)
	if n < 1 {
		if err != nil {
			rt.Fatal(err)
		}
		return
	}
	m.granted(rt, h, before, n, h.seq.Extents(), err)
}

// openPass opens a pass where it is allowed, and checks that it is refused
// where not.
func (m *model) openPass(rt *rapid.T) {
	h := pick(rt, "handle", m.handles, func(h *mHandle) bool { return h.filler != nil || h.seq != nil })
	pos := rapid.IntRange(max(0, h.len-20), h.len+1).Draw(rt, "pos")
	count := rapid.IntRange(1, 40).Draw(rt, "count")
	open := func() (*kv.Table, error) { return h.filler.Table(pos, count) }
	sealedWrite := false
	if h.seq != nil {
		open = func() (*kv.Table, error) { return h.seq.Table(pos, count) }
		sealedWrite = pos < len(h.pages)*16 && m.pool.Page(h.pages[pos/16].Index).State == kv.StateSealed
	}
	table, err := open()
	switch {
	case h.open:
		if !errors.Is(err, kv.ErrOpen) {
			rt.Fatalf("second pass: %v", err)
		}
		return
	case pos > h.len || pos+count > len(h.pages)*16 || sealedWrite:
		if !errors.Is(err, kv.ErrRange) {
			rt.Fatalf("pass %d+%d with %d positions and %d pages: %v", pos, count, h.len, len(h.pages), err)
		}
		return
	case err != nil:
		rt.Fatal(err)
	}
	// What the owner can see is its own, wiped, or never used.
	for i, page := range kvtest.Pages(m.t, m.g, table, pos+count) {
		if i*16 < h.touched {
			continue
		}
		mine := false
		for _, e := range m.events {
			if e.Kind == kv.EventGrant && e.Owner == h.owner && h.pages[i].Index-e.First < e.Count && e.Generation < h.pages[i].Generation {
				mine = true
			}
		}
		if !mine && !allOf(page, 0) && !allOf(page, 0xFF) {
			rt.Fatalf("page %d is not wiped", h.pages[i].Index)
		}
	}
	o := &mOpen{h: h, table: table, pos: pos, count: count, write: true}
	for _, r := range h.pages[:m.g.PagesFor(pos+count)] {
		o.pages = append(o.pages, r.Index)
	}
	h.open = true
	m.opens = append(m.opens, o)
}

func allOf(b []byte, v byte) bool {
	for _, x := range b {
		if x != v {
			return false
		}
	}
	return true
}

func (m *model) endOpen(rt *rapid.T) {
	o := pick(rt, "hold", m.opens, func(*mOpen) bool { return true })
	if o.table != nil {
		wrote := rapid.IntRange(0, o.count).Draw(rt, "wrote")
		if o.h == nil {
			if _, err := o.table.Resolve(nil, 1); !errors.Is(err, kv.ErrStale) {
				rt.Fatalf("resolve after release: %v", err)
			}
			if err := o.table.Advance(wrote); !errors.Is(err, kv.ErrStale) {
				rt.Fatalf("advance after release: %v", err)
			}
		} else {
			if wrote > 0 {
				kvtest.Write(m.t, m.g, o.table, o.pos, wrote, o.h.seed)
			}
			if err := o.table.Advance(wrote); err != nil {
				rt.Fatal(err)
			}
			o.h.len = max(o.h.len, o.pos+wrote)
			o.h.touched = max(o.h.touched, o.h.len)
			if wrote < o.count {
				o.h.len = min(o.h.len, o.pos+wrote)
			}
			o.h.open = false
		}
		o.table.Close()
		o.table.Close()
	} else {
		o.end()
	}
	for i := range m.opens {
		if m.opens[i] == o {
			m.opens = append(m.opens[:i], m.opens[i+1:]...)
			break
		}
	}
}

func (m *model) seal(rt *rapid.T) {
	m.sealOne(rt, pick(rt, "filler", m.handles, func(h *mHandle) bool { return h.filler != nil }))
}

func (m *model) sealOne(rt *rapid.T, h *mHandle) {
	s, err := h.filler.Seal(h.len)
	switch {
	case h.open:
		if !errors.Is(err, kv.ErrOpen) {
			rt.Fatalf("seal under a pass: %v", err)
		}
	case h.len == 0 || m.g.PagesFor(h.len) != len(h.pages):
		if !errors.Is(err, kv.ErrCoverage) {
			rt.Fatalf("seal %d positions in %d pages: %v", h.len, len(h.pages), err)
		}
	case err != nil:
		rt.Fatal(err)
	default:
		h.filler, h.sealed, h.credits = nil, s, 0
	}
}

func (m *model) retain(rt *rapid.T) {
	h := pick(rt, "sealed", m.handles, func(h *mHandle) bool { return h.sealed != nil })
	s, err := h.sealed.Retain()
	if err != nil {
		rt.Fatal(err)
	}
	m.handles = append(m.handles, &mHandle{owner: h.owner, seed: h.seed, sealed: s, pages: h.pages, len: h.len})
}

// view opens a page for reading and keeps it open in a goroutine.
func (m *model) view(rt *rapid.T) {
	h := pick(rt, "sealed", m.handles, func(h *mHandle) bool { return h.sealed != nil })
	r := rapid.SampledFrom(h.pages).Draw(rt, "page")
	inside, leave, left := make(chan struct{}), make(chan struct{}), make(chan error)
	s := h.sealed
	go func() {
		left <- s.View(r, func([]byte) error { close(inside); <-leave; return nil })
	}()
	select {
	case <-inside:
	case err := <-left:
		rt.Fatal(err)
	}
	m.opens = append(m.opens, &mOpen{h: h, pages: []uint32{r.Index}, end: func() {
		close(leave)
		if err := <-left; err != nil {
			rt.Fatal(err)
		}
	}})
}

// prompt takes a whole prompt to the sealed state in one action, so that
// schedules get far.
func (m *model) prompt(rt *rapid.T) {
	tokens := rapid.IntRange(1, 40).Draw(rt, "tokens")
	owner := kvtest.Owner(rapid.Uint64Range(1, 3).Draw(rt, "owner"))
	n := m.g.PagesFor(tokens)
	if n > modelPages-len(m.inUse())-m.promised() {
		rt.Skip("full")
	}
	before := m.inUse()
	c, err := m.pool.Reserve(owner, n)
	if err != nil {
		rt.Fatal(err)
	}
	f, err := c.Fill(id.NewLease())
	if err != nil {
		rt.Fatal(err)
	}
	h := &mHandle{owner: owner, seed: rapid.Uint64Range(1, 1<<20).Draw(rt, "seed"), filler: f, credits: n}
	m.handles = append(m.handles, h)
	err = f.Grant(n)
	m.granted(rt, h, before, n, f.Extents(), err)
	table, err := f.Table(0, tokens)
	if err != nil {
		rt.Fatal(err)
	}
	kvtest.Write(m.t, m.g, table, 0, tokens, h.seed)
	if err := table.Advance(tokens); err != nil {
		rt.Fatal(err)
	}
	table.Close()
	h.len, h.touched = tokens, tokens
	m.sealOne(rt, h)
}

// handOver lands, copies and commits what a sealed handle holds; sometimes with
// a flipped bit.
func (m *model) handOver(rt *rapid.T) {
	from := pick(rt, "sealed", m.handles, func(h *mHandle) bool { return h.sealed != nil })
	n := len(from.pages) + rapid.IntRange(0, 2).Draw(rt, "growth")
	if n > modelPages-len(m.inUse())-m.promised() {
		rt.Skip("full")
	}
	c, err := m.pool.Reserve(from.owner, n)
	if err != nil {
		rt.Fatal(err)
	}
	flip := rapid.IntRange(0, 3).Draw(rt, "flip") == 3
	abort := rapid.IntRange(0, 3).Draw(rt, "abort") == 3
	l, err := c.Land(id.NewLease())
	if err != nil {
		rt.Fatal(err)
	}
	h := &mHandle{owner: from.owner, seed: from.seed, landing: l, credits: n}
	before := m.inUse()
	err = l.Grant(len(from.pages))
	m.handles = append(m.handles, h)
	m.granted(rt, h, before, len(from.pages), l.Extents(), err)
	m.check(rt)
	if err := kvtest.Land(from.sealed, l, func(pages [][]byte) {
		if flip {
			pages[0][1] ^= 1
		}
	}); err != nil {
		rt.Fatal(err)
	}
	if abort {
		l.Abort()
	}
	seq, err := l.Commit(kvtest.Claim(m.t, from.sealed, key))
	h.landing = nil
	if abort || flip {
		if want := map[bool]error{true: kv.ErrStale, false: kv.ErrDigest}[abort]; !errors.Is(err, want) {
			rt.Fatalf("commit: %v, want %v", err, want)
		}
		m.drop(h)
		return
	}
	if err != nil {
		rt.Fatal(err)
	}
	h.seq, h.len, h.touched = seq, from.len, from.len
}

func (m *model) drop(h *mHandle) {
	for i := range m.handles {
		if m.handles[i] == h {
			m.handles = append(m.handles[:i], m.handles[i+1:]...)
			break
		}
	}
	for _, o := range m.opens {
		if o.h == h {
			o.h = nil
		}
	}
}

func (m *model) release(rt *rapid.T) {
	h := pick(rt, "handle", m.handles, func(*mHandle) bool { return true })
	m.releaseOne(h)
}

func (m *model) releaseOne(h *mHandle) {
	for range 2 {
		switch {
		case h.filler != nil:
			h.filler.Abort()
		case h.sealed != nil:
			h.sealed.Release()
		case h.seq != nil:
			h.seq.Release()
		}
	}
	m.drop(h)
}

// check compares the pool with the model after every action.
func (m *model) check(rt *rapid.T) {
	if err := m.pool.Audit(); err != nil {
		rt.Fatal(err)
	}
	refs := map[uint32]int{}
	gens := map[uint32]uint64{}
	var want kv.Stats
	for _, h := range m.handles {
		for _, r := range h.pages {
			refs[r.Index]++
			if g, ok := gens[r.Index]; ok && g != r.Generation {
				rt.Fatalf("page %d is held under two generations", r.Index)
			}
			gens[r.Index] = r.Generation
		}
	}
	for i := range uint32(modelPages) {
		info := m.pool.Page(i)
		readers, writers := 0, 0
		for _, o := range m.opens {
			for k, x := range o.pages {
				if x == i {
					readers++
					if o.write && k >= o.pos/16 {
						writers++
					}
				}
			}
		}
		if info.Refs != refs[i] || info.Readers != readers || info.Writers != writers || info.Owner != m.last[i] {
			rt.Fatalf("page %d is %+v; want %d refs, %d readers, %d writers, owner %v", i, info, refs[i], readers, writers, m.last[i].Short())
		}
		switch {
		case refs[i] > 0:
			if info.State.Free() || info.State == kv.StateQuarantined || info.Generation != gens[i] {
				rt.Fatalf("page %d is held and %+v", i, info)
			}
		case readers+writers > 0:
			want.Quarantined++
			if info.State != kv.StateQuarantined {
				rt.Fatalf("page %d is open and %v", i, info.State)
			}
		default:
			if !info.State.Free() {
				rt.Fatalf("page %d is nobody's and %v", i, info.State)
			}
		}
	}
	st := m.pool.Stats()
	if st.Clean+st.Dirty+st.Granted+st.Filling+st.Reading+st.Sealed+st.Quarantined != modelPages ||
		st.Quarantined != want.Quarantined || st.Credits != m.promised() || st.Generation != m.lastGen || st.Granted != 0 ||
		st.Free != modelPages-len(m.inUse())-m.promised() {
		rt.Fatalf("stats are %+v", st)
	}
	for _, h := range m.handles {
		if h.seq != nil && !h.open {
			if h.seq.Len() != h.len {
				rt.Fatalf("length %d, want %d", h.seq.Len(), h.len)
			}
			for pos := range h.len {
				b, err := h.seq.TokenBytes(pos, nil)
				if err != nil || string(b) != string(kvtest.Token(m.g, h.seed, pos)) {
					rt.Fatalf("position %d of %d of a sequence is not what was written: %v", pos, h.len, err)
				}
			}
		}
	}
	for i, e := range m.events {
		if e.Seq != uint64(i+1) {
			rt.Fatalf("event %d has number %d", i+1, e.Seq)
		}
	}
}

func TestPoolAgainstModel(t *testing.T) {
	t.Parallel()
	done := map[string]int{}
	rapid.Check(t, func(rt *rapid.T) {
		m := newModel(t, rt)
		defer func() {
			// Everything can be given back from anywhere, and then all is free.
			for len(m.opens) > 0 {
				o := m.opens[0]
				if o.table != nil {
					o.table.Close()
				} else {
					o.end()
				}
				m.opens = m.opens[1:]
			}
			for len(m.handles) > 0 {
				m.releaseOne(m.handles[0])
			}
			for _, c := range m.credits {
				c.c.Return()
			}
			if err := m.pool.Close(); err != nil && !rt.Failed() {
				rt.Fatalf("after the end: %v", err)
			}
		}()
		actions := map[string]func(*rapid.T){
			"": m.check, "reserve": m.reserve, "return": m.giveBack, "fill": m.fill, "grant": m.grant, "extend": m.extend,
			"open pass": m.openPass, "end hold": m.endOpen, "seal": m.seal, "retain": m.retain, "view": m.view,
			"prompt": m.prompt, "hand over": m.handOver, "release": m.release,
		}
		for name, f := range actions {
			if name != "" {
				actions[name] = func(rt *rapid.T) { f(rt); done[name]++ }
			}
		}
		rt.Repeat(actions)
	})
	// A model that never gets anywhere proves nothing.
	for _, name := range []string{"seal", "hand over", "view", "extend"} {
		if done[name] == 0 {
			t.Errorf("no schedule got as far as %q: %v", name, fmt.Sprint(done))
		}
	}
	assert.True(t, done["release"] > 0)
}
