package kv

import (
	"fmt"
	"slices"

	"bulkhead.dev/infra/id"
)

// PageRef names a page as it was granted once. After the next grant of the page
// it names nothing.
type PageRef struct {
	Index      uint32
	Generation uint64
}

// Extent is a run of neighboring pages of one grant.
type Extent struct {
	First, Count uint32
	Generation   uint64
	// Scrubbed is how many of them were wiped for this grant.
	Scrubbed uint32
}

// holding is what a lease has. The handles (Filler, Landing, Sealed, Sequence)
// point to it with the phase they were made for; a handle of an earlier phase
// is stale. Everything but the first three fields is under pool.mu.
type holding struct {
	pool  *Pool
	owner id.Owner
	lease id.Lease

	phase   uint32    // counts up with every change of hands; 0 is never valid
	credits int       // not drawn yet
	refs    []PageRef // pages in order of position; only ever appended to
	wiped   []bool    // which of refs were wiped for their grant
	extents []Extent  // refs in short, kept after release for the records
	length  int       // positions [0, length) are proven readable
	pass    *Table    // the open pass, or nil
	busy    bool      // a receive or a commit is at work outside the lock
	granted int       // leading pages of refs whose grant is complete
	decode  bool      // seal each page as soon as it is full
	landed  []landed  // the first pages of refs, while they are a landing
	key     DigestKey // under which they were digested
}

// handle is the common part of the exported handles.
type handle struct {
	h     *holding
	phase uint32
}

// Owner returns the owner that the pages are held for.
func (a handle) Owner() id.Owner { return a.h.owner }

// Lease returns the lease that the pages were granted under.
func (a handle) Lease() id.Lease { return a.h.lease }

// Geometry returns the geometry of the pages.
func (a handle) Geometry() Geometry { return a.h.pool.geometry }

// Extents returns what was granted so far, in order of position. It still
// answers after release, for the records.
func (a handle) Extents() []Extent {
	a.h.pool.mu.Lock()
	defer a.h.pool.mu.Unlock()
	return slices.Clone(a.h.extents)
}

// Len returns the number of positions that are proven readable: those that
// passes wrote, or that a commit found in verified pages.
func (a handle) Len() int {
	a.h.pool.mu.Lock()
	defer a.h.pool.mu.Unlock()
	return a.h.length
}

// Pages returns the number of pages granted so far.
func (a handle) Pages() int {
	a.h.pool.mu.Lock()
	defer a.h.pool.mu.Unlock()
	return len(a.h.refs)
}

// live returns ErrStale if the handle was released or consumed. Callers hold
// mu.
func (a handle) live() error {
	if a.h.pool.corrupt {
		return ErrCorrupt
	}
	if a.h.phase != a.phase {
		return ErrStale
	}
	return nil
}

// check compares owner and generation of a page of this holding. Callers hold
// mu.
func (h *holding) check(r PageRef) (*page, error) {
	g := &h.pool.pages[r.Index]
	if g.generation != r.Generation || g.owner != h.owner || g.state.Free() || g.state == StateQuarantined {
		return nil, fmt.Errorf("%w: page %d generation %d", ErrStale, r.Index, r.Generation)
	}
	return g, nil
}

// grant draws n pages against the credits, scrubs those that another owner had,
// and then lets them be used in the way that op says.
func (a handle) grant(n int, op Op) error {
	h, p := a.h, a.h.pool
	if n < 1 {
		return fmt.Errorf("%w: grant of %d pages", ErrRange, n)
	}
	p.mu.Lock()
	if err := a.grantable(n); err != nil {
		p.mu.Unlock()
		return err
	}
	h.credits -= n
	p.promised -= n
	p.generation++
	p.grants++
	p.granted += uint64(n)
	got := p.draw(make([]uint32, 0, n), n)
	var wipe []uint32
	ev := history{p: p}
	for _, i := range got {
		g := &p.pages[i]
		due := p.due(g, h.owner)
		p.step(i, OpGrant)
		g.owner, g.lease, g.generation = h.owner, h.lease, p.generation
		g.refs, g.writers = 1, 1 // the scrub below is a writer: nothing frees the page before it is done
		if due {
			wipe = append(wipe, i)
		}
		h.append(PageRef{i, p.generation}, due)
		ev.add(EventGrant, i)
	}
	ev.flush()
	p.mu.Unlock()

	// Outside the lock: nobody but this call can reach a page in state Granted.
	for _, i := range wipe {
		p.wipe(i)
	}

	p.mu.Lock()
	defer p.mu.Unlock()
	for _, i := range wipe {
		p.wiped(i, AtGrant, &ev)
	}
	for _, i := range got {
		g := &p.pages[i]
		g.writers--
		if g.state == StateGranted {
			p.step(i, op)
			continue
		}
		p.settle(i, &ev)
	}
	ev.flush()
	if err := a.live(); err != nil {
		return err
	}
	h.granted += n
	return nil
}

func (a handle) grantable(n int) error {
	if err := a.live(); err != nil {
		return err
	}
	if a.h.busy || a.h.granted != len(a.h.refs) {
		return ErrOpen
	}
	if n > a.h.credits {
		return fmt.Errorf("%w: want %d pages, %d left", ErrNoCredit, n, a.h.credits)
	}
	return nil
}

// append notes a page that was granted. Callers hold mu.
func (h *holding) append(r PageRef, scrubbed bool) {
	h.refs = append(h.refs, r)
	h.wiped = append(h.wiped, scrubbed)
	h.extents = extend(h.extents, r, scrubbed)
}

// extend adds a page to extents.
func extend(extents []Extent, r PageRef, scrubbed bool) []Extent {
	if n := len(extents); n == 0 || extents[n-1].Generation != r.Generation || extents[n-1].First+extents[n-1].Count != r.Index {
		extents = append(extents, Extent{First: r.Index, Generation: r.Generation})
	}
	e := &extents[len(extents)-1]
	e.Count++
	if scrubbed {
		e.Scrubbed++
	}
	return extents
}

// share makes another holding of the first pages, with a reference of its own
// on each, all sealed. Callers hold mu.
func (h *holding) share(pages int) *Sealed {
	out := &holding{
		pool: h.pool, owner: h.owner, lease: h.lease, phase: 1,
		refs: h.refs[:pages:pages], wiped: h.wiped[:pages:pages],
		length: min(h.length, pages*h.pool.geometry.PageTokens), granted: pages,
	}
	for i, r := range out.refs {
		h.pool.pages[r.Index].refs++
		out.extents = extend(out.extents, r, out.wiped[i])
	}
	return &Sealed{handle{out, out.phase}}
}

// returnCredits gives back what was not drawn. Callers hold mu.
func (h *holding) returnCredits() {
	h.pool.promised -= h.credits
	h.credits = 0
	h.pool.wakeScrub()
}

// release gives back all pages and credits of a handle that is still live.
func (a handle) release() {
	a.h.pool.mu.Lock()
	defer a.h.pool.mu.Unlock()
	a.releaseLocked()
}

func (a handle) releaseLocked() {
	h := a.h
	if a.live() != nil {
		return
	}
	h.phase++
	h.returnCredits()
	ev := history{p: h.pool}
	for _, r := range h.refs {
		h.pool.drop(r, h.owner, &ev)
	}
	ev.flush()
}
