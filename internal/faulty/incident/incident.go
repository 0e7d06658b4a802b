//go:build faulty

// Package incident replays the incident that Bulkhead exists for, with its
// shape scaled down: a model with a window of 1,048,576 tokens behind a prefill
// pool of 681,280. Every row of the matrix is a platform of its own, with real
// processes and sockets, in which some walls between tenants were taken down.
package incident

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"

	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/pool"
	"bulkhead.dev/engine/worker"
	"bulkhead.dev/internal/faulty/prefill"
	"bulkhead.dev/internal/faulty/walls"
	"bulkhead.dev/internal/rig"
	"bulkhead.dev/services/gateway"
)

// The shape of the incident: 1,048,576 : 681,280 as 2,048 : 1,330, in whole
// pages.
const (
	Window    = 2048
	PoolPages = Window * 681280 / 1048576 / kv.PageTokens
	PoolSize  = PoolPages * kv.PageTokens
	// Leaked is how many responses leaked in the incident.
	Leaked = 155
)

// Wall is a wall of the matrix.
type Wall int

// The walls, numbered as in the architecture page.
const (
	Registration Wall = 1 + iota
	Edge
	Rejection
	Manifest
	Scrub
	Counts
	Recompute
)

// Walls are all of them.
var Walls = []Wall{Registration, Edge, Rejection, Manifest, Scrub, Counts, Recompute}

var names = map[Wall]string{
	Registration: "registration", Edge: "edge length", Rejection: "typed rejection", Manifest: "manifest",
	Scrub: "scrub", Counts: "counts", Recompute: "recompute",
}

func (w Wall) String() string { return names[w] }

// inWorkers are the walls that are taken down in the worker and gateway code.
var inWorkers = map[Wall]walls.Wall{
	Registration: walls.Registration, Manifest: walls.Manifest, Scrub: walls.Scrub, Counts: walls.Counts, Recompute: walls.Recompute,
}

// Programs are what the worker processes of a matrix run.
func Programs() map[string]rig.Program {
	with := func(run rig.Program) rig.Program {
		return func(ctx context.Context, boot worker.Boot, args []string, log *slog.Logger) error {
			if err := walls.TakeDown(strings.Join(args, ",")); err != nil {
				return err
			}
			return run(ctx, boot, args, log)
		}
	}
	return map[string]rig.Program{
		"real": with(func(ctx context.Context, boot worker.Boot, _ []string, log *slog.Logger) error {
			return worker.Run(ctx, boot, log)
		}),
		"faulty": with(prefill.Run),
	}
}

// Row is what happened with some walls standing.
type Row struct {
	Up []Wall
	// Remedy means that the operator did what the refused registration says:
	// serve no larger window than the pool holds.
	Remedy bool
	// PoolRefused is why no platform came up, "" if one did.
	PoolRefused string

	Oversized int            // requests that prefill cannot hold
	Answered  int            // of them, with HTTP 200
	Refused   map[string]int // of them, by status and code
	Leaks     int            // answers with text of another tenant in them
	Bytes     int            // of it
	Sample    string         // one of them

	Normal int // requests of other tenants meanwhile
	Golden int // of them, answered as they must be
}

// Title says which walls stand.
func (r Row) Title() string {
	switch {
	case len(r.Up) == 0:
		return "all walls down"
	case len(r.Up) == len(Walls) && r.Remedy:
		return "all walls, window fits the pool"
	case len(r.Up) == len(Walls):
		return "all walls"
	}
	out := make([]string, len(r.Up))
	for i, w := range r.Up {
		out[i] = fmt.Sprintf("only (%d) %v", int(w), w)
	}
	return strings.Join(out, ", ")
}

// edgeOnly is a registry whose workers can hold any prompt, as far as the edge
// is told.
type edgeOnly struct{ *pool.Registry }

// EffectiveContext says that only the model limits the window.
func (edgeOnly) EffectiveContext([32]byte) int { return 0 }

// Run runs one row with so many oversized prompts among other traffic.
func Run(ctx context.Context, model string, up []Wall, remedy bool, oversized int, logs *os.File) (row Row, err error) {
	row = Row{Up: up, Remedy: remedy, Refused: map[string]int{}}
	stands := map[Wall]bool{}
	for _, w := range up {
		stands[w] = true
	}
	var down []string
	for _, w := range Walls {
		if name, ok := inWorkers[w]; ok && !stands[w] {
			down = append(down, string(name))
		}
	}
	if err := walls.TakeDown(strings.Join(down, ",")); err != nil {
		return row, err
	}
	defer func() { _ = walls.TakeDown("") }()

	o := rig.Options{
		Model: model, Tenants: tenants, Args: down, DecodeProgram: "real", PrefillProgram: "faulty", Logs: logs, Believe: !stands[Counts],
		Prefill: func(b *worker.Boot) {
			b.Pages = PoolPages
			if remedy {
				b.Window = PoolSize
			}
		},
		// As large as one window: what one tenant leaves is what the next gets.
		Decode: func(b *worker.Boot) { b.Pages = Window / kv.PageTokens },
	}
	if stands[Rejection] {
		o.PrefillProgram = "real"
	}
	if !stands[Registration] {
		o.CheckCapacity = func(pool.Role, int, int, int) error { return nil }
	}
	if !stands[Edge] {
		o.Workers = func(r *pool.Registry) gateway.Workers { return edgeOnly{r} }
	}
	r, err := rig.Start(ctx, o)
	if errors.Is(err, rig.ErrRefused) {
		row.PoolRefused = err.Error()
		if at := strings.Index(row.PoolRefused, "the prefill pool holds"); at >= 0 {
			row.PoolRefused = row.PoolRefused[at:]
		}
		return row, nil
	}
	if err != nil {
		return row, err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	return row, row.traffic(ctx, r, oversized)
}

// Tenants: one whose text must not leak, one whose prompts are too long, and
// the others.
const (
	victim   = 0
	attacker = 1
	tenants  = 10
)

// traffic runs a platform full of canaries, and then oversized prompts, each
// between prompts of other tenants.
func (row *Row) traffic(ctx context.Context, r *rig.Rig, oversized int) error {
	// The victim's answer fills the window, and with it the decode pool.
	const times = 39
	for _, window := range []int{Window, PoolSize} {
		res, err := r.Ask(ctx, victim, strings.Repeat(canary, times), window-times*len(canary)-16)
		if err != nil {
			return err
		}
		if res.Status == 200 {
			break
		}
		if window == PoolSize {
			return fmt.Errorf("the victim was not served: %d %s", res.Status, res.Code)
		}
	}
	for i := range oversized {
		var others sync.WaitGroup
		var mu sync.Mutex
		for k := range 2 {
			tenant := 2 + (2*i+k)%(tenants-2)
			others.Go(func() {
				ok := normal(ctx, r, tenant, i)
				mu.Lock()
				defer mu.Unlock()
				row.Normal++
				if ok {
					row.Golden++
				}
			})
		}
		others.Wait()
		// From the longest prompt that could be served at all down to the first
		// that does not fit: each leaves the pages in front of its own end as the
		// victim left them.
		n := Window - answerTokens - i*(Window-answerTokens-PoolSize-1)/max(oversized-1, 1)
		res, err := r.Ask(ctx, attacker, question(n), answerTokens)
		if err != nil {
			return err
		}
		row.count(res)
	}
	return nil
}

func (row *Row) count(res rig.Answer) {
	row.Oversized++
	if res.Status == 200 {
		row.Answered++
	} else {
		row.Refused[fmt.Sprintf("%d %s", res.Status, res.Code)]++
	}
	if n := leakedBytes(res.Text); n > 0 {
		row.Leaks++
		row.Bytes += n
		row.Sample = res.Text
	}
}

// Check returns how the row differs from what must be.
func (row Row) Check() error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%s: %s", row.Title(), fmt.Sprintf(format, args...))
	}
	registration := len(row.Up) > 0 && row.Up[0] == Registration
	switch {
	case registration && !row.Remedy:
		if !strings.Contains(row.PoolRefused, fmt.Sprint(PoolSize)) || !strings.Contains(row.PoolRefused, fmt.Sprint(Window)) {
			return bad("the pool was not refused with both numbers: %q", row.PoolRefused)
		}
		return nil
	case row.PoolRefused != "":
		return bad("the pool was refused: %s", row.PoolRefused)
	case row.Normal == 0 || row.Golden != row.Normal:
		return bad("%d of %d normal answers are what they must be", row.Golden, row.Normal)
	case len(row.Up) == 0:
		if row.Leaks != row.Oversized {
			return bad("%d of %d responses leaked: the test does not show what it should", row.Leaks, row.Oversized)
		}
		return nil
	case row.Leaks != 0 || row.Bytes != 0:
		return bad("%d responses leaked, for example %q", row.Leaks, row.Sample)
	case len(row.Up) == len(Walls) && row.Refused["400 context_length_exceeded"] != row.Oversized:
		return bad("%v of %d were refused at the edge", row.Refused, row.Oversized)
	case len(row.Up) == 1 && row.Up[0] != Scrub && row.Answered != 0:
		return bad("%d were answered", row.Answered)
	}
	return nil
}

// Matrix runs every row: all walls down, each alone, all, and all with the
// remedy that the refusal names. told is given each row as it is done.
func Matrix(ctx context.Context, model string, oversized int, logs *os.File, told func(Row)) error {
	rows := [][]Wall{nil}
	for _, w := range Walls {
		rows = append(rows, []Wall{w})
	}
	rows = append(rows, Walls, Walls)
	var errs []error
	for i, up := range rows {
		row, err := Run(ctx, model, up, i == len(rows)-1, oversized, logs)
		if err != nil {
			return fmt.Errorf("%s: %w", row.Title(), err)
		}
		told(row)
		errs = append(errs, row.Check())
	}
	return errors.Join(errs...)
}
