//go:build faulty

package kv

import (
	"bulkhead.dev/infra/id"
	"bulkhead.dev/internal/faulty/walls"
)

func (p *Pool) due(g *page, owner id.Owner) bool {
	return p.foreign(g, owner) && !walls.Down(walls.Scrub)
}
