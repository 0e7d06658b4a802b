package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"
)

const (
	// maxIdle is how many sequences a simulated step can have.
	maxIdle = 16_000
	// idleTokens make idle streams outlive the measurement.
	idleTokens = 200
	// openAtOnce is how many streams are being opened at a time.
	openAtOnce = 64
	// goneWithin is how long streams may take to be forgotten: the step that
	// runs, and the acknowledgments of both legs.
	goneWithin = 30 * time.Second
	// goalIdle is in bytes for each stream.
	goalIdle = 60_000
	// straggling goroutines are the server's own: timers, and connections of
	// pools that come and go.
	straggling = 40
)

// idleStreams measures what streams cost that are open and say nothing, and
// that nothing is left of them.
func (b *bench) idleStreams(ctx context.Context, d *database) error {
	return b.with(ctx, d, engineSpeed(b.pace.step), func(p *platform) error {
		bulkhead := p.target()
		// A few before, so that what is made once does not count.
		if err := b.holdStreams(ctx, bulkhead, min(b.idle, openAtOnce), func() error { return nil }); err != nil {
			return err
		}
		before, err := b.quiet(ctx, p, 0)
		if err != nil {
			return err
		}
		names := []string{"go_goroutines", "go_memstats_stack_inuse_bytes", "go_memstats_heap_inuse_bytes"}
		look := func() (out []float64, err error) {
			for _, name := range names {
				v, err := p.metric(ctx, name)
				if err != nil {
					return nil, err
				}
				out = append(out, v)
			}
			return out, nil
		}
		without, err := look()
		if err != nil {
			return err
		}
		base := without[0]
		var held used
		var with []float64
		err = b.holdStreams(ctx, bulkhead, b.idle, func() (err error) {
			wait(ctx, b.pace.settle)
			if held, err = b.gatewayUse(p); err != nil {
				return err
			}
			with, err = look()
			return err
		})
		if err != nil {
			return err
		}
		per := func(i int) float64 { return (with[i] - without[i]) / float64(b.idle) }
		each := float64(held.rss-before.rss) / float64(b.idle)
		b.table.judge(fmt.Sprintf("memory of an idle stream, %d open", b.idle), "<= 60 kB", each <= goalIdle,
			"%.1f kB (stacks of %.1f goroutines %.1f kB, heap %.1f kB)", each/1e3, per(0), per(1)/1e3, per(2)/1e3)
		if _, err := b.quiet(ctx, p, base+straggling); err != nil {
			return err
		}
		left, err := p.metric(ctx, "go_goroutines")
		if err != nil {
			return err
		}
		b.table.judge("- goroutines when they are gone", fmt.Sprintf("<= %.0f + %d", base, straggling), left <= base+straggling, "%.0f", left)
		return nil
	})
}

func (b *bench) gatewayUse(p *platform) (used, error) {
	u, err := usage([]process{{name: gatewayProc, pid: p.PIDs["front"]}})
	return u[gatewayProc], err
}

// quiet waits until the gateway has no more goroutines than that (0: as it is),
// and looks at it.
func (b *bench) quiet(ctx context.Context, p *platform, most float64) (used, error) {
	wait(ctx, b.pace.step+b.pace.settle)
	for end := time.Now().Add(goneWithin); most > 0 && time.Now().Before(end); wait(ctx, time.Second) {
		n, err := p.metric(ctx, "go_goroutines")
		if err != nil {
			return used{}, err
		}
		if n <= most {
			break
		}
	}
	return b.gatewayUse(p)
}

// holdStreams opens streams, calls f when each has its first chunk, and leaves.
func (b *bench) holdStreams(ctx context.Context, t *target, n int, f func() error) error {
	ctx, leave := context.WithCancel(ctx)
	var open, reading sync.WaitGroup
	defer reading.Wait()
	defer leave()
	l := load{stream: true, tokens: idleTokens}
	bodies := l.bodies(t.model)
	// A client of its own: its connections end with the streams.
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DisableCompression: true, MaxConnsPerHost: 0, ReadBufferSize: 1 << 10, WriteBufferSize: 1 << 10}}
	slots := make(chan struct{}, openAtOnce)
	failed := make(chan error, n)
	for i := range n {
		slots <- struct{}{}
		open.Add(1)
		reading.Go(func() {
			opened := sync.OnceFunc(func() { <-slots; open.Done() })
			defer opened()
			if err := holdStream(ctx, client, t, bodies[i%len(bodies)], t.keys[i%len(t.keys)], opened); err != nil && ctx.Err() == nil {
				failed <- err
			}
		})
	}
	open.Wait()
	select {
	case err := <-failed:
		return fmt.Errorf("open streams: %w", err)
	default:
	}
	err := f()
	select {
	case ended := <-failed:
		err = errors.Join(err, fmt.Errorf("a stream did not stay open: %w", ended))
	default:
	}
	return err
}

// holdStream reads a stream until ctx ends.
func holdStream(ctx context.Context, client *http.Client, t *target, body []byte, key string, opened func()) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, t.url, bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Authorization", "Bearer "+key)
	res, err := client.Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return fmt.Errorf("status %d", res.StatusCode)
	}
	lines := bufio.NewScanner(res.Body)
	for lines.Scan() {
		if bytes.HasPrefix(lines.Bytes(), []byte("data: ")) {
			opened()
		}
	}
	return errors.Join(errors.New("it ended"), lines.Err())
}
