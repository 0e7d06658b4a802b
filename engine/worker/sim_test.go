package worker

import (
	"testing"
	"time"
	"unsafe"

	"bulkhead.dev/engine/compute"
	"bulkhead.dev/engine/worker/peer"
	"bulkhead.dev/infra/assert"
)

// Simulated workers prove what they hand over like any others: an earlier page
// that is wrong shows in the last position.
func TestSimulatedWorkersProve(t *testing.T) {
	t.Parallel()
	c := newCluster(t, "")
	c.pair(func(b *Boot) { b.Backend = Simulated })
	o := c.do(t.Context(), c.job(1, prompt(40, 1), 10), nil)
	assert.NoError(t, o.err)
	assert.NoError(t, o.prefillErr)
	assert.Equal(t, len(o.ids), 10)

	c.prefill.hook.set(func(next func([]compute.Span) error, spans []compute.Span) error {
		if err := next(spans); err != nil || spans[0].Pos > 0 {
			return err
		}
		pages, err := spans[0].Pages.Resolve(nil, 1)
		if err != nil {
			return err
		}
		**(**byte)(unsafe.Pointer(&pages[0])) ^= 0x40
		return nil
	})
	o = c.do(t.Context(), c.job(1, prompt(40, 1), 10), nil)
	assert.True(t, o.finished == nil && o.text == "")
	assert.True(t, o.reasons()[0] == "recompute_mismatch" || o.reasons()[0] == "not_finite")
	c.restored()
}

func TestSimulatedBoot(t *testing.T) {
	t.Parallel()
	b := boot(t, authority(t), peer.Decode)
	b.Pages, b.MaxRunning, b.PerTenant, b.Backend = 1, 1, 1, Simulated
	_, err := b.check()
	assert.NoError(t, err)
	b.Sim.Sequence = -1
	_, err = b.check()
	assert.ErrorIs(t, err, ErrBoot)
	b.Build = "v1"
	assert.Equal(t, b.build(), "v1 (simulated)")
	b.Backend = ""
	assert.Equal(t, b.build(), "v1")
}

func TestSimulatedLatency(t *testing.T) {
	t.Parallel()
	c := newCluster(t, "")
	const step = 5 * time.Millisecond
	c.pair(func(b *Boot) { b.Backend, b.Sim.Step = Simulated, Span(step) })
	o := c.do(t.Context(), c.job(1, prompt(8, 1), 10), nil)
	assert.NoError(t, o.err)
	assert.True(t, o.finished.GetFacts().GetComputeUs() >= uint64(10*step.Microseconds()))
}
