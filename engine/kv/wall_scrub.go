//go:build !faulty

package kv

import "bulkhead.dev/infra/id"

// due reports whether a page has to be wiped before the owner may reach it. A
// page that an owner had before is dirty, whatever it did with it. Callers hold
// mu.
func (p *Pool) due(g *page, owner id.Owner) bool {
	return g.state == StateDirty && (p.scrub == Always || g.owner != owner)
}
