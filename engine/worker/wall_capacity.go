//go:build !faulty

package worker

import "bulkhead.dev/engine/worker/peer"

// checkCapacity is the rule at the start of a worker.
func checkCapacity(role peer.Role, pages, pageTokens, window int) error {
	return CheckCapacity(role, pages, pageTokens, window)
}
