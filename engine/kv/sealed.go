package kv

import "fmt"

// Sealed is a handle on pages that nobody writes any more. The pages stay until
// every handle on them is released.
type Sealed struct{ handle }

// Tokens returns the number of positions in the pages, as written by the
// passes.
func (s *Sealed) Tokens() int { return s.Len() }

// Retain makes another handle on the same pages. Each is released on its own.
func (s *Sealed) Retain() (*Sealed, error) {
	h, p := s.h, s.h.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := s.live(); err != nil {
		return nil, err
	}
	return h.share(len(h.refs)), nil
}

// View calls f with the bytes of one page and holds the page open for reading
// until f returns. f must neither write nor keep them. ErrRange means that the
// page is not among those of the handle; ErrStale that it is under another
// generation, or that the handle was released.
func (s *Sealed) View(ref PageRef, f func(page []byte) error) error {
	p := s.h.pool
	p.mu.Lock()
	g, err := s.find(ref)
	if err != nil {
		p.mu.Unlock()
		return err
	}
	g.readers++
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		g.readers--
		ev := history{p: p}
		p.settle(ref.Index, &ev)
		ev.flush()
	}()
	return f(p.bytes(ref.Index))
}

// find checks that a page belongs to the handle as named. Callers hold mu.
func (s *Sealed) find(ref PageRef) (*page, error) {
	if err := s.live(); err != nil {
		return nil, err
	}
	for _, e := range s.h.extents {
		if ref.Index < e.First || ref.Index-e.First >= e.Count {
			continue
		}
		if ref.Generation != e.Generation {
			return nil, fmt.Errorf("%w: page %d has generation %d, not %d", ErrStale, ref.Index, e.Generation, ref.Generation)
		}
		g, err := s.h.check(ref)
		if err != nil {
			return nil, err
		}
		if g.state != StateSealed {
			return nil, fmt.Errorf("%w: page %d is %v", ErrStale, ref.Index, g.state)
		}
		return g, nil
	}
	return nil, fmt.Errorf("%w: page %d", ErrRange, ref.Index)
}

// Sums digests the pages from the given one on, in order of position.
func (s *Sealed) Sums(key DigestKey, from int) ([]Sum, error) {
	d, err := newDigester(key)
	if err != nil {
		return nil, err
	}
	s.h.pool.mu.Lock()
	refs := s.h.refs
	s.h.pool.mu.Unlock()
	if from < 0 || from > len(refs) {
		return nil, fmt.Errorf("%w: digests from page %d of %d on", ErrRange, from, len(refs))
	}
	sums := make([]Sum, 0, len(refs)-from)
	for i, r := range refs[from:] {
		if err := s.View(r, func(page []byte) error {
			sums = append(sums, d.sum(from+i, r.Generation, page))
			return nil
		}); err != nil {
			return nil, err
		}
	}
	return sums, nil
}

// Release gives the pages back. It may be called any number of times. A page
// that a View has open is quarantined until that ends.
func (s *Sealed) Release() { s.release() }
