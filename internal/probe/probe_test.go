//go:build !race

// The race detector maps terabytes for itself, which would be looked through as
// well.

package probe_test

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
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

// window is the context window and the size of both pools: one prompt can take
// every page.
const window = 1024

// scan looks into a leg, which stands still meanwhile.
func scan(t *testing.T, p *probe.Patterns, leg *rig.Process) (hits []probe.Hit, looked uint64) {
	t.Helper()
	assert.NoError(t, leg.Signal(syscall.SIGSTOP))
	hits, looked, err := p.Scan(leg.PID())
	assert.NoError(t, leg.Signal(syscall.SIGCONT))
	if errors.Is(err, fs.ErrPermission) {
		assert.Skip(t, "the memory of workers, which are not dumpable, cannot be read here: this needs CAP_SYS_PTRACE")
	}
	assert.NoError(t, err)
	return hits, looked
}

// What is left of a tenant in the memory of the workers: its pages while nobody
// else has had them, and nothing at all once somebody has.
func TestNothingIsLeftAfterATenantChange(t *testing.T) {
	t.Parallel()
	random := func(t *testing.T) string {
		path := filepath.Join(t.TempDir(), "m.gguf")
		assert.NoError(t, os.WriteFile(path, synth.RandomLlama(5, synth.Shape{
			Layers: 3, Dim: 64, Heads: 4, KVHeads: 2, HeadDim: 32, Hidden: 128, Vocab: synth.MinVocab, Context: window,
		}), 0o600))
		return path
	}
	real := func(t *testing.T) string {
		path := os.Getenv("BULKHEAD_TEST_MODEL")
		if path == "" {
			assert.Skip(t, "BULKHEAD_TEST_MODEL does not name the default model")
		}
		return path
	}
	for _, c := range []struct {
		name, kvType, fabric string
		model                func(*testing.T) string
	}{
		{"f16 in shared memory", "f16", "", random},
		{"f32 over TCP", "f32", "tcp:127.0.0.1:0", random},
		{"f16 over TCP", "f16", "tcp:127.0.0.1:0", random},
		{"SmolLM2", "f16", "tcp:127.0.0.1:0", real},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			nothingIsLeft(t, c.model(t), c.kvType, c.fabric)
		})
	}
}

func nothingIsLeft(t *testing.T, path, kvType, fabric string) {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	few := func(b *worker.Boot) {
		b.Pages, b.KVType, b.Window, b.Threads = window/kv.PageTokens, kvType, window, 1
		if b.FabricListen != "" && fabric != "" {
			b.FabricListen = fabric
		}
	}
	r, err := rig.Start(ctx, rig.Options{Model: path, Tenants: 2, Prefill: few, Decode: few})
	assert.NoError(t, err)
	defer func() { assert.NoError(t, r.Close()) }()

	// Different all along, so that also a good tokenizer makes many tokens of it.
	var secret strings.Builder
	for i := range 16 {
		fmt.Fprintf(&secret, "canary %d;", i*i*7919)
	}
	ids, err := r.Encode(ctx, secret.String())
	assert.NoError(t, err)
	p, kept := patterns(t, path, kvType, ids)
	assert.True(t, kept > 1500)
	ask := func(times, tenant int, text string, n int) {
		t.Helper()
		assert.NoError(t, r.WaitReady(ctx)) // a worker that stood still long is let in again when it reports
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
		if hits, _ := scan(t, p, leg); len(hits) > 0 {
			t.Fatalf("%s: found before it was there: %v", name, hits[0])
		}
	}
	// Many at once, so that it goes over many connections.
	ask(4, 0, secret.String(), 4)
	for name, leg := range legs {
		hits, _ := scan(t, p, leg)
		// All of it lies in pages that nobody has had since.
		found := map[string]bool{}
		for _, h := range hits {
			found[h.Pattern] = true
		}
		if len(found) < kept {
			t.Fatalf("%s: only %d of %d patterns are found: the scan would miss a leak", name, len(found), kept)
		}
	}
	// Somebody else takes every page of both legs, over one connection.
	long := "somebody else asks something else. "
	for {
		ids, err := r.Encode(ctx, long)
		assert.NoError(t, err)
		if len(ids) > window-kv.PageTokens {
			break
		}
		long += strings.Repeat("x", 1+(window-kv.PageTokens-len(ids))/4)
	}
	ask(1, 1, long, 1)
	taken(ctx, t, r, rig.Owner(0))
	for name, leg := range legs {
		hits, looked := scan(t, p, leg)
		t.Logf("%s: looked at %d MB for %d patterns", name, looked>>20, p.Len())
		for i, h := range hits {
			if i == 5 {
				break
			}
			t.Errorf("%s: %v (%d in all)", name, h, len(hits))
		}
	}
}

// taken checks that no page of any worker is of the owner, or was last.
func taken(ctx context.Context, t *testing.T, r *rig.Rig, owner id.Owner) {
	t.Helper()
	maps := r.Registry.PageMaps(ctx)
	assert.Equal(t, len(maps), 2)
	for _, m := range maps {
		assert.NoError(t, m.Err)
		for _, run := range m.Pages.GetRuns() {
			if string(run.GetOwner()) == string(owner[:]) {
				t.Fatalf("%s: pages from %d on are not taken", m.Worker.Role, run.GetFirst())
			}
		}
	}
}

// patterns computes the prompt in this process, which gives the same bits, and
// cuts its keys and values into patterns: first as they lie in a page, which are
// the first kept ones, then as they are computed: by token, and in 32 bits.
func patterns(t *testing.T, path, kvType string, ids []int32) (p *probe.Patterns, kept int) {
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

	p = &probe.Patterns{}
	w := dtype.Bytes()
	type rest struct {
		name string
		row  []byte
	}
	var computed []rest
	keep := func(row []byte, name string, at ...any) {
		name = fmt.Sprintf(name, at...)
		if p.Add(name, row) && dtype == kv.F16 {
			computed = append(computed, rest{name + ", in 32 bits", widened(row[:probe.Window])})
		}
	}
	// The template begins every prompt alike; what follows on the text of the
	// tenant is its own.
	const own = 3
	for n, ref := range kvtest.Refs(sealed.Extents()) {
		if n < own {
			continue
		}
		// The last position is the one that decode computes again and compares.
		written := min(kv.PageTokens, len(ids)-n*kv.PageTokens)
		assert.NoError(t, sealed.View(ref, func(page []byte) error {
			// The first layer depends on the token alone, which others use as well.
			// Of a deep model some layers will do.
			for l := 1; l < g.Layers; l += max(1, g.Layers/4) {
				for h := range g.KVHeads {
					for tok := range written {
						pos := n*kv.PageTokens + tok
						keep(page[g.VIndex(l, h, tok, 0)*w:], "values of position %d, layer %d, head %d", pos, l, h)
						var row []byte
						for d := range g.HeadDim {
							row = append(row, page[g.KIndex(l, h, d, tok)*w:][:w]...)
						}
						name := fmt.Sprintf("keys of position %d, layer %d, head %d, by token", pos, l, h)
						computed = append(computed, rest{name, row})
						if dtype == kv.F16 {
							computed = append(computed, rest{name + ", in 32 bits", widened(row)})
						}
					}
					if written < kv.PageTokens {
						continue // decoding goes on in these rows
					}
					for d := range g.HeadDim {
						keep(page[g.KIndex(l, h, d, 0)*w:], "keys of page %d, layer %d, head %d, dim %d", n, l, h, d)
					}
				}
			}
			return nil
		}))
	}
	kept = p.Len()
	for _, c := range computed {
		p.Add(c.name, c.row)
	}
	return p, kept
}

// widened is a row of 16-bit numbers in 32 bits, as attention reads it.
func widened(row []byte) []byte {
	out := make([]byte, 0, 2*len(row))
	for ; len(row) > 0; row = row[2:] {
		out = binary.LittleEndian.AppendUint32(out, math.Float32bits(half(binary.LittleEndian.Uint16(row))))
	}
	return out
}

// half is a number of 16 bits that is not subnormal.
func half(h uint16) float32 {
	f := math.Ldexp(1+float64(h&0x3ff)/1024, int(h>>10&0x1f)-15)
	if h>>15 == 1 {
		f = -f
	}
	return float32(f)
}
