//go:build !faulty

package gateway

import (
	"bulkhead.dev/engine/pool"
	workerv1 "bulkhead.dev/services/gen/bulkhead/worker/v1"
)

// agreed returns an error unless edge, prefill and decode are at one.
func agreed(edge int, pair pool.Pair, prefill, decode *workerv1.LegFacts) error {
	return compare(edge, pair, prefill, decode)
}
