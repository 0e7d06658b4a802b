//go:build !faulty

package worker

import (
	"bulkhead.dev/engine/fabric"
	"bulkhead.dev/engine/sched"
)

// step marks a point at which tests of another build stop or end the process.
func step(string) error { return nil }

// steppedModel and steppedReader do so inside of what they wrap.
func steppedModel(m sched.Forwarder, _ string) sched.Forwarder { return m }
func steppedReader(r fabric.Reader) fabric.Reader              { return r }
