//go:build faulty

package gateway

import (
	"bulkhead.dev/engine/pool"
	"bulkhead.dev/internal/faulty/walls"
	workerv1 "bulkhead.dev/services/gen/bulkhead/worker/v1"
)

func agreed(edge int, pair pool.Pair, prefill, decode *workerv1.LegFacts) error {
	if walls.Down(walls.Counts) && prefill != nil && decode != nil {
		return nil
	}
	return compare(edge, pair, prefill, decode)
}
