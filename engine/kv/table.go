package kv

import (
	"fmt"
	"unsafe"
)

// Table is the block table of one forward pass, and the hold that makes the
// pass safe: while it is open none of its pages can be freed, whoever aborts
// the lease. Close it on every path. It implements compute.Pages.
type Table struct {
	a          handle
	pos, count int
	refs       []PageRef // pages that hold [0, pos+count)
	firstWrite int       // index into refs of the first page that is written

	wrote  int  // under pool.mu
	closed bool // under pool.mu
}

func (a handle) openPass(pos, count int) (*Table, error) {
	h, p := a.h, a.h.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := a.live(); err != nil {
		return nil, err
	}
	if h.pass != nil {
		return nil, ErrOpen
	}
	if pos < 0 || pos > h.length || count < 1 || count > h.granted*p.geometry.PageTokens-pos {
		return nil, fmt.Errorf("%w: a pass over [0, %d) and %d more, with %d positions readable and %d pages",
			ErrRange, pos, count, h.length, h.granted)
	}
	t := &Table{
		a: a, pos: pos, count: count,
		refs: h.refs[:p.geometry.PagesFor(pos+count):p.geometry.PagesFor(pos+count)], firstWrite: pos / p.geometry.PageTokens,
	}
	if err := t.check(len(t.refs)); err != nil {
		return nil, err
	}
	for i, r := range t.refs {
		g := &p.pages[r.Index]
		g.readers++
		if i >= t.firstWrite {
			g.writers++
		}
	}
	h.pass = t
	return t, nil
}

// check looks at owner, generation and state of the first n pages, at this
// moment. Callers hold mu.
func (t *Table) check(n int) error {
	for i, r := range t.refs[:n] {
		g, err := t.a.h.check(r)
		if err != nil {
			return err
		}
		switch {
		case g.state == StateFilling:
		case g.state == StateSealed && i < t.firstWrite:
		case g.state == StateSealed:
			return fmt.Errorf("%w: page %d is sealed and cannot be written", ErrRange, i)
		default:
			return fmt.Errorf("%w: page %d is %v", ErrStale, r.Index, g.state)
		}
	}
	return nil
}

// Resolve appends the addresses of the pages that hold positions [0, positions)
// to dst. It looks at owner, generation and state of every page at this moment:
// ErrStale if any is not what it was, ErrRange beyond what the pass was opened
// for. The addresses are good until Close.
func (t *Table) Resolve(dst []uintptr, positions int) ([]uintptr, error) {
	p := t.a.h.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	if t.closed {
		return dst, fmt.Errorf("%w: pass is closed", ErrStale)
	}
	if err := t.a.live(); err != nil {
		return dst, err
	}
	if positions < 0 || positions > t.pos+t.count {
		return dst, fmt.Errorf("%w: %d positions in a pass over %d", ErrRange, positions, t.pos+t.count)
	}
	n := p.geometry.PagesFor(positions)
	if err := t.check(n); err != nil {
		return dst, err
	}
	for _, r := range t.refs[:n] {
		dst = append(dst, uintptr(unsafe.Pointer(&p.bytes(r.Index)[0])))
	}
	return dst, nil
}

// Advance notes how many positions from pos on the pass wrote, in every layer.
// They become readable. Call it once, between the pass and Close.
func (t *Table) Advance(wrote int) error {
	h := t.a.h
	h.pool.mu.Lock()
	defer h.pool.mu.Unlock()
	if t.closed {
		return fmt.Errorf("%w: pass is closed", ErrStale)
	}
	if err := t.a.live(); err != nil {
		return err
	}
	if wrote < 0 || wrote > t.count {
		return fmt.Errorf("%w: %d positions written in a pass over %d", ErrRange, wrote, t.count)
	}
	t.wrote = wrote
	h.length = max(h.length, t.pos+wrote)
	return nil
}

// Close ends the pass. If it had begun to write over positions that were
// readable and did not report them as written, they are readable no more. It
// may be called any number of times.
func (t *Table) Close() {
	h, p := t.a.h, t.a.h.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	if t.closed {
		return
	}
	t.closed = true
	ev := history{p: p}
	for i, r := range t.refs {
		g := &p.pages[r.Index]
		g.readers--
		if i >= t.firstWrite {
			g.writers--
		}
		p.settle(r.Index, &ev)
	}
	if h.pass == t {
		h.pass = nil
	}
	if t.a.live() == nil {
		if t.wrote < t.count {
			h.length = min(h.length, t.pos+t.wrote)
		}
		if h.decode {
			for i := t.firstWrite; i < h.length/p.geometry.PageTokens && i < len(t.refs); i++ {
				if x := t.refs[i].Index; p.pages[x].state == StateFilling {
					p.step(x, OpSeal)
					ev.add(EventSeal, x)
				}
			}
		}
	}
	ev.flush()
}
