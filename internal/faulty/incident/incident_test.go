//go:build faulty

package incident

import (
	"context"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"

	"bulkhead.dev/engine/model/synth"
	"bulkhead.dev/engine/worker"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/internal/rig"
)

func TestMain(m *testing.M) {
	rig.Main(Programs())
	http.DefaultTransport.(*http.Transport).DisableKeepAlives = true
	// The thread whose end would end the children.
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("bulkhead.dev/infra/proc.spawn.func1.1"))
}

func copyModel(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "copy.gguf")
	assert.NoError(t, os.WriteFile(path, synth.CopyModel(Window), 0o600))
	return path
}

func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// With all walls down the test sees the text of another tenant; each wall alone
// keeps it in.
func TestMatrix(t *testing.T) {
	rows := 0
	assert.NoError(t, Matrix(within(t, 5*time.Minute), copyModel(t), 8, nil, func(r Row) {
		rows++
		t.Log(r.Line())
	}))
	assert.Equal(t, rows, len(Walls)+3)
}

// A row that does not show what it should is an error, whatever it is.
func TestCheckCanFail(t *testing.T) {
	t.Parallel()
	good := Row{Up: []Wall{Counts}, Oversized: 3, Refused: map[string]int{"500 x": 3}, Normal: 6, Golden: 6}
	assert.NoError(t, good.Check())
	for name, f := range map[string]func(*Row){
		"leak":              func(r *Row) { r.Leaks, r.Bytes = 1, 8 },
		"wrong answer":      func(r *Row) { r.Golden-- },
		"nothing was asked": func(r *Row) { r.Normal, r.Golden = 0, 0 },
		"pool refused":      func(r *Row) { r.PoolRefused = "no" },
		"answered":          func(r *Row) { r.Answered = 1 },
		"no leak":           func(r *Row) { r.Up = nil },
		"pool let in":       func(r *Row) { r.Up = []Wall{Registration} },
		"refused elsewhere": func(r *Row) { r.Up, r.Remedy = Walls, true },
	} {
		r := good
		f(&r)
		if r.Check() == nil {
			t.Errorf("%s: passed", name)
		}
	}
}

func TestLeakedBytes(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]int{
		"":                                 0,
		"nothing of anybody":               0,
		canary[:7]:                         0,
		"x" + canary[:8] + "x":             8,
		canary[20:] + canary[:5] + " and ": 17,
		canary[3:12] + "?" + canary[3:12]:  18,
	} {
		assert.Equal(t, leakedBytes(text), want)
	}
	for n := 2; n < 100; n++ {
		assert.Equal(t, len(question(n)), n-1)
		assert.Equal(t, leakedBytes(question(n)), 0)
	}
}

// Around the limits of pool and window, with all walls standing and the window
// that the pool holds: what fits is answered, everything else is refused, and
// nothing of anybody else is in it.
func TestBoundaries(t *testing.T) {
	ctx := within(t, time.Minute)
	r, err := rig.Start(ctx, rig.Options{
		Model: copyModel(t), Tenants: tenants,
		Prefill: func(b *worker.Boot) { b.Pages, b.Window = PoolPages, PoolSize },
		Decode:  func(b *worker.Boot) { b.Pages, b.Window = Window/16, 0 },
	})
	assert.NoError(t, err)
	defer func() { assert.NoError(t, r.Close()) }()
	for _, tc := range []struct{ prompt, output, status int }{
		{PoolSize - 16, 16, 200},
		{PoolSize - 16, 17, 400},
		{PoolSize - 1, 1, 200},
		{PoolSize - 1, 2, 400},
		{PoolSize, 1, 400},
		{PoolSize + 1, 1, 400},
		{Window - 1, 1, 400},
		{Window, 1, 400},
		{Window + 1, 1, 400},
	} {
		_, err := r.Ask(ctx, victim, canary+canary+canary, 900)
		assert.NoError(t, err)
		res, err := r.Ask(ctx, attacker, question(tc.prompt), tc.output)
		assert.NoError(t, err)
		if res.Status != tc.status || (res.Status == 400) != (res.Code == "context_length_exceeded") || leakedBytes(res.Text) != 0 {
			t.Errorf("%d + %d tokens: %+v", tc.prompt, tc.output, res)
		}
	}
	for _, rec := range r.Receipts() {
		assert.Equal(t, rec.Outcome, "completed")
	}
}
