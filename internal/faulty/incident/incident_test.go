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

	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/model/synth"
	"bulkhead.dev/engine/worker"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/internal/faulty/walls"
	"bulkhead.dev/internal/rig"
)

func TestMain(m *testing.M) {
	rig.Main(Programs())
	http.DefaultTransport.(*http.Transport).DisableKeepAlives = true
	// The thread whose end would end the children.
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("bulkhead.dev/infra/proc.spawn.func1.1"))
}

func write(t *testing.T, model []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "copy.gguf")
	assert.NoError(t, os.WriteFile(path, model, 0o600))
	return path
}

func copyModel(t *testing.T) string {
	t.Helper()
	return write(t, synth.DeepCopyModel(Window))
}

func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// With all walls down the test sees the text of other tenants; each wall alone
// keeps it in.
func TestMatrix(t *testing.T) {
	for cause, prompts := range map[Cause]int{TooLong: 9, Other: 4} {
		rows := 0
		assert.NoError(t, Matrix(within(t, 5*time.Minute), copyModel(t), cause, prompts, nil, func(r Row) {
			rows++
			t.Log(r.Line())
		}))
		assert.Equal(t, rows, len(Cases(cause)))
	}
}

// Every wall stands alone in some row, against each cause that it can see.
func TestCasesAreComplete(t *testing.T) {
	t.Parallel()
	for _, cause := range []Cause{TooLong, Other} {
		alone := map[Wall]bool{}
		none := false
		for _, c := range Cases(cause) {
			none = none || len(c.Up) == 0 && c.leaky()
			if len(c.Up) == 1 && !c.leaky() {
				alone[c.Up[0]] = true
			}
		}
		assert.True(t, none)
		for _, w := range Walls {
			assert.Equal(t, alone[w], cause == TooLong || w != Registration && w != Edge)
		}
	}
}

// A row that does not show what it should is an error, whatever it is.
func TestCheckCanFail(t *testing.T) {
	t.Parallel()
	counts := Row{Case: Case{Up: []Wall{Counts}}, Rejected: 3, Normal: 6, Golden: 6,
		Refused: map[string]int{"500 response_withheld": 3}, Stopped: map[string]int{"counts_differ": 3}}
	none := Row{Rejected: 3, Answered: 3, Found: 3, Leaks: 3, Bytes: 90, Whose: map[int]bool{0: true, 1: true, 2: true}, Normal: 6, Golden: 6}
	scrub := Row{Case: Case{Up: []Wall{Scrub}}, Rejected: 3, Answered: 3, Found: 3, Normal: 6, Golden: 6}
	recompute := Row{Case: Case{Up: []Wall{Recompute}}, Rejected: 3, Normal: 6, Golden: 6,
		Refused: map[string]int{"500 response_withheld": 2, "200 response_withheld": 1}, Stopped: map[string]int{"recompute_mismatch": 3}}
	pool := Row{Case: Case{Up: Walls}, PoolRefused: "1328 of 2048"}
	for _, r := range []Row{counts, none, scrub, recompute, pool} {
		assert.NoError(t, r.Check())
	}
	for name, tc := range map[string]struct {
		row    Row
		change func(*Row)
	}{
		"leak":                      {counts, func(r *Row) { r.Leaks, r.Bytes = 1, 8 }},
		"wrong answer":              {counts, func(r *Row) { r.Golden-- }},
		"nothing was asked":         {counts, func(r *Row) { r.Normal, r.Golden = 0, 0 }},
		"pool refused":              {counts, func(r *Row) { r.PoolRefused = "no" }},
		"one was answered":          {counts, func(r *Row) { r.Answered, r.Found = 1, 1 }},
		"refused otherwise":         {counts, func(r *Row) { r.Refused = map[string]int{"503 worker_lost": 3} }},
		"stopped by something else": {counts, func(r *Row) { r.Stopped = map[string]int{"transport": 3} }},
		"text before the error":     {recompute, func(r *Row) { r.Partial = 1 }},
		"pool let in":               {pool, func(r *Row) { r.PoolRefused = "" }},
		"pool refused vaguely":      {pool, func(r *Row) { r.PoolRefused = "too small" }},
		"not all leak":              {none, func(r *Row) { r.Leaks-- }},
		"not of all":                {none, func(r *Row) { r.Whose = map[int]bool{0: true} }},
		"not in the receipts":       {none, func(r *Row) { r.Found-- }},
		"scrub refuses":             {scrub, func(r *Row) { r.Answered, r.Found = 2, 2 }},
	} {
		r := tc.row
		tc.change(&r)
		if r.Check() == nil {
			t.Errorf("%s: passed", name)
		}
	}
}

func TestLeaked(t *testing.T) {
	t.Parallel()
	c := canaries[1]
	for text, want := range map[string]int{
		"":                        0,
		"nothing of anybody":      0,
		c[:7]:                     0,
		"x" + c[:8] + "x":         8,
		c[20:] + c[:5] + " and ":  17,
		c[3:12] + "?" + c[3:12]:   18,
		c[3:12] + canaries[0][:8]: 17,
	} {
		n, of := leaked(text, 0)
		if _, owns := leaked(text, 1); want > 0 && (len(of) != 1 || of[0] != 1) || len(owns) > 0 && owns[0] == 1 {
			t.Errorf("%q is text of %v, of %v to its owner", text, of, owns)
		}
		if text != c[3:12]+canaries[0][:8] {
			assert.Equal(t, n, want)
		} else {
			assert.Equal(t, n, 9) // the rest is the asker's own
		}
	}
	for n := 2; n < Window; n += 11 {
		for a := firstAttacker; a < firstOther; a++ {
			q := question(a, n, n%2 == 0)
			bytes, _ := leaked(q, a)
			assert.Equal(t, bytes, 0)
			assert.Equal(t, len(q), n-1)
		}
	}
	for tenant := range tenants {
		assert.True(t, tenant >= firstAttacker || len(canaries[tenant]) == synth.CopyDistance)
	}
}

// Around the limits of pool and window, with all walls standing and the window
// that the pool holds: what fits is answered, everything else is refused, and
// nothing of anybody else is in it.
func TestBoundaries(t *testing.T) {
	ctx := within(t, 3*time.Minute)
	r, err := rig.Start(ctx, rig.Options{
		Model: copyModel(t), Tenants: tenants,
		Prefill: func(b *worker.Boot) { b.Pages, b.Window = PoolPages, PoolSize },
		Decode:  func(b *worker.Boot) { b.Pages = Window / kv.PageTokens },
	})
	assert.NoError(t, err)
	defer func() { assert.NoError(t, r.Close()) }()
	admitted := 0
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
		canary := canaries[0] + canaries[0] + canaries[0]
		assert.True(t, asMustBe(ctx, r, 0, canary, 900))
		q := question(firstAttacker, tc.prompt, false)
		a, err := r.Ask(ctx, firstAttacker, q, tc.output)
		assert.NoError(t, err)
		admitted++
		want := rig.Answer{Status: tc.status, Code: "context_length_exceeded"}
		if tc.status == 200 {
			admitted++
			want = rig.Answer{Status: 200, Text: rig.Copied(q, tc.output)}
		}
		if a != want {
			t.Errorf("%d + %d tokens: %+v, want %+v", tc.prompt, tc.output, a, want)
		}
	}
	all := r.Receipts()
	assert.Equal(t, len(all), admitted)
	for _, rec := range all {
		assert.Equal(t, rec.Outcome, "completed")
	}
}

// With all walls down, the longest prompt that the pool holds is still answered
// as it must be, and the next longer one with the text of another tenant.
func TestFirstPromptThatLeaks(t *testing.T) {
	ctx := within(t, 3*time.Minute)
	c := Case{}
	assert.NoError(t, walls.TakeDown(c.down()))
	defer func() { assert.NoError(t, walls.TakeDown("")) }()
	r, err := rig.Start(ctx, c.options(copyModel(t), nil))
	assert.NoError(t, err)
	defer func() { assert.NoError(t, r.Close()) }()
	for _, tc := range []struct {
		prompt int
		leak   bool
	}{{PoolSize - 1, false}, {PoolSize, false}, {PoolSize + 1, true}, {PoolSize + 2, true}} {
		assert.NoError(t, (&Row{Case: c}).canaries(ctx, r))
		q := question(firstAttacker, tc.prompt, false)
		a, err := r.Ask(ctx, firstAttacker, q, answerTokens)
		assert.NoError(t, err)
		n, of := leaked(a.Text, firstAttacker)
		if a.Status != 200 || (n > 0) != tc.leak || (a.Text == rig.Copied(q, answerTokens)) == tc.leak || tc.leak && of[0] != victims-1 {
			t.Errorf("%d tokens: %+v", tc.prompt, a)
		}
	}
}

// The limit of the recompute wall, seen alone: in a model of one layer, keys and
// values of a position depend on nothing but its token. A prompt that ends in
// the letter that the stale page happens to have there passes. In a model of
// two layers it does not, which the matrix shows.
func TestRecomputeNeedsTwoLayers(t *testing.T) {
	row, err := Run(within(t, 3*time.Minute), write(t, synth.CopyModel(Window)), Case{Up: []Wall{Recompute}}, 3, nil)
	assert.NoError(t, err)
	assert.Equal(t, row.Leaks, 3)
	assert.Equal(t, row.Found, 3) // the receipts show them all the same
}
