package kv

import (
	"fmt"
	"slices"
)

// Sequence is the handle of a decode lease whose prompt is proven: pages that
// decoding reads and writes on. Landing.Commit makes it, nothing else does.
type Sequence struct{ handle }

// Extend grants the pages that positions [0, positions) need beyond those it
// has, against the credits of the lease.
func (s *Sequence) Extend(positions int) error {
	need := s.h.pool.geometry.PagesFor(positions) - s.Pages()
	if need < 1 {
		s.h.pool.mu.Lock()
		defer s.h.pool.mu.Unlock()
		return s.live()
	}
	return s.grant(need, OpFill)
}

// Table opens a pass that reads positions [0, pos) and writes [pos, pos+count).
// pos is at most Len; only the page of the last position and pages after it can
// be written. One pass is open at a time.
func (s *Sequence) Table(pos, count int) (*Table, error) { return s.openPass(pos, count) }

// TokenBytes appends the keys and values of one readable position to dst, in
// all layers: for each layer keys by head and dimension, then values by head
// and dimension. It refuses with ErrOpen while a pass is open.
func (s *Sequence) TokenBytes(pos int, dst []byte) ([]byte, error) {
	h, p := s.h, s.h.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := s.live(); err != nil {
		return dst, err
	}
	if h.pass != nil {
		return dst, ErrOpen
	}
	if pos < 0 || pos >= h.length {
		return dst, fmt.Errorf("%w: position %d of %d", ErrRange, pos, h.length)
	}
	r := h.refs[pos/p.geometry.PageTokens]
	if _, err := h.check(r); err != nil {
		return dst, err
	}
	// One buffer, which the caller can wipe: growing would leave copies behind.
	dst = slices.Grow(dst, p.geometry.TokenBytes())
	return p.geometry.appendToken(dst, p.bytes(r.Index), pos%p.geometry.PageTokens), nil
}

// Release gives everything back. It may be called at any time, any number of
// times; pages that a pass has open are quarantined until it closes.
func (s *Sequence) Release() { s.release() }
