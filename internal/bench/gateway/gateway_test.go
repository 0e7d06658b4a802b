package main

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/pgdb/pgtest"
)

func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == upstreamMark {
		if err := upstreamMain(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// tiny are options of a run that measures nothing but does everything.
func tiny(t *testing.T, out *bytes.Buffer) options {
	t.Helper()
	pgtest.Bin(t)
	o := defaults()
	o.binary = os.Getenv("BULKHEAD_TEST_BINARY")
	o.rounds, o.window, o.warm, o.conns = 1, 200*time.Millisecond, 20*time.Millisecond, 4
	o.speeds = speeds{slow: 20, fast: 60}
	o.idle, o.chunks, o.sizes = 20, 8, [2]int{20, 40}
	o.pace = pace{step: 300 * time.Millisecond, settle: 50 * time.Millisecond}
	o.big, o.litellm, o.out = true, filepath.Join(t.TempDir(), "none"), out
	return o
}

// Every phase runs, without errors under load, and says what it found.
func TestWholeRun(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	assert.NoError(t, run(t.Context(), tiny(t, &out)))
	for _, want := range []string{
		"template and tokenizer", "CPU of a request at 4 callers", "CPU of a stream of 8 tokens", "added to the p50 of the first byte at 20 a second",
		"added to the p99 of the first byte", "from the first byte to the last at 60 a second", "memory of an idle stream, 20 open",
		"goroutines when they are gone", "400 keys of 40 tenants against 200 of 20", "plans of the statements",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the table lacks %q:\n%s", want, out.String())
		}
	}
}

func TestSoak(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	o := tiny(t, &out)
	o.soak = 2 * time.Second
	assert.NoError(t, run(t.Context(), o))
	assert.True(t, strings.Contains(out.String(), "goroutines of the gateway"))
}

// What a server gets wrong is an error, not a fast answer.
func TestWrongAnswers(t *testing.T) {
	t.Parallel()
	for kind, answer := range map[string]struct {
		stream bool
		status int
		body   string
	}{
		"":                    {true, 200, "data: {}\n\ndata: {}\n\ndata: [DONE]\n\n"},
		"status 429":          {false, 429, "slow down"},
		"no usage":            {false, 200, "{}"},
		"stream":              {true, 200, "data: {}\n\n"},
		"error in the stream": {true, 200, "data: {}\n\ndata: {\"error\":{}}\n\n"},
	} {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(answer.status)
			_, _ = w.Write([]byte(answer.body))
		}))
		target := newTarget("test", s.URL, "m", []string{"k"})
		l := load{stream: answer.stream, tokens: 1}
		a := target.ask(t.Context(), l, l.bodies("m"), time.Now())
		assert.Equal(t, a.kind, kind)
		if kind == "" {
			assert.Equal(t, a.chunks, 2)
			assert.True(t, a.first > 0 && a.whole >= a.first)
		}
		target.client.CloseIdleConnections()
		s.Close()
	}
}

// A window counts what ends within it, at the rate that was asked for, and an
// open load charges a server for the queue that it makes.
func TestMeasure(t *testing.T) {
	t.Parallel()
	s := httptest.NewServer(http.HandlerFunc(complete))
	defer s.Close()
	target := newTarget("test", s.URL, "m", []string{"k"}, process{name: "test", pid: os.Getpid()})
	w, err := target.measure(t.Context(), load{tokens: 1, conns: 2}, 10*time.Millisecond, 200*time.Millisecond)
	assert.NoError(t, err)
	assert.True(t, w.ok > 10 && len(w.errors) == 0 && w.rps() > 0)
	assert.Equal(t, len(w.whole), w.ok)
	assert.True(t, slices.IsSorted(w.whole))

	w, err = target.measure(t.Context(), load{stream: true, tokens: 3, rate: 100}, 0, 300*time.Millisecond)
	assert.NoError(t, err)
	assert.True(t, w.ok > 0 && w.ok <= 31 && len(w.errors) == 0)
	assert.Equal(t, w.chunks, 4*w.ok)

	_, err = newTarget("gone", s.URL, "m", []string{"k"}, process{name: "gone", pid: 1 << 30}).measure(t.Context(), load{tokens: 1, conns: 1}, 0, time.Millisecond)
	assert.True(t, err != nil)
}

func TestBodies(t *testing.T) {
	t.Parallel()
	for _, l := range []load{{tokens: 16}, {tokens: 64, stream: true}} {
		seen := map[string]bool{}
		for _, b := range l.bodies("bench") {
			assert.Equal(t, len(b), bodyBytes)
			seen[string(b)] = true
		}
		assert.Equal(t, len(seen), bodyCount)
	}
}

func TestUsage(t *testing.T) {
	t.Parallel()
	for x := 0; ; x++ { // some CPU time
		u, err := usage([]process{{name: "alone", pid: os.Getpid()}, {name: "tree", pid: os.Getppid(), tree: true}})
		assert.NoError(t, err)
		assert.True(t, u["alone"].rss > 1<<20 && u["tree"].rss > u["alone"].rss)
		if u["alone"].cpu > 0 {
			assert.True(t, u["tree"].cpu >= u["alone"].cpu)
			return
		}
	}
}

const plan = "LOG:  duration: 0.1 ms  plan:\n\t{\n\t  \"Query Text\": \"SELECT\\n 1\",\n\t  \"Plan\": {\"Node Type\": %q, \"Relation Name\": %q, \"Index Name\": %q, \"Total Cost\": 7}\n\t}\nLOG:  other\n"

func TestPlans(t *testing.T) {
	t.Parallel()
	of := func(node, table, index string) plans { return readPlans(fmt.Appendf(nil, plan, node, table, index)) }
	index := of("Index Scan", "api_key", "api_key_prefix_key")
	assert.Equal(t, index, plans{"SELECT 1": {"Index Scan api_key api_key_prefix_key": true}})
	assert.Equal(t, len(index.differences(of("Index Scan", "api_key", "api_key_prefix_key"))), 0)
	assert.Equal(t, len(index.differences(of("Index Scan", "api_key", "api_key_pkey"))), 1)
	scan := of("Seq Scan", "api_key", "")
	assert.Equal(t, len(scan.differences(scan)), 1) // the same, and bad
	assert.Equal(t, len(of("Seq Scan", "replica", "").differences(of("Seq Scan", "replica", ""))), 0)
}

func TestGrowth(t *testing.T) {
	t.Parallel()
	flat, leak := make([]sample, 100), make([]sample, 100)
	for i := range flat {
		at := time.Duration(i) * time.Minute
		flat[i] = sample{at: at, rss: 100e6 + float64(i%3)*1e6, goroutines: 50}
		leak[i] = sample{at: at, rss: 100e6 + float64(i)*1e6, goroutines: 50 + float64(i)}
	}
	b := &bench{}
	rss, goroutines := func(s sample) float64 { return s.rss }, func(s sample) float64 { return s.goroutines }
	assert.False(t, b.growth("", "", 1, slackMemory, flat, rss))
	assert.False(t, b.growth("", "", 1, slackGoroutines, flat, goroutines))
	assert.True(t, b.growth("", "", 1, slackMemory, leak, rss))
	assert.True(t, b.growth("", "", 1, slackGoroutines, leak, goroutines))
	_, _, slope := trend(leak, goroutines)
	assert.True(t, slope > 59.9 && slope < 60.1)
}

func TestTable(t *testing.T) {
	t.Parallel()
	var tab table
	tab.judge("a", "<= 1", false, "%d", 2)
	tab.note("bc", "%d", 3)
	var out bytes.Buffer
	tab.print(&out)
	assert.Equal(t, out.String(), "| measured | goal | figure |        |\n| -------- | ---- | ------ | ------ |\n| a        | <= 1 | 2      | missed |\n| bc       |      | 3      |        |\n")
	assert.Equal(t, median([]float64{4, 1, 3, 2}), 2.5)
	assert.Equal(t, quantile([]time.Duration{1e6, 2e6, 3e6, 4e6}, 0.99), 4)
}

func TestOptions(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*options){
		"phase": func(o *options) { o.only = "x" }, "rounds": func(o *options) { o.rounds = 0 }, "idle": func(o *options) { o.idle = maxIdle + 1 },
	} {
		o := defaults()
		o.rounds, o.window, o.conns = 1, 1, 1
		assert.NoError(t, o.validate())
		change(&o)
		if run(context.Background(), o) == nil {
			t.Error(name)
		}
	}
}
