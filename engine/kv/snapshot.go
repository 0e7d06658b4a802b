package kv

import "bulkhead.dev/infra/id"

// Snapshot returns what the pool knows of each page, at one moment. It uses the
// memory of dst if that is enough.
func (p *Pool) Snapshot(dst []PageInfo) []PageInfo {
	dst = dst[:0]
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.pages {
		dst = append(dst, p.pages[i].info())
	}
	return dst
}

// Run is a number of neighboring pages that are alike: all but the proof of the
// scrub, and since when, which is the earliest.
type Run struct {
	First, Count uint32
	PageInfo
}

// Runs joins neighboring pages that are alike. Of free pages it does not matter
// which grant was the last.
func Runs(pages []PageInfo) (out []Run) {
	for i, g := range pages {
		g.Scrub, g.Scrubs = ScrubProof{}, 0
		if g.State.Free() || g.State == StateScrubbing {
			g.Generation, g.Lease = 0, id.Lease{}
		}
		if n := len(out) - 1; n >= 0 {
			last := out[n].PageInfo
			since := last.Since
			if g.Since.Before(since) {
				since = g.Since
			}
			last.Since, g.Since = since, since
			if last == g {
				out[n].Count++
				out[n].Since = since
				continue
			}
			g.Since = pages[i].Since
		}
		out = append(out, Run{uint32(i), 1, g})
	}
	return out
}
