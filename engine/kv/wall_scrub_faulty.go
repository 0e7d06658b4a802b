//go:build faulty

package kv

import (
	"bulkhead.dev/infra/id"
	"bulkhead.dev/internal/faulty/walls"
)

func (p *Pool) due(g *page, owner id.Owner) bool {
	return g.state == StateDirty && (p.scrub == Always || g.owner != owner) && !walls.Down(walls.Scrub)
}
