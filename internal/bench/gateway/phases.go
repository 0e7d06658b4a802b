package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	// plainTokens is the length of answers that are not streamed, a sentence.
	plainTokens = 16
	// latencyTokens is the length of streams whose first chunk counts: short, so
	// that a thousand a second are latency and not throughput.
	latencyTokens = 4
	// stepOfStreams is far enough apart for each token to be a chunk, with some
	// ten thousand chunks a second.
	stepOfStreams = engineSpeed(1 * time.Millisecond)
	// linger is how long a group commit waits for company, in milliseconds.
	linger = 2.0
)

// Goals.
const (
	goalRequestCPU = 0.6 // ms
	goalStreamCPU  = 1.0 // ms
	goalSlow       = 0.5 // ms added to p50 at 50 a second
	goalFast       = 0.3 // ms added to p50 at 1,000 a second
	goalTail       = 2.0 // ms added to p99
)

// printMachine says what the figures belong to.
func (b *bench) printMachine(ctx context.Context) error {
	disk, err := b.fsync()
	if err != nil {
		return err
	}
	version, err := b.version(ctx)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(b.out, "%s, %d CPUs, %s, PostgreSQL %s, fsync of a page %.2f ms\n%d rounds of %v, requests of %d bytes, %d keys of %d tenants\n\n",
		cpuName(), runtime.NumCPU(), runtime.Version(), version, disk, b.rounds, b.window, bodyBytes, benchTenants*keysPerTenant, benchTenants)
	return err
}

func cpuName() string {
	text, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(text)) {
		if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return "unknown CPU"
}

// commitTime is what a transaction that writes one record takes, in
// milliseconds, by the median.
func (b *bench) commitTime(ctx context.Context) (ms float64, err error) {
	const commits = 50
	err = b.query(ctx, "bench", func(c *pgx.Conn) error {
		var all []float64
		for range commits {
			start := time.Now()
			if _, err := c.Exec(ctx, "SELECT pg_logical_emit_message(true, 'bench', 'commit')"); err != nil {
				return err
			}
			all = append(all, time.Since(start).Seconds()*1e3)
		}
		ms = median(all)
		return nil
	})
	return ms, err
}

// round measures targets one after another.
func (b *bench) round(ctx context.Context, l load, targets ...*target) ([]*window, error) {
	var out []*window
	for _, t := range targets {
		w, err := t.measure(ctx, l, b.warm, b.window)
		if err != nil {
			return nil, err
		}
		b.check(t, l, w)
		out = append(out, w)
	}
	return out, nil
}

// check notes a window that is no measurement.
func (b *bench) check(t *target, l load, w *window) {
	for kind, n := range w.errors {
		b.problems = append(b.problems, fmt.Sprintf("%s, %+v: %d of %d: %s: %s", t.name, l, n, w.ok+n, kind, w.detail[kind]))
	}
	if w.ok == 0 && len(w.errors) == 0 {
		b.problems = append(b.problems, fmt.Sprintf("%s, %+v: no answer", t.name, l))
	}
}

// with runs a phase on a platform.
func (b *bench) with(ctx context.Context, d *database, speed engineSpeed, f func(*platform) error) error {
	p, err := b.start(ctx, d, speed)
	if err != nil {
		return err
	}
	return errors.Join(f(p), p.stop())
}

// requests measures what plain requests cost when as many are asked as can be
// answered.
func (b *bench) requests(ctx context.Context, d *database) error {
	return b.with(ctx, d, 0, func(p *platform) error {
		all, err := b.rival(ctx, load{tokens: plainTokens, conns: b.conns}, p)
		if err != nil {
			return err
		}
		cost := over(all, func(r []*window) float64 { return r[1].per(gatewayProc) + r[1].per(postgresProc) })
		b.table.judge(fmt.Sprintf("CPU of a request at %d callers, gateway + PostgreSQL", b.conns), fmt.Sprintf("<= %.1f ms", goalRequestCPU),
			cost <= goalRequestCPU, "%.3f ms (%s)", cost, b.parts(all))
		b.rates(all)
		return nil
	})
}

// rival measures the bare upstream, Bulkhead and, where it is there, LiteLLM,
// in rounds. The windows of a round are in this order.
func (b *bench) rival(ctx context.Context, l load, p *platform) (all [][]*window, err error) {
	targets := []*target{b.bare, p.target()}
	lite, err := b.startLiteLLM(ctx)
	if err != nil {
		return nil, err
	}
	if lite != nil {
		defer func() { err = errors.Join(err, lite.close()) }()
		targets = append(targets, lite.target)
	}
	stop, err := b.profileOf(p)
	if err != nil {
		return nil, err
	}
	for range b.rounds {
		r, err := b.round(ctx, l, targets...)
		if err != nil {
			return nil, err
		}
		all = append(all, r)
	}
	return all, stop()
}

// parts says whose CPU time it is.
func (b *bench) parts(all [][]*window) string {
	var out []string
	for _, name := range []string{gatewayProc, postgresProc, prefillProc, decodeProc} {
		out = append(out, fmt.Sprintf("%s %.3f", name, over(all, func(r []*window) float64 { return r[1].per(name) })))
	}
	return strings.Join(out, ", ")
}

// rates notes what was answered a second, by everybody.
func (b *bench) rates(all [][]*window) {
	rps := func(i int) float64 { return over(all, func(r []*window) float64 { return r[i].rps() }) }
	b.table.note("- requests a second, Bulkhead (bare upstream)", "%.0f (%.0f)", rps(1), rps(0))
	b.table.note("- p50, p99 of whole answers", "%.2f ms, %.2f ms", over(all, func(r []*window) float64 { return quantile(r[1].whole, 0.5) }),
		over(all, func(r []*window) float64 { return quantile(r[1].whole, 0.99) }))
	b.table.note("- CPU of the bare upstream", "%.3f ms", over(all, func(r []*window) float64 { return r[0].per(upstreamProc) }))
	if len(all[0]) > 2 {
		cost := func(r []*window) float64 { return r[2].per(liteProc) }
		b.table.note("- LiteLLM beside it, which stores nothing", "%.1f ms, %.0f requests a second, %.0f times the gateway's CPU", over(all, cost), rps(2),
			over(all, func(r []*window) float64 { return cost(r) / (r[1].per(gatewayProc) + r[1].per(postgresProc)) }))
	}
}

// streams measures what a stream of 64 chunks costs.
func (b *bench) streams(ctx context.Context, d *database) error {
	return b.with(ctx, d, stepOfStreams, func(p *platform) error {
		all, err := b.rival(ctx, load{stream: true, tokens: b.chunks, conns: b.conns}, p)
		if err != nil {
			return err
		}
		cost := over(all, func(r []*window) float64 { return r[1].per(gatewayProc) + r[1].per(postgresProc) })
		chunks := over(all, func(r []*window) float64 { return float64(r[1].chunks) / float64(max(r[1].ok, 1)) })
		b.table.judge(fmt.Sprintf("CPU of a stream of %d tokens at %d callers, gateway + PostgreSQL", b.chunks, b.conns), fmt.Sprintf("<= %.1f ms", goalStreamCPU),
			cost <= goalStreamCPU, "%.3f ms in %.1f chunks (%s)", cost, chunks, b.parts(all))
		b.rates(all)
		return nil
	})
}

// latency measures what is added to the first byte, and how much later the last
// one comes.
func (b *bench) latency(ctx context.Context, d *database) error {
	return b.with(ctx, d, 0, func(p *platform) error {
		commit, err := b.commitTime(ctx)
		if err != nil {
			return err
		}
		bulkhead := p.target()
		slow := load{stream: true, tokens: latencyTokens, rate: b.speeds.slow}
		fast := load{stream: true, tokens: latencyTokens, rate: b.speeds.fast}
		var all [2][][]*window
		for range b.rounds {
			for i, l := range []load{slow, fast} {
				r, err := b.round(ctx, l, b.bare, bulkhead)
				if err != nil {
					return err
				}
				all[i] = append(all[i], r)
			}
		}
		added := func(of [][]*window, q float64) float64 {
			return over(of, func(r []*window) float64 { return quantile(r[1].first, q) - quantile(r[0].first, q) })
		}
		for i, l := range []load{slow, fast} {
			goal := []float64{goalSlow, goalFast}[i]
			a := added(all[i], 0.5)
			b.table.judge(fmt.Sprintf("added to the p50 of the first byte at %.0f a second", l.rate), fmt.Sprintf("<= %.1f ms", goal), a <= goal, "%.3f ms (bare upstream %.3f)",
				a, over(all[i], func(r []*window) float64 { return quantile(r[0].first, 0.5) }))
		}
		tail := added(all[1], 0.99)
		b.table.judge(fmt.Sprintf("added to the p99 of the first byte at %.0f a second", fast.rate), fmt.Sprintf("<= %.0f ms", goalTail), tail <= goalTail, "%.3f ms (bare upstream %.3f)",
			tail, over(all[1], func(r []*window) float64 { return quantile(r[0].first, 0.99) }))
		for i, l := range []load{slow, fast} {
			rest := over(all[i], func(r []*window) float64 { return quantile(r[1].rest, 0.5) })
			b.table.judge(fmt.Sprintf("from the first byte to the last at %.0f a second, p50", l.rate), fmt.Sprintf("<= one group commit, %.2f ms", linger+commit),
				rest <= linger+commit, "%.3f ms (p99 %.3f)", rest, over(all[i], func(r []*window) float64 { return quantile(r[1].rest, 0.99) }))
			b.table.note(fmt.Sprintf("- CPU of a request at %.0f a second, gateway + PostgreSQL", l.rate), "%.3f ms (%s)",
				over(all[i], func(r []*window) float64 { return r[1].per(gatewayProc) + r[1].per(postgresProc) }), b.parts(all[i]))
		}
		return nil
	})
}

// phaseNames are what -only takes.
var phaseNames = []string{"tokens", "cpu", "latency", "streams", "idle", "big"}

func (o options) validate() error {
	switch {
	case o.only != "" && !slices.Contains(phaseNames, o.only):
		return fmt.Errorf("-only %q is none of %s", o.only, strings.Join(phaseNames, ", "))
	case o.rounds < 1 || o.window <= 0 || o.warm < 0 || o.conns < 1 || o.speeds.slow <= 0 || o.speeds.fast <= 0 || o.idle < 0 || o.soak < 0:
		return errors.New("rounds, windows, callers and rates are positive")
	case o.idle > maxIdle:
		return fmt.Errorf("-idle is at most %d: each is a sequence of one step", maxIdle)
	}
	return nil
}
