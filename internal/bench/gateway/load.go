package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// requestTimeout is far above what any measured request takes.
	requestTimeout = time.Minute
	// openGrace is how long answers are waited for after the end of a schedule.
	openGrace = 10 * time.Second
	// maxInFlight bounds an open load on a server that does not keep up.
	maxInFlight = 2048
	// errorText is how much of an unexpected answer is shown.
	errorText = 300
)

// target is somebody who answers chat completions.
type target struct {
	name   string
	url    string
	keys   []string // used in turn
	model  string
	procs  []process
	client *http.Client
	next   atomic.Uint64
}

func newTarget(name, url, model string, keys []string, procs ...process) *target {
	return &target{name: name, url: url + "/v1/chat/completions", model: model, keys: keys, procs: procs, client: &http.Client{
		Timeout:   requestTimeout,
		Transport: &http.Transport{MaxIdleConns: maxInFlight, MaxIdleConnsPerHost: maxInFlight, DisableCompression: true},
	}}
}

// load is a shape of load. rate makes it open, otherwise conns callers ask.
type load struct {
	stream bool
	tokens int // of each answer
	conns  int
	rate   float64
}

// window is what was seen in a measured time.
type window struct {
	ok     int
	errors map[string]int    // by kind
	detail map[string]string // the first of each kind
	wall   time.Duration
	whole  []time.Duration // from when a request was due to the end of its answer, sorted
	first  []time.Duration // to the first chunk, of streams, sorted
	rest   []time.Duration // from there to the end, sorted
	chunks int             // of all streams
	cpu    map[string]time.Duration
}

// per is what one answer took of a process, in milliseconds.
func (w *window) per(name string) float64 {
	if w.ok == 0 {
		return 0
	}
	return w.cpu[name].Seconds() * 1e3 / float64(w.ok)
}

func (w *window) rps() float64 { return float64(w.ok) / w.wall.Seconds() }

// quantile is in milliseconds.
func quantile(sorted []time.Duration, q float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)].Seconds() * 1e3
}

// answer is the end of one request.
type answer struct {
	whole, first time.Duration
	chunks       int
	kind, detail string // of an error
}

// recorder takes in answers while it is open.
type recorder struct {
	mu   sync.Mutex
	open bool
	w    window
}

func (r *recorder) add(a answer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case !r.open:
	case a.kind != "":
		r.w.errors[a.kind]++
		if r.w.detail[a.kind] == "" {
			r.w.detail[a.kind] = a.detail
		}
	default:
		r.w.ok++
		r.w.whole = append(r.w.whole, a.whole)
		r.w.first = append(r.w.first, a.first)
		r.w.rest = append(r.w.rest, a.whole-a.first)
		r.w.chunks += a.chunks
	}
}

// set opens or closes the window.
func (r *recorder) set(open bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.open = open
}

// measure asks for warm and then, counted, for length.
func (t *target) measure(ctx context.Context, l load, warm, length time.Duration) (*window, error) {
	rec := &recorder{w: window{errors: map[string]int{}, detail: map[string]string{}, cpu: map[string]time.Duration{}}}
	running, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan struct{})
	bodies := l.bodies(t.model)
	defer t.client.CloseIdleConnections() // a server that shuts down waits for those that nobody used
	go func() {
		defer close(ended)
		if l.rate > 0 {
			t.open(running, l, bodies, rec)
		} else {
			t.closed(running, l, bodies, rec)
		}
	}()
	wait(ctx, warm)
	before, err := usage(t.procs)
	if err != nil {
		return nil, err
	}
	start := time.Now()
	rec.set(true)
	wait(ctx, length)
	if l.rate > 0 { // the schedule ends here, and its answers count
		stop()
		<-ended
	}
	rec.set(false)
	rec.w.wall = time.Since(start)
	after, err := usage(t.procs)
	stop()
	<-ended
	if err != nil || ctx.Err() != nil {
		return nil, errors.Join(err, ctx.Err())
	}
	for name, u := range after {
		rec.w.cpu[name] = u.cpu - before[name].cpu
	}
	for _, list := range [][]time.Duration{rec.w.whole, rec.w.first, rec.w.rest} {
		slices.Sort(list)
	}
	return &rec.w, nil
}

func wait(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// closed lets callers ask one after another.
func (t *target) closed(ctx context.Context, l load, bodies [][]byte, rec *recorder) {
	var callers sync.WaitGroup
	for range l.conns {
		callers.Go(func() {
			for ctx.Err() == nil {
				a := t.ask(ctx, l, bodies, time.Now())
				if ctx.Err() != nil {
					return // cut by the end of the run, not by the server
				}
				rec.add(a)
				if a.kind != "" {
					wait(ctx, 10*time.Millisecond) // a server that refuses is not to be flooded
				}
			}
		})
	}
	callers.Wait()
}

// open asks at its rate until ctx ends, and waits for the answers.
func (t *target) open(ctx context.Context, l load, bodies [][]byte, rec *recorder) {
	grace, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	var asked sync.WaitGroup
	slots := make(chan struct{}, maxInFlight)
	start := time.Now()
	for i := 0; ; i++ {
		due := start.Add(time.Duration(float64(i) / l.rate * float64(time.Second)))
		wait(ctx, time.Until(due))
		if ctx.Err() != nil {
			defer time.AfterFunc(openGrace, cancel).Stop()
			asked.Wait()
			return
		}
		select {
		case slots <- struct{}{}:
			asked.Go(func() {
				defer func() { <-slots }()
				rec.add(t.ask(grace, l, bodies, due))
			})
		default:
			rec.add(answer{kind: "not sent", detail: "too many requests are open"})
		}
	}
}

// ask sends one request and looks at its answer.
func (t *target) ask(ctx context.Context, l load, bodies [][]byte, due time.Time) answer {
	n := t.next.Add(1)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, t.url, bytes.NewReader(bodies[n%uint64(len(bodies))]))
	if err != nil {
		return answer{kind: "request", detail: err.Error()}
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Authorization", "Bearer "+t.keys[n%uint64(len(t.keys))])
	res, err := t.client.Do(req)
	if err != nil {
		return answer{kind: "transport", detail: err.Error()}
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		b, _ := io.ReadAll(io.LimitReader(res.Body, errorText))
		return answer{kind: "status " + strconv.Itoa(res.StatusCode), detail: string(b)}
	}
	if l.stream {
		return readStream(res.Body, due)
	}
	b, err := io.ReadAll(res.Body)
	switch {
	case err != nil:
		return answer{kind: "body", detail: err.Error()}
	case !bytes.Contains(b, []byte(`"total_tokens"`)):
		return answer{kind: "no usage", detail: string(b[:min(len(b), errorText)])}
	}
	return answer{whole: time.Since(due)}
}

// readStream reads server-sent events to their end.
func readStream(body io.Reader, due time.Time) (a answer) {
	lines := bufio.NewReaderSize(body, 16<<10)
	done := false
	for {
		line, err := lines.ReadSlice('\n')
		if data, ok := bytes.CutPrefix(line, []byte("data: ")); ok {
			if a.first == 0 {
				a.first = time.Since(due)
			}
			switch {
			case bytes.HasPrefix(data, []byte("[DONE]")):
				done = true
			case bytes.HasPrefix(data, []byte(`{"error"`)):
				return answer{kind: "error in the stream", detail: string(data[:min(len(data), errorText)])}
			default:
				a.chunks++
			}
		}
		switch {
		case err == nil:
		case errors.Is(err, io.EOF) && done:
			a.whole = time.Since(due)
			return a
		default:
			return answer{kind: "stream", detail: fmt.Sprintf("after %d chunks: %v", a.chunks, err)}
		}
	}
}
