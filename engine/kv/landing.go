package kv

import (
	"crypto/subtle"
	"fmt"
	"sync/atomic"
)

// Landing is the handle of a decode lease before its pages are proven. Only the
// fabric can write them, through Receive, and nothing can read them. Commit or
// Abort it.
type Landing struct{ handle }

// Grant draws the pages that the fabric will write.
func (l *Landing) Grant(pages int) error { return l.grant(pages, OpLand) }

// Receive calls read with a function that gives the memory of the i-th page of
// the landing, or nil if there is none, and holds all pages open for writing
// until read returns. When read returns nothing may write into that memory any
// more: a fabric reader has done so by then or has torn down what could. If the
// landing is aborted meanwhile the pages are quarantined until then.
func (l *Landing) Receive(read func(land func(i int) []byte) error) error {
	h, p := l.h, l.h.pool
	p.mu.Lock()
	if err := l.idle(); err != nil {
		p.mu.Unlock()
		return err
	}
	refs := h.refs
	h.busy = true
	for _, r := range refs {
		p.pages[r.Index].writers++
	}
	p.mu.Unlock()

	var over atomic.Bool
	defer func() {
		over.Store(true)
		p.mu.Lock()
		defer p.mu.Unlock()
		h.busy = false
		ev := history{p: p}
		for _, r := range refs {
			p.pages[r.Index].writers--
			p.settle(r.Index, &ev)
		}
		ev.flush()
	}()
	return read(func(i int) []byte {
		if over.Load() || i < 0 || i >= len(refs) {
			return nil
		}
		return p.bytes(refs[i].Index)
	})
}

// idle refuses a handle that is stale or at work. Callers hold mu.
func (l *Landing) idle() error {
	if err := l.live(); err != nil {
		return err
	}
	if l.h.busy || l.h.granted != len(l.h.refs) {
		return ErrOpen
	}
	return nil
}

// PageClaim is what the offering leg says of one page: the generation under
// which it held it, and its digest.
type PageClaim struct {
	Generation uint64
	Sum        Sum
}

// Claim is what a commit has to prove: that the pages hold these sums, and that
// exactly so many positions in them are written.
type Claim struct {
	Tokens int
	Key    DigestKey
	Pages  []PageClaim
}

// Commit verifies the landed pages against the claim and turns them into a
// sequence. It reads every byte itself: there is no way to tell it that pages
// are good. It consumes the landing, whatever the outcome; on error everything
// is given back.
//
// ErrCoverage: pages or written positions are not exactly those claimed.
// ErrDigest: a page holds other bytes. ErrStale: aborted, before or meanwhile.
// Credits that are left stay with the sequence.
func (l *Landing) Commit(c Claim) (*Sequence, error) {
	h, p := l.h, l.h.pool
	p.mu.Lock()
	if err := l.idle(); err != nil {
		p.mu.Unlock()
		return nil, err
	}
	refs := h.refs
	h.busy = true // no Receive, no Grant from here
	for _, r := range refs {
		p.pages[r.Index].readers++
	}
	p.mu.Unlock()

	tokens, err := l.verify(c, refs)

	p.mu.Lock()
	defer p.mu.Unlock()
	h.busy = false
	ev := history{p: p}
	defer ev.flush()
	for _, r := range refs {
		p.pages[r.Index].readers--
		p.settle(r.Index, &ev)
	}
	if err := l.live(); err != nil {
		return nil, err
	}
	for _, r := range refs {
		if err == nil {
			_, err = h.check(r)
		}
	}
	if err != nil {
		ev.flush()
		l.releaseLocked()
		return nil, err
	}
	for i, r := range refs {
		if i == len(refs)-1 {
			p.step(r.Index, OpAdopt)
			continue
		}
		p.step(r.Index, OpCommit)
		ev.add(EventSeal, r.Index)
	}
	h.length = tokens
	h.decode = true
	h.phase++
	return &Sequence{handle{h, h.phase}}, nil
}

// verify digests the pages and counts their written positions.
func (l *Landing) verify(c Claim, refs []PageRef) (tokens int, err error) {
	p := l.h.pool
	geo := p.geometry
	if c.Tokens < 1 || len(refs) != geo.PagesFor(c.Tokens) || len(c.Pages) != len(refs) {
		return 0, fmt.Errorf("%w: %d positions in %d pages with %d digests", ErrCoverage, c.Tokens, len(refs), len(c.Pages))
	}
	d, err := newDigester(c.Key)
	if err != nil {
		return 0, err
	}
	for i, r := range refs {
		s := d.sum(i, c.Pages[i].Generation, p.bytes(r.Index))
		if subtle.ConstantTimeCompare(s[:], c.Pages[i].Sum[:]) != 1 {
			return 0, fmt.Errorf("%w: page %d of %d", ErrDigest, i, len(refs))
		}
	}
	tokens = geo.coverage(len(refs), func(i int) []byte { return p.bytes(refs[i].Index) })
	if tokens != c.Tokens {
		return 0, fmt.Errorf("%w: %d positions are claimed, %d are written", ErrCoverage, c.Tokens, tokens)
	}
	last := len(refs) - 1
	if !geo.tailClear(p.bytes(refs[last].Index), tokens-last*geo.PageTokens) {
		return 0, fmt.Errorf("%w: bytes after the last of %d positions", ErrCoverage, tokens)
	}
	return tokens, nil
}

// Abort gives everything back. It may be called at any time, any number of
// times; after Commit it does nothing.
func (l *Landing) Abort() { l.release() }
