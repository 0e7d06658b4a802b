package kv

import "fmt"

// Filler is the handle of a prefill lease: pages that forward passes fill.
type Filler struct{ handle }

// Grant draws pages against the credits. They come after those granted before,
// hold nothing of another owner, and can be written at once.
func (f *Filler) Grant(pages int) error { return f.grant(pages, OpFill) }

// Table opens a pass that reads positions [0, pos) and writes [pos, pos+count).
// pos is at most Len and all pages must have been granted. One pass is open at
// a time.
func (f *Filler) Table(pos, count int) (*Table, error) { return f.openPass(pos, count) }

// Finished seals the pages that are full and returns another handle on all of
// them, for others to read while the filler goes on behind them. It returns nil
// if there are none. It refuses with ErrOpen while a pass is open.
func (f *Filler) Finished() (*Sealed, error) {
	h, p := f.h, f.h.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := f.idle(); err != nil {
		return nil, err
	}
	full := h.length / p.geometry.PageTokens
	if full == 0 {
		return nil, nil //nolint:nilnil // no page is full yet
	}
	if err := h.seal(full); err != nil {
		return nil, err
	}
	return h.share(full), nil
}

// idle refuses a handle that is stale or at work. Callers hold mu.
func (f *Filler) idle() error {
	if err := f.live(); err != nil {
		return err
	}
	if f.h.pass != nil || f.h.granted != len(f.h.refs) {
		return ErrOpen
	}
	return nil
}

// seal seals the first pages, those that are not yet. Callers hold mu.
func (h *holding) seal(pages int) error {
	for _, r := range h.refs[:pages] {
		if _, err := h.check(r); err != nil {
			return err
		}
	}
	ev := history{p: h.pool}
	for _, r := range h.refs[:pages] {
		if h.pool.pages[r.Index].state == StateFilling {
			h.pool.step(r.Index, OpSeal)
			ev.add(EventSeal, r.Index)
		}
	}
	ev.flush()
	return nil
}

// Seal ends the writing and consumes the filler. tokens must be what the passes
// wrote, and exactly the pages for it must have been granted. It wipes the
// slots after the last position, so that every byte of every page is defined.
// Credits that were not drawn are returned. On error the filler stays as it is.
func (f *Filler) Seal(tokens int) (*Sealed, error) {
	h, p := f.h, f.h.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := f.idle(); err != nil {
		return nil, err
	}
	if tokens < 1 || tokens != h.length {
		return nil, fmt.Errorf("%w: %d positions are written, %d to be sealed", ErrCoverage, h.length, tokens)
	}
	if want := p.geometry.PagesFor(tokens); want != len(h.refs) {
		return nil, fmt.Errorf("%w: %d positions need %d pages, %d are granted", ErrCoverage, tokens, want, len(h.refs))
	}
	last := h.refs[len(h.refs)-1]
	if g, err := h.check(last); err != nil {
		return nil, err
	} else if g.state == StateFilling {
		p.geometry.zeroTail(p.bytes(last.Index), tokens-(len(h.refs)-1)*p.geometry.PageTokens)
	}
	if err := h.seal(len(h.refs)); err != nil {
		return nil, err
	}
	h.returnCredits()
	h.phase++
	return &Sealed{handle{h, h.phase}}, nil
}

// Abort gives everything back. It may be called at any time, any number of
// times; after Seal it does nothing.
func (f *Filler) Abort() { f.release() }
