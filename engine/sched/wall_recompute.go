//go:build !faulty

package sched

import "bytes"

// recomputed reports whether the keys and values of the last prompt position
// came out, computed again over the pages that were pulled, as they were pulled.
func recomputed(pulled, again []byte) bool { return bytes.Equal(pulled, again) }
