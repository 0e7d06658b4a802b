package rig_test

import (
	"context"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sync/errgroup"

	"bulkhead.dev/audit/receipt"
	"bulkhead.dev/engine/model/synth"
	"bulkhead.dev/engine/worker"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/internal/rig"
)

func TestMain(m *testing.M) {
	rig.Main(nil)
	http.DefaultTransport.(*http.Transport).DisableKeepAlives = true
	// The thread whose end would end the children.
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("bulkhead.dev/infra/proc.spawn.func1.1"))
}

var words = regexp.MustCompile(`^[a-zA-Z ]+$`)

// The simulated engine is a real pair of workers: pages move, are proven and
// are accounted for, and the receipt says that nothing was computed.
func TestSimulatedEngine(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "sim.gguf")
	file := synth.RandomLlama(1, synth.Shape{Layers: 2, Dim: 32, Heads: 2, KVHeads: 1, HeadDim: 16, Hidden: 32, Vocab: 1200, Context: 1024})
	assert.NoError(t, os.WriteFile(path, file, 0o600))
	simulated := func(b *worker.Boot) { b.Backend = worker.Simulated }
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	r, err := rig.Start(ctx, rig.Options{Model: path, Tenants: 2, Prefill: simulated, Decode: simulated})
	assert.NoError(t, err)
	defer func() { assert.NoError(t, r.Close()) }()

	const tokens = 24
	questions := []string{"one", "two", strings.Repeat("a long question of many pages ", 20)}
	var alone [3]string
	for i, q := range questions {
		a, err := r.Ask(ctx, 0, q, tokens)
		assert.NoError(t, err)
		assert.Equal(t, a.Status, http.StatusOK)
		assert.True(t, words.MatchString(a.Text))
		alone[i] = a.Text
	}
	assert.True(t, alone[0] != alone[1])
	var g errgroup.Group
	for i := range 12 {
		g.Go(func() error {
			a, err := r.AskStream(ctx, i%2, questions[i%3], tokens)
			if err == nil && a.Text != alone[i%3] {
				t.Errorf("question %d: another answer than alone: status %d, %s", i%3, a.Status, a.Code)
			}
			return err
		})
	}
	assert.NoError(t, g.Wait())
	receipts := r.Receipts()
	assert.Equal(t, len(receipts), 15)
	for _, got := range receipts {
		assert.Equal(t, got.Outcome, receipt.Completed)
		assert.Equal(t, got.Output, uint32(tokens))
		assert.Equal(t, got.Finish, "length")
		for _, leg := range []*receipt.Leg{got.Prefill, got.Decode} {
			assert.Equal(t, leg.Build, "rig (simulated)")
			assert.Equal(t, *leg.Tokens, *got.EdgeTokens)
			assert.True(t, len(leg.Extents) > 0 && !leg.ManifestRoot.IsZero())
		}
		assert.True(t, got.Decode.HandoffBytes > 0)
	}
	for _, s := range r.Registry.Workers() {
		assert.Equal(t, s.Worker.CPULevel, "sim")
	}
}
