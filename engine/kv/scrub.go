package kv

import (
	"context"
	"fmt"
	"math/bits"
	"time"

	"bulkhead.dev/engine/mem"
	"bulkhead.dev/infra/id"
)

// foreign reports whether a page has to be wiped before the owner may reach it.
// A page that an owner had before is dirty, whatever it did with it. Callers hold
// mu.
func (p *Pool) foreign(g *page, owner id.Owner) bool {
	return g.state == StateDirty && (p.scrub == Always || g.owner != owner)
}

// wipe fills a page with the pattern of the pool.
func (p *Pool) wipe(index uint32) {
	mem.Wipe(p.bytes(index), p.pattern.fill())
}

func (x Pattern) fill() byte {
	if x == NaN {
		return 0xFF
	}
	return 0
}

// wiped notes that a page was wiped. Callers hold mu.
func (p *Pool) wiped(index uint32, method ScrubMethod, h *history) {
	g := &p.pages[index]
	g.scrubs++
	g.scrub = ScrubProof{Generation: g.generation, At: p.now(), Method: method}
	p.scrubbed++
	h.add(EventScrub, index)
}

// Scrub wipes pages ahead of their next grant, until ctx ends, as long as there
// are free pages that somebody used and that no credit needs at once. It writes
// at most so many bytes a second, so that it takes no more than that of the
// memory bandwidth from those who compute. Grants prefer what it wiped. Only
// one may run at a time: ErrOpen. The error is nil if ctx ended.
func (p *Pool) Scrub(ctx context.Context, bytesPerSecond int64) error {
	if bytesPerSecond < 1 {
		return fmt.Errorf("%w: scrubbing of %d bytes a second", ErrConfig, bytesPerSecond)
	}
	p.mu.Lock()
	if p.ahead {
		p.mu.Unlock()
		return fmt.Errorf("%w: pages are being scrubbed already", ErrOpen)
	}
	p.ahead = true
	p.wakeScrub()
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.ahead = false
	}()

	each := time.Duration(float64(time.Second) * float64(p.pageBytes) / float64(bytesPerSecond))
	pace := time.NewTimer(0)
	defer pace.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-p.dirtied:
		}
		for {
			select {
			case <-ctx.Done():
				return nil
			case <-pace.C:
			}
			did, err := p.scrubOne()
			if err != nil {
				return err
			}
			pace.Reset(each)
			if !did {
				break
			}
		}
	}
}

// wakeScrub tells Scrub that there may be something to do.
func (p *Pool) wakeScrub() {
	select {
	case p.dirtied <- struct{}{}:
	default:
	}
}

// scrubOne wipes one dirty page if there is one to spare.
func (p *Pool) scrubOne() (did bool, err error) {
	p.mu.Lock()
	if p.corrupt {
		p.mu.Unlock()
		return false, ErrCorrupt
	}
	// A page that is being wiped is not free, and every credit must find a free
	// page at any time.
	index, ok := p.nextDirty()
	if !ok || p.promisable() < 1 {
		p.mu.Unlock()
		return false, nil
	}
	p.step(index, OpScrub)
	p.pages[index].writers = 1
	p.mu.Unlock()

	p.wipe(index) // nobody else can reach a page in this state

	p.mu.Lock()
	defer p.mu.Unlock()
	p.pages[index].writers--
	p.step(index, OpScrubbed)
	p.wipedAhead++
	ev := history{p: p}
	p.wiped(index, Ahead, &ev)
	ev.flush()
	return true, nil
}

// nextDirty finds a dirty page, from where it found the last one. Callers hold
// mu.
func (p *Pool) nextDirty() (uint32, bool) {
	words := uint32(len(p.free))
	for k := range words + 1 {
		w := (p.cursor/64 + k) % words
		word := p.free[w] &^ p.clean[w]
		if k == 0 {
			word &= ^uint64(0) << (p.cursor % 64)
		}
		if word != 0 {
			p.cursor = w*64 + uint32(bits.TrailingZeros64(word))
			return p.cursor, true
		}
	}
	return 0, false
}
