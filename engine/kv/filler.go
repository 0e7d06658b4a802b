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

// Seal ends the writing and consumes the filler. tokens must be what the passes
// wrote, and exactly the pages for it must have been granted. It wipes the
// slots after the last position, so that every byte of every page is defined.
// Credits that were not drawn are returned. On error the filler stays as it is.
func (f *Filler) Seal(tokens int) (*Sealed, error) {
	h, p := f.h, f.h.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := f.live(); err != nil {
		return nil, err
	}
	if h.pass != nil || h.granted != len(h.refs) {
		return nil, ErrOpen
	}
	if tokens < 1 || tokens != h.length {
		return nil, fmt.Errorf("%w: %d positions are written, %d to be sealed", ErrCoverage, h.length, tokens)
	}
	if want := p.geometry.PagesFor(tokens); want != len(h.refs) {
		return nil, fmt.Errorf("%w: %d positions need %d pages, %d are granted", ErrCoverage, tokens, want, len(h.refs))
	}
	for _, r := range h.refs {
		if _, err := h.check(r); err != nil {
			return nil, err
		}
	}
	last := h.refs[len(h.refs)-1].Index
	p.geometry.zeroTail(p.bytes(last), tokens-(len(h.refs)-1)*p.geometry.PageTokens)
	ev := history{p: p}
	for _, r := range h.refs {
		p.step(r.Index, OpSeal)
		ev.add(EventSeal, r.Index)
	}
	ev.flush()
	h.returnCredits()
	h.phase++
	return &Sealed{handle{h, h.phase}}, nil
}

// Abort gives everything back. It may be called at any time, any number of
// times; after Seal it does nothing.
func (f *Filler) Abort() { f.release() }
