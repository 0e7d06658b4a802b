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

// Reserve promises pages to an owner. The error is an ErrExhausted if the pool
// cannot keep the promise; reserving never waits.
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
