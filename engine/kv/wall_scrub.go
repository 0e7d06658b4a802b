//go:build !faulty

package kv

import "bulkhead.dev/infra/id"

// due reports whether a page is wiped before the owner may reach it. Callers
// hold mu.
func (p *Pool) due(g *page, owner id.Owner) bool { return p.foreign(g, owner) }
