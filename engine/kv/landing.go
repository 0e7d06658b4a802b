package kv

import (
	"crypto/subtle"
	"fmt"
	"io"
	"sync"
)

// Landing is the handle of a decode lease before its pages are proven. Only
// Receive can write them, and nothing can read them. Commit or Abort it.
type Landing struct{ handle }

// landed is a page that was taken in whole.
type landed struct {
	from PageRef // on the offering leg
	sum  Sum     // of the bytes as they were stored
}

// Grant draws the pages for the next Receive.
func (l *Landing) Grant(pages int) error { return l.grant(pages, OpLand) }

// Receive takes in the pages that were granted since the last one: from names
// them, in order, as the offering leg holds them, and read has to give each of
// them to the intake, once. All pages are held open for writing until Receive
// returns; if the landing is aborted meanwhile they are quarantined until then.
// The digest of a page is made of the bytes as they are stored, in the same
// pass; all calls for a landing must name the same key.
//
// The error is that of read, ErrRange if from are not as many pages as are
// waiting, ErrCoverage if read gave fewer, ErrStale or ErrOpen. After an error
// the pages of this call count as not taken in.
func (l *Landing) Receive(key DigestKey, from []PageRef, read func(*Intake) error) error {
	d, err := newDigester(key)
	if err != nil {
		return err
	}
	h, p := l.h, l.h.pool
	p.mu.Lock()
	if err := l.receivable(key, from); err != nil {
		p.mu.Unlock()
		return err
	}
	in := &Intake{
		pool: p, digest: d, from: from, first: len(h.landed), refs: h.refs[len(h.landed):],
		landed: make([]landed, len(from)), done: make([]bool, len(from)),
	}
	h.busy, h.key = true, key
	for _, r := range in.refs {
		p.pages[r.Index].writers++
	}
	p.mu.Unlock()

	ok := false
	defer func() {
		whole := in.missing(true) == 0 // nothing can write from here on
		p.mu.Lock()
		defer p.mu.Unlock()
		h.busy = false
		if ok && whole {
			h.landed = append(h.landed, in.landed...)
		}
		ev := history{p: p}
		for _, r := range in.refs {
			p.pages[r.Index].writers--
			p.settle(r.Index, &ev)
		}
		ev.flush()
	}()
	if err := read(in); err != nil {
		return err
	}
	if n := in.missing(false); n > 0 {
		return fmt.Errorf("%w: %d of %d pages did not arrive", ErrCoverage, n, len(from))
	}
	ok = true
	return nil
}

// receivable says why pages cannot be taken in now. Callers hold mu.
func (l *Landing) receivable(key DigestKey, from []PageRef) error {
	if err := l.idle(); err != nil {
		return err
	}
	h := l.h
	if waiting := len(h.refs) - len(h.landed); len(from) < 1 || len(from) != waiting {
		return fmt.Errorf("%w: %d pages to take in, %d are granted for it", ErrRange, len(from), waiting)
	}
	if len(h.landed) > 0 && h.key != key {
		return fmt.Errorf("%w: another key than before", ErrDigest)
	}
	return nil
}

// Intake is the one way bytes get into the pages of a landing. Each page is
// stored once, by Copy or by Read, and digested as it is stored. Its methods
// may be called from any goroutine; once Receive has returned they refuse with
// ErrStale and write nothing.
type Intake struct {
	pool   *Pool
	digest digester
	from   []PageRef
	first  int // index in the sequence of the first page
	refs   []PageRef

	mu     sync.Mutex
	over   bool     // under mu
	landed []landed // under mu
	done   []bool   // under mu
}

// PageBytes returns the size of every page.
func (in *Intake) PageBytes() int { return in.pool.pageBytes }

// Copy stores page i out of memory. The memory may change meanwhile, even by
// another process: what is digested is what is stored.
func (in *Intake) Copy(i int, page []byte) error {
	return in.store(i, func(dst []byte, index int, generation uint64) (Sum, error) {
		if len(page) != len(dst) {
			return Sum{}, fmt.Errorf("%w: a page of %d bytes, want %d", ErrRange, len(page), len(dst))
		}
		return in.digest.copySum(dst, page, index, generation), nil
	})
}

// Read stores page i out of a stream, of which it takes exactly one page.
func (in *Intake) Read(i int, stream io.Reader) error {
	return in.store(i, func(dst []byte, index int, generation uint64) (Sum, error) {
		return in.digest.readSum(dst, stream, index, generation)
	})
}

func (in *Intake) store(i int, f func(dst []byte, index int, generation uint64) (Sum, error)) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	switch {
	case in.over:
		return fmt.Errorf("%w: the intake is closed", ErrStale)
	case i < 0 || i >= len(in.refs):
		return fmt.Errorf("%w: page %d of %d", ErrRange, i, len(in.refs))
	case in.done[i]:
		return fmt.Errorf("%w: page %d was stored before", ErrRange, i)
	}
	sum, err := f(in.pool.bytes(in.refs[i].Index), in.first+i, in.from[i].Generation)
	if err != nil {
		return err
	}
	in.landed[i], in.done[i] = landed{in.from[i], sum}, true
	return nil
}

// missing counts the pages that were not stored. With last it also refuses every
// store from here on, after one in progress.
func (in *Intake) missing(last bool) (n int) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.over = in.over || last
	for _, d := range in.done {
		if !d {
			n++
		}
	}
	return n
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

// PageClaim is what the offering leg says of one page: how it held it, and its
// digest.
type PageClaim struct {
	From PageRef
	Sum  Sum
}

// Claim is what a commit has to prove: that the pages were read from these,
// hold these sums, and that exactly so many positions in them are written.
type Claim struct {
	Tokens int
	Key    DigestKey
	Pages  []PageClaim
}

// Commit verifies the landed pages against the claim and turns them into a
// sequence. What it compares the sums with is what Receive computed while it
// stored the bytes, and it looks for the written positions itself: there is no
// way to tell it that pages are good. It consumes the landing, whatever the
// outcome; on error everything is given back.
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

// verify compares what landed with the claim and counts the written positions.
// Nothing else looks at the landing meanwhile, since it is busy.
func (l *Landing) verify(c Claim, refs []PageRef) (tokens int, err error) {
	h, p := l.h, l.h.pool
	geo := p.geometry
	if c.Tokens < 1 || len(refs) != geo.PagesFor(c.Tokens) || len(h.landed) != len(refs) || len(c.Pages) != len(refs) {
		return 0, fmt.Errorf("%w: %d positions in %d pages, of which %d arrived, with %d digests",
			ErrCoverage, c.Tokens, len(refs), len(h.landed), len(c.Pages))
	}
	if c.Key != h.key {
		return 0, fmt.Errorf("%w: the pages were digested under another key", ErrDigest)
	}
	for i, got := range h.landed {
		want := c.Pages[i]
		if got.from != want.From {
			return 0, fmt.Errorf("%w: page %d was read from another page than claimed", ErrCoverage, i)
		}
		if subtle.ConstantTimeCompare(got.sum[:], want.Sum[:]) != 1 {
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
