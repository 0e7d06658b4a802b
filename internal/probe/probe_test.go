package probe_test

import (
	"context"
	"crypto/rand"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sync/errgroup"

	"bulkhead.dev/engine/compute"
	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/kv/kvtest"
	"bulkhead.dev/engine/model"
	"bulkhead.dev/engine/model/gguf"
	"bulkhead.dev/engine/model/synth"
	"bulkhead.dev/engine/worker"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/internal/probe"
	"bulkhead.dev/internal/rig"
)

func TestMain(m *testing.M) {
	rig.Main(nil)
	http.DefaultTransport.(*http.Transport).DisableKeepAlives = true
	// The thread whose end would end the children.
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("bulkhead.dev/infra/proc.spawn.func1.1"))
}

// The scanner finds what is there, wherever it is, and nothing else.
func TestScan(t *testing.T) {
	t.Parallel()
	mine := make([]byte, 3<<20)
	rand.Read(mine)
	var p, foreign probe.Patterns
	// In the middle, at the end, and across the pieces in which memory is read.
	for i, at := range []int{7, 1<<20 - 5, 2<<20 - 31, len(mine) - probe.Window} {
		assert.True(t, p.Add(fmt.Sprint(i), mine[at:]))
	}
	assert.False(t, p.Add("zeros", make([]byte, probe.Window)))
	other := make([]byte, probe.Window)
	rand.Read(other)
	assert.True(t, foreign.Add("foreign", other))
	other[3]++ // nowhere else in memory from here on
	for i := range other {
		other[i] = 0
	}
	hits, looked, err := p.Scan(os.Getpid())
	if os.IsPermission(err) {
		assert.Skip(t, "the memory of processes cannot be read here")
	}
	assert.NoError(t, err)
	assert.True(t, looked > 3<<20)
	found := map[string]bool{}
	for _, h := range hits {
		found[h.Pattern] = true
	}
	assert.Equal(t, len(found), 4)
	runtime.KeepAlive(mine)
}

const window = 512

// What is left of a tenant in the memory of the workers: its pages while nobody
// else has had them, and nothing at all once somebody has.
func TestNothingIsLeftAfterATenantChange(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "m.gguf")
	assert.NoError(t, os.WriteFile(path, synth.RandomLlama(5, synth.Shape{
		Layers: 3, Dim: 64, Heads: 4, KVHeads: 2, HeadDim: 32, Hidden: 128, Vocab: synth.MinVocab, Context: window,
	}), 0o600))
	for _, kvType := range []string{"f16", "f32"} {
		t.Run(kvType, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			few := func(b *worker.Boot) { b.Pages, b.KVType = 3*window/kv.PageTokens, kvType }
			r, err := rig.Start(ctx, rig.Options{Model: path, Tenants: 2, Prefill: few, Decode: few})
			assert.NoError(t, err)
			defer func() { assert.NoError(t, r.Close()) }()

			secret := strings.Repeat("the canary sings at midnight. ", 10)
			ids, err := r.Encode(ctx, secret)
			assert.NoError(t, err)
			p := patterns(t, path, kvType, ids)
			assert.True(t, p.Len() > 1500)
			ask := func(times, tenant int, text string, n int) {
				var g errgroup.Group
				for range times {
					g.Go(func() error {
						a, err := r.Ask(ctx, tenant, text, n)
						if err == nil && a.Status != 200 {
							err = fmt.Errorf("answer %d %s", a.Status, a.Code)
						}
						return err
					})
				}
				assert.NoError(t, g.Wait())
			}
			legs := map[string]*rig.Process{"prefill": r.Prefill, "decode": r.Decode}

			ask(1, 1, "before", 4)
			for name, leg := range legs {
				hits, _, err := p.Scan(leg.PID())
				assert.NoError(t, err)
				if len(hits) > 0 {
					t.Fatalf("%s: found before it was there: %v", name, hits[0])
				}
			}
			ask(4, 0, secret, 40)
			for name, leg := range legs {
				hits, _, err := p.Scan(leg.PID())
				assert.NoError(t, err)
				// All of it lies in pages that nobody has had since. A quarter of the
				// patterns are in the order in which keys are computed, not kept.
				found := map[string]bool{}
				for _, h := range hits {
					found[h.Pattern] = true
				}
				if len(found) < p.Len()*3/4 {
					t.Fatalf("%s: only %d of %d patterns are found: the scan would miss a leak", name, len(found), p.Len())
				}
			}
			// Three requests as large as the window take every page, over fewer
			// connections than before.
			ask(3, 1, strings.Repeat("somebody else asks something else. ", 12), 60)
			for name, leg := range legs {
				hits, looked, err := p.Scan(leg.PID())
				assert.NoError(t, err)
				t.Logf("%s: looked at %d MB", name, looked>>20)
				for i, h := range hits {
					if i == 5 {
						break
					}
					t.Errorf("%s: %v (%d in all)", name, h, len(hits))
				}
			}
		})
	}
}

// patterns computes the prompt in this process, which gives the same bits, and
// cuts its keys and values into patterns: as they lie in a page, and as they are
// computed, token by token.
func patterns(t *testing.T, path, kvType string, ids []int32) *probe.Patterns {
	t.Helper()
	f, err := gguf.Open(path)
	assert.NoError(t, err)
	defer f.Close()
	llama, err := model.LoadLlama(f)
	assert.NoError(t, err)
	dtype := map[string]kv.DType{"f16": kv.F16, "f32": kv.F32}[kvType]
	m, err := compute.Load(llama, compute.Options{Threads: 1, DType: dtype, MaxRows: window})
	assert.NoError(t, err)
	defer m.Close()
	g := m.Geometry()
	pool := kvtest.Pool(t, kv.Config{Geometry: g, Pages: g.PagesFor(len(ids))})
	credits, err := pool.Reserve(kvtest.Owner(1), g.PagesFor(len(ids)))
	assert.NoError(t, err)
	filler, err := credits.Fill(id.NewLease())
	assert.NoError(t, err)
	assert.NoError(t, filler.Grant(g.PagesFor(len(ids))))
	table, err := filler.Table(0, len(ids))
	assert.NoError(t, err)
	spans := []compute.Span{{Tokens: ids, Pages: table}}
	assert.NoError(t, m.Forward(spans))
	assert.NoError(t, table.Advance(spans[0].Wrote))
	table.Close()
	sealed, err := filler.Seal(len(ids))
	assert.NoError(t, err)
	defer sealed.Release()
	p := &probe.Patterns{}
	w := dtype.Bytes()
	// The template begins every prompt alike; what follows on the text of the
	// tenant is its own.
	const own = 2
	for n, ref := range kvtest.Refs(sealed.Extents())[:len(ids)/kv.PageTokens] {
		if n < own {
			continue
		}
		assert.NoError(t, sealed.View(ref, func(page []byte) error {
			// The first layer depends on the token alone, which others use as well.
			for l := 1; l < g.Layers; l++ {
				for h := range g.KVHeads {
					for tok := range kv.PageTokens {
						p.Add(fmt.Sprintf("values of position %d, layer %d, head %d", n*kv.PageTokens+tok, l, h), page[g.VIndex(l, h, tok, 0)*w:])
						var row []byte
						for d := range g.HeadDim {
							row = append(row, page[g.KIndex(l, h, d, tok)*w:][:w]...)
						}
						p.Add(fmt.Sprintf("keys of position %d, layer %d, head %d, by token", n*kv.PageTokens+tok, l, h), row)
					}
					for d := range g.HeadDim {
						p.Add(fmt.Sprintf("keys of page %d, layer %d, head %d, dim %d", n, l, h, d), page[g.KIndex(l, h, d, 0)*w:])
					}
				}
			}
			return nil
		}))
	}
	return p
}
