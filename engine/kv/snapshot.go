package kv

import (
	"slices"

	"bulkhead.dev/infra/id"
)

// Snapshot returns what the pool knows of each page, at one moment. It uses the
// memory of dst if that is enough.
func (p *Pool) Snapshot(dst []PageInfo) []PageInfo {
	// Nothing is allocated under the lock.
	dst = slices.Grow(dst[:0], len(p.pages)) // how many there are never changes
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.pages {
		dst = append(dst, p.pages[i].info())
	}
	return dst
}

// Run is a number of neighboring pages that are alike in all but the proof of the
// scrub, which is left out, how often they were wiped, which is added up, and
// since when, which is the earliest.
type Run struct {
	First, Count uint32
	PageInfo
}

// Runs joins neighboring pages that are alike. Of free pages it does not matter
// which grant was the last.
func Runs(pages []PageInfo) (out []Run) {
	for i, g := range pages {
		g.Scrub = ScrubProof{}
		if g.State.Free() || g.State == StateScrubbing {
			g.Generation, g.Lease = 0, id.Lease{}
		}
		if n := len(out) - 1; n >= 0 {
			last := out[n].PageInfo
			since := last.Since
			if g.Since.Before(since) {
				since = g.Since
			}
			scrubs := last.Scrubs + g.Scrubs
			last.Since, last.Scrubs, g.Since, g.Scrubs = since, scrubs, since, scrubs
			if last == g {
				out[n].Count++
				out[n].Since, out[n].Scrubs = since, scrubs
				continue
			}
			g.Since, g.Scrubs = pages[i].Since, pages[i].Scrubs
		}
		out = append(out, Run{uint32(i), 1, g})
	}
	return out
}
