//go:build faulty

package sched

import (
	"bytes"

	"bulkhead.dev/internal/faulty/walls"
)

func recomputed(pulled, again []byte) bool {
	return bytes.Equal(pulled, again) || walls.Down(walls.Recompute)
}
