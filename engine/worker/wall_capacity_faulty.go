//go:build faulty

package worker

import (
	"bulkhead.dev/engine/worker/peer"
	"bulkhead.dev/internal/faulty/walls"
)

func checkCapacity(role peer.Role, pages, pageTokens, window int) error {
	if walls.Down(walls.Registration) {
		return nil
	}
	return CheckCapacity(role, pages, pageTokens, window)
}
