package sched

import (
	"fmt"

	"bulkhead.dev/engine/compute"
)

// Forwarder is the part of *compute.Model that a loop needs. It is used by one
// goroutine. A pass over several spans gives each of them the same bits as a
// pass over it alone, and repeating a pass over the same positions writes the
// same bits again.
type Forwarder interface {
	Forward(spans []compute.Span) error
	Vocab() int
}

// wrote checks that a pass wrote all positions of a span.
func wrote(s compute.Span) error {
	if s.Wrote != len(s.Tokens) {
		return fmt.Errorf("%w: wrote %d of %d positions", ErrModel, s.Wrote, len(s.Tokens))
	}
	return nil
}
