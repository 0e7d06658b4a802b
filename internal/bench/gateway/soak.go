package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"
)

const (
	// soakRate is how many plain requests and how many streams are asked for a
	// second: a load that every machine carries.
	soakRate = 20
	// soakSamples is how often memory and goroutines are looked at.
	soakSamples = 120
	// soakWarm is the share of the samples before caches and pools are full.
	soakWarm = 4
	// Growth from the first to the last third of what is left, beyond which
	// something is never given back.
	maxGrowth        = 0.05
	slackMemory      = 8 << 20
	slackGoroutines  = 20
	leaveEveryStream = 4 // one stream in so many is left in the middle
)

// sample is what one moment showed.
type sample struct {
	at         time.Duration
	rss        float64 // bytes
	goroutines float64
}

// soakFor runs load for a time and fails if memory or goroutines of the gateway
// grow.
func (b *bench) soakFor(ctx context.Context, length time.Duration) error {
	d, err := b.makeDatabase(ctx, "bench")
	if err != nil {
		return err
	}
	var samples []sample
	err = b.with(ctx, d, stepOfStreams, func(p *platform) error {
		samples, err = b.soakOn(ctx, p, length)
		return err
	})
	if err != nil {
		return err
	}
	b.table.note("samples", "%d in %v, %d plain requests and %d streams a second, one stream in %d left in the middle", len(samples), length, soakRate, soakRate, leaveEveryStream)
	grew := b.growth("resident memory", "MB", 1e6, slackMemory, samples, func(s sample) float64 { return s.rss })
	grew = b.growth("goroutines", "", 1, slackGoroutines, samples, func(s sample) float64 { return s.goroutines }) || grew
	b.table.print(b.out)
	for _, p := range b.problems {
		fmt.Fprintln(os.Stderr, "error under load:", p)
	}
	switch {
	case len(b.problems) > 0:
		fmt.Fprintf(os.Stderr, "the platform logged:\n%s", b.lastLog())
		return errors.New("there were errors under load")
	case grew:
		return errors.New("the gateway grows")
	}
	return nil
}

// soakOn asks, and looks now and then.
func (b *bench) soakOn(ctx context.Context, p *platform, length time.Duration) ([]sample, error) {
	running, stop := context.WithTimeout(ctx, length)
	defer stop()
	plain, stream := p.target(), p.target()
	var loads sync.WaitGroup
	defer loads.Wait()
	defer stop()
	var mu sync.Mutex
	var failed []error
	keep := func(f func() error) {
		loads.Go(func() {
			if err := f(); err != nil {
				mu.Lock()
				defer mu.Unlock()
				failed = append(failed, err)
			}
		})
	}
	for _, one := range []struct {
		t *target
		l load
	}{{plain, load{tokens: plainTokens, rate: soakRate}}, {stream, load{stream: true, tokens: b.chunks, rate: soakRate - soakRate/leaveEveryStream}}} {
		keep(func() error {
			w, err := one.t.measure(ctx, one.l, 0, length)
			if err == nil {
				b.checked.Lock()
				defer b.checked.Unlock()
				b.check(one.t, one.l, w)
			}
			return err
		})
	}
	keep(func() error { leaveStreams(running, p.target(), soakRate/leaveEveryStream); return nil })
	var out []sample
	start := time.Now()
	for running.Err() == nil {
		wait(running, length/soakSamples)
		u, err := b.gatewayUse(p)
		if err != nil {
			return nil, err
		}
		n, err := p.metric(ctx, "go_goroutines")
		if err != nil {
			return nil, err
		}
		out = append(out, sample{time.Since(start), float64(u.rss), n})
	}
	loads.Wait()
	return out, errors.Join(failed...)
}

// leaveStreams opens streams and leaves each at its first chunk.
func leaveStreams(ctx context.Context, t *target, perSecond int) {
	l := load{stream: true, tokens: idleTokens}
	bodies := l.bodies(t.model)
	for i := 0; ctx.Err() == nil; i++ {
		one, leave := context.WithTimeout(ctx, time.Second)
		_ = holdStream(one, t.client, t, bodies[i%len(bodies)], t.keys[i%len(t.keys)], leave) // it ends in an error: we leave
		leave()
		wait(ctx, time.Second/time.Duration(perSecond))
	}
}

// growth judges how much a figure grew, and reports whether it was too much.
func (b *bench) growth(what, unit string, scale, slack float64, all []sample, of func(sample) float64) bool {
	first, last, slope := trend(all, of)
	most := max(maxGrowth*first, slack)
	ok := last-first <= most
	b.table.judge(what+" of the gateway", fmt.Sprintf("grows by <= %.1f %s", most/scale, unit), ok, "from %.1f to %.1f %s, %+.2f an hour", first/scale, last/scale, unit, slope/scale)
	return !ok
}

// trend returns the medians of the first and the last third of what is left
// without the warm-up, and the slope of the line through all of that, by the hour.
func trend(all []sample, of func(sample) float64) (first, last, slope float64) {
	all = all[len(all)/soakWarm:]
	value := func(part []sample) float64 { return over(part, of) }
	third := max(len(all)/3, 1)
	var meanX, meanY, xy, xx float64
	for _, s := range all {
		meanX += s.at.Hours() / float64(len(all))
		meanY += of(s) / float64(len(all))
	}
	for _, s := range all {
		x := s.at.Hours() - meanX
		xy += x * (of(s) - meanY)
		xx += x * x
	}
	if xx > 0 {
		slope = xy / xx
	}
	return value(all[:third]), value(slices.Clip(all[len(all)-third:])), slope
}
