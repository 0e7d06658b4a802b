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
	Registration: "registration", Edge: "edge", Rejection: "typed rejection", Manifest: "manifest",
	Scrub: "scrub", Counts: "counts", Recompute: "recompute",
}

func (w Wall) String() string { return names[w] }

func (w Wall) numbered() string { return fmt.Sprintf("(%d) %v", int(w), w) }

// inWorkers are the walls that are taken down in the worker and gateway code.
var inWorkers = map[Wall]walls.Wall{
	Registration: walls.Registration, Manifest: walls.Manifest, Scrub: walls.Scrub, Counts: walls.Counts, Recompute: walls.Recompute,
}

// Programs are what the worker processes of a matrix run. Their first argument
// is the list of walls that are down.
func Programs() map[string]rig.Program {
	with := func(run rig.Program) rig.Program {
		return func(ctx context.Context, boot worker.Boot, args []string, log *slog.Logger) error {
			if len(args) == 0 {
				return errors.New("which walls are down was not said")
			}
			if err := walls.TakeDown(args[0]); err != nil {
				return err
			}
			return run(ctx, boot, args[1:], log)
		}
	}
	return map[string]rig.Program{
		"real": with(func(ctx context.Context, boot worker.Boot, _ []string, log *slog.Logger) error {
			return worker.Run(ctx, boot, log)
		}),
		"faulty": with(prefill.Run),
	}
}

// edgeOnly is a registry whose workers can hold any prompt, as far as the edge
// is told.
type edgeOnly struct{ *pool.Registry }

// EffectiveContext says that only the model limits the window.
func (edgeOnly) EffectiveContext([32]byte) int { return 0 }

// down lists the walls that are down in worker and gateway code.
func (c Case) down() string {
	var down []string
	for _, w := range Walls {
		if name, ok := inWorkers[w]; ok && !c.stands(w) {
			down = append(down, string(name))
		}
	}
	return strings.Join(down, ",")
}

// options describe the platform of a case.
func (c Case) options(model string, logs *os.File) rig.Options {
	o := rig.Options{
		Model: model, Tenants: tenants, Args: []string{c.down()}, DecodeProgram: "real", PrefillProgram: "faulty", Logs: logs, Believe: !c.stands(Counts),
		Prefill: func(b *worker.Boot) { b.Pages = PoolPages },
		// As large as one window: what one tenant leaves is what the next gets.
		Decode: func(b *worker.Boot) { b.Pages = Window / kv.PageTokens },
	}
	if c.Remedy {
		o.Prefill = func(b *worker.Boot) { b.Pages, b.Window = PoolPages, PoolSize }
	}
	if c.Cause == Other {
		o.Args = append(o.Args, fmt.Sprintf("reject=%d", markToken))
		o.Prefill = func(b *worker.Boot) { b.Pages = Window / kv.PageTokens }
	}
	if c.stands(Rejection) {
		o.PrefillProgram = "real"
		if c.Cause == Other { // a limit that is not the pool's
			o.Prefill = func(b *worker.Boot) { b.Pages, b.Window = Window/kv.PageTokens, PoolSize }
		}
	}
	if !c.stands(Registration) {
		o.CheckCapacity = func(pool.Role, int, int, int) error { return nil }
	}
	if !c.stands(Edge) {
		o.Workers = func(r *pool.Registry) gateway.Workers { return edgeOnly{r} }
	}
	return o
}

// Run runs a case, with so many prompts that prefill rejects among other
// traffic.
func Run(ctx context.Context, model string, c Case, prompts int, logs *os.File) (row Row, err error) {
	row = Row{Case: c, Refused: map[string]int{}, Stopped: map[string]int{}, Whose: map[int]bool{}}
	if err := walls.TakeDown(c.down()); err != nil {
		return row, err
	}
	defer func() { _ = walls.TakeDown("") }()
	r, err := rig.Start(ctx, c.options(model, logs))
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
	return row, row.traffic(ctx, r, prompts)
}

// Cases are the rows of the matrix for a cause.
func Cases(cause Cause) []Case {
	out := []Case{{Cause: cause}}
	if cause == TooLong {
		for _, w := range Walls {
			out = append(out, Case{Cause: cause, Up: []Wall{w}})
		}
		return append(out, Case{Cause: cause, Up: Walls}, Case{Cause: cause, Up: Walls, Remedy: true})
	}
	out = append(out, Case{Cause: cause, Up: []Wall{Registration, Edge}})
	for _, w := range []Wall{Rejection, Manifest, Scrub, Counts, Recompute} {
		out = append(out, Case{Cause: cause, Up: []Wall{w}})
	}
	return append(out, Case{Cause: cause, Up: []Wall{Registration, Edge, Manifest, Scrub, Counts, Recompute}})
}

// Matrix runs the rows for a cause. told is given each row as it is done.
func Matrix(ctx context.Context, model string, cause Cause, prompts int, logs *os.File, told func(Row)) error {
	var errs []error
	for _, c := range Cases(cause) {
		row, err := Run(ctx, model, c, prompts, logs)
		if err != nil {
			return fmt.Errorf("walls that stand: %s: %w", c.Title(), err)
		}
		told(row)
		errs = append(errs, row.Check())
	}
	return errors.Join(errs...)
}
