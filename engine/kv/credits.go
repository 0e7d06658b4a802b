package kv

import (
	"fmt"

	"bulkhead.dev/infra/id"
)

// Credits are a promise of pages to an owner, not pages. Fill or Land turns
// them into the one object that can draw pages; otherwise Return them. It is
// right to defer Return and go on: it does nothing once they were taken.
type Credits struct {
	pool  *Pool
	owner id.Owner
	pages int
	spent bool // under pool.mu: returned or taken
}

// Reserve promises pages to an owner, for which it gives up pages that are only
// remembered. The error is an ErrExhausted if the pool cannot keep the promise,
// and an ErrQuarantine if too much of it is in quarantine; reserving never waits.
func (p *Pool) Reserve(owner id.Owner, pages int) (*Credits, error) {
	if owner.IsZero() {
		return nil, ErrOwner
	}
	if pages < 1 {
		return nil, fmt.Errorf("%w: %d pages", ErrRange, pages)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, fmt.Errorf("%w: pool is closed", ErrStale)
	}
	if p.corrupt {
		return nil, ErrCorrupt
	}
	if q := p.counts[StateQuarantined]; p.maxQuarantine > 0 && q > p.maxQuarantine {
		return nil, ErrQuarantine{Pages: q, Max: p.maxQuarantine}
	}
	if pages > p.promisable() {
		p.makeRoom(owner, pages)
	}
	if free := p.promisable(); pages > free {
		return nil, ErrExhausted{Want: pages, Free: free}
	}
	p.promised += pages
	return &Credits{pool: p, owner: owner, pages: pages}, nil
}

// Pages returns the number of pages that were promised.
func (c *Credits) Pages() int { return c.pages }

// Return gives the promise back. It may be called any number of times.
func (c *Credits) Return() {
	c.pool.mu.Lock()
	defer c.pool.mu.Unlock()
	if !c.spent {
		c.spent = true
		c.pool.promised -= c.pages
		c.pool.wakeScrub()
	}
}

// Fill turns the credits into the handle of a prefill lease.
func (c *Credits) Fill(lease id.Lease) (*Filler, error) {
	h, err := c.take(lease)
	if err != nil {
		return nil, err
	}
	return &Filler{handle{h, h.phase}}, nil
}

// FillAfter is Fill with the first pages already there: those of start, whose
// references the filler takes over. They need no credits. On an error start is
// released; ErrOwner means that it belongs to another owner.
func (c *Credits) FillAfter(lease id.Lease, start *Sealed) (*Filler, error) {
	f, err := c.fillAfter(lease, start)
	if err != nil {
		start.Release()
	}
	return f, err
}

func (c *Credits) fillAfter(lease id.Lease, start *Sealed) (*Filler, error) {
	s := start.h
	if s.owner != c.owner || s.pool != c.pool {
		return nil, fmt.Errorf("%w: the first pages are not those of the credits", ErrOwner)
	}
	h, err := c.take(lease)
	if err != nil {
		return nil, err
	}
	c.pool.mu.Lock()
	defer c.pool.mu.Unlock()
	if err := start.live(); err != nil || s.length != len(s.refs)*c.pool.geometry.PageTokens {
		h.returnCredits()
		h.phase++
		return nil, fmt.Errorf("%w: the first pages are not whole", ErrStale)
	}
	s.phase++ // its references are the filler's now
	h.refs, h.wiped, h.extents = s.refs, s.wiped, s.extents
	h.length, h.granted = s.length, s.granted
	covered := min(len(h.refs), h.credits)
	h.credits -= covered
	c.pool.promised -= covered
	c.pool.wakeScrub()
	return &Filler{handle{h, h.phase}}, nil
}

// Land turns the credits into the handle of a decode lease.
func (c *Credits) Land(lease id.Lease) (*Landing, error) {
	h, err := c.take(lease)
	if err != nil {
		return nil, err
	}
	return &Landing{handle{h, h.phase}}, nil
}

func (c *Credits) take(lease id.Lease) (*holding, error) {
	c.pool.mu.Lock()
	defer c.pool.mu.Unlock()
	if c.spent {
		return nil, fmt.Errorf("%w: credits were returned or taken", ErrStale)
	}
	c.spent = true
	return &holding{pool: c.pool, owner: c.owner, lease: lease, credits: c.pages, phase: 1}, nil
}
