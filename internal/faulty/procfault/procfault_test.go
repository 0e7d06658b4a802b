//go:build faulty

// Package procfault kills, stops and breaks workers at every step of both legs,
// as processes, under traffic of several tenants.
package procfault

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/model/synth"
	"bulkhead.dev/engine/worker"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/internal/faulty/failpoint"
	"bulkhead.dev/internal/rig"
)

func TestMain(m *testing.M) {
	rig.Main(map[string]rig.Program{"points": points})
	http.DefaultTransport.(*http.Transport).DisableKeepAlives = true
	// The thread whose end would end the children.
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("bulkhead.dev/infra/proc.spawn.func1.1"))
}

// points is a real worker whose failpoints are armed when it is told, so that
// what came before went well.
func points(ctx context.Context, boot worker.Boot, args []string, log *slog.Logger) error {
	told := make(chan os.Signal, 1)
	signal.Notify(told, syscall.SIGUSR1)
	go func() {
		<-told
		if err := failpoint.Arm(args); err != nil {
			panic(err)
		}
		fmt.Fprintln(os.Stderr, "armed")
	}()
	return worker.Run(ctx, boot, log)
}

// steps are the points of both legs, in the order in which a request passes
// them, some also the n-th time.
var steps = []string{
	"decode.entered", "decode.reserved", "prefill.entered", "prefill.pass", "prefill.pass@3", "prefill.preview", "decode.preview",
	"decode.reading", "decode.reading@4", "prefill.sealed", "prefill.offered", "decode.offered", "decode.pulled", "decode.committed",
	"prefill.acknowledged", "decode.pass", "decode.pass@7", "decode.finished",
}

// Every step that the code of the workers names is in the table, and the
// reverse.
func TestStepsAreComplete(t *testing.T) {
	t.Parallel()
	found := map[string]bool{"prefill.pass": true, "decode.pass": true} // by role
	files, err := filepath.Glob("../../../engine/worker/*.go")
	assert.NoError(t, err)
	call := regexp.MustCompile(`step\("([a-z.]+)"\)`)
	for _, f := range files {
		b, err := os.ReadFile(f)
		assert.NoError(t, err)
		for _, m := range call.FindAllSubmatch(b, -1) {
			found[string(m[1])] = true
		}
	}
	for _, s := range steps {
		name, _, again := strings.Cut(s, "@")
		assert.True(t, found[name] || again)
		delete(found, name)
	}
	assert.Equal(t, len(found), 0)
}

const (
	victim = iota
	asker
	other
	tenants
)

const (
	// window is as much as a pool holds, so that a last prompt that takes all of
	// it tells whether all credits are back.
	window = 66 * kv.PageTokens
	canary = "victim-canary/7f3a9c1e-0b5d2468;" // as long as the model copies over
	// held is longer than anything waits for a worker: the registry 2 s, an offer
	// and a page half a second (below).
	held = 2600 * time.Millisecond
	soon = 500 * time.Millisecond
)

func question(n int) string {
	return fmt.Sprintf("QUESTION %04d: %s WHAT IS THE WEATHER LIKE WHERE YOU ARE? TELL ME!", n, strings.Repeat("AND THEN. ", 13))
}

// actions are what happens at a step: to the leg that passes it or, with "other",
// to the leg that it works with, which is killed while the first stands still.
var actions = []string{"kill", "stop", "fail", "other"}

// TestFaults breaks one leg at one step while several tenants are served.
// Whatever happens: who gets an answer gets the right one, nobody sees anything
// of the victim, all pages and credits come back, and the next requests are
// served. Pages go by turns out of shared memory and over TCP.
func TestFaults(t *testing.T) {
	t.Parallel()
	model := filepath.Join(t.TempDir(), "copy.gguf")
	assert.NoError(t, os.WriteFile(model, synth.CopyModel(window), 0o600))
	slots := make(chan struct{}, 8) // most of the time is waiting
	run := func(f faultCase) {
		t.Run(f.String(), func(t *testing.T) {
			t.Parallel()
			slots <- struct{}{}
			defer func() { <-slots }()
			f.run(t, model)
		})
	}
	for i, step := range steps {
		for j, action := range actions {
			run(faultCase{step, action, (i+j)%2 == 1})
		}
	}
	// The connections that pages come over, at the steps while it matters.
	for _, step := range []string{"decode.preview", "decode.reading", "decode.reading@4", "prefill.preview", "decode.offered"} {
		run(faultCase{step, "reset", true})
	}
	run(faultCase{"prefill.offered", "exit", false})
	run(faultCase{"decode.offered", "exit", true})
}

// faultCase is a fault at a step. With tcp, pages come over a TCP connection.
type faultCase struct {
	step, action string
	tcp          bool
}

func (f faultCase) String() string {
	if f.tcp {
		return f.step + " " + f.action + " tcp"
	}
	return f.step + " " + f.action
}

// spec is what the leg is told to do.
func (f faultCase) spec() string {
	name, n, _ := strings.Cut(f.step, "@")
	action := f.action
	if action == "other" {
		action = "stop"
	}
	if n != "" {
		action += "@" + n
	}
	return name + "=" + action
}

// mustFail reports whether at least one request cannot have an answer.
func (f faultCase) mustFail() bool {
	switch f.action {
	case "kill", "exit":
		return true
	case "fail":
		// A pass of decode that fails once is made good, by trying again request by
		// request.
		return !strings.HasPrefix(f.step, "decode.pass")
	}
	return false
}

func (f faultCase) run(t *testing.T, model string) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	short := func(b *worker.Boot) {
		b.Pages, b.OfferWait, b.PageStall = window/kv.PageTokens, worker.Span(soon), worker.Span(soon)
		if b.FabricListen != "" {
			b.Chunk = 48 // several passes, with previews between them
			if f.tcp {
				b.FabricListen = "tcp:127.0.0.1:0"
			}
		}
	}
	r, err := rig.Start(ctx, rig.Options{
		Model: model, Tenants: tenants, PrefillProgram: "points", DecodeProgram: "points", Prefill: short, Decode: short,
		Args: []string{f.spec()},
	})
	assert.NoError(t, err)
	defer func() { assert.NoError(t, r.Close()) }()
	leg, other := r.Decode, r.Prefill
	if strings.HasPrefix(f.step, "prefill.") {
		leg, other = other, leg
	}
	// The victim leaves its text in almost every page.
	a, err := r.Ask(ctx, victim, strings.Repeat(canary, 25), 220)
	assert.NoError(t, err)
	assert.Equal(t, a.Status, 200)
	assert.NoError(t, leg.Signal(syscall.SIGUSR1))
	wait(t, "armed", func() bool { return strings.HasSuffix(leg.LastLine(), "armed") })

	answers := make([]rig.Answer, 4)
	var asked sync.WaitGroup
	for i := range answers {
		asked.Go(func() {
			short, cancel := context.WithTimeout(ctx, 10*time.Second)
			defer cancel()
			a, err := r.Ask(short, asker+i%2, question(i), 40)
			if err != nil {
				t.Errorf("no answer at all: %v", err)
			}
			answers[i] = a
		})
	}
	var dead *rig.Process
	switch f.action {
	case "kill", "exit":
		dead = leg
		<-leg.Done()
	case "stop":
		wait(t, "stopped", func() bool { return state(leg.PID()) == "T" })
		time.Sleep(held) // what is tested is the time itself
		assert.NoError(t, leg.Signal(syscall.SIGCONT))
	case "other":
		dead = other
		wait(t, "stopped", func() bool { return state(leg.PID()) == "T" })
		other.Kill()
		assert.NoError(t, leg.Signal(syscall.SIGCONT))
	}
	asked.Wait()
	failed := 0
	for i, a := range answers {
		right(t, a, i)
		if a.Status != 200 {
			failed++
		}
	}
	if f.mustFail() && failed == 0 {
		t.Error("nothing failed: was the fault there?")
	}

	if dead != nil {
		before := dead.Epoch()
		dead.Args = nil
		assert.NoError(t, dead.Start())
		assert.True(t, dead.Epoch() != before)
	}
	assert.NoError(t, r.WaitReady(ctx))
	f.after(ctx, t, r)
}

// after checks that nothing is left of a fault.
func (f faultCase) after(ctx context.Context, t *testing.T, r *rig.Rig) {
	t.Helper()
	wait(t, "all pages are back", func() bool { return balanced(ctx, t, r) })
	for i := range 4 {
		a, err := r.Ask(ctx, asker+i%2, question(10+i), 40)
		assert.NoError(t, err)
		assert.Equal(t, a.Status, 200)
		right(t, a, 10+i)
	}
	// With one credit less than there are pages this would wait for ever.
	whole := strings.Repeat("ALL OF IT. ", window)[:window-1-synth.CopyDistance]
	a, err := r.Ask(ctx, other, whole, synth.CopyDistance)
	assert.NoError(t, err)
	assert.Equal(t, a, rig.Answer{Status: 200, Text: rig.Copied(whole, synth.CopyDistance)})
	for _, rec := range r.Receipts() {
		ok := []string{"completed", "refused", "failed", "canceled"}
		assert.True(t, slices.Contains(ok, string(rec.Outcome)))
	}
}

// balanced asks both workers for their pages, and reports whether all of them
// are free. They must always be as many as there are.
func balanced(ctx context.Context, t *testing.T, r *rig.Rig) bool {
	t.Helper()
	live := 0
	for _, m := range r.Registry.PageMaps(ctx) {
		if m.Worker.Epoch != r.Prefill.Epoch() && m.Worker.Epoch != r.Decode.Epoch() {
			continue // dead, and about to be forgotten
		}
		if m.Err != nil {
			return false
		}
		free, all := 0, 0
		for _, run := range m.Pages.GetRuns() {
			all += int(run.GetCount())
			if s := run.GetState(); s == "clean" || s == "dirty" || s == "scrubbing" {
				free += int(run.GetCount())
			}
			if q := run.GetState() == "quarantined"; q != (run.GetReason() != "") {
				t.Errorf("a page is %s with the reason %q", run.GetState(), run.GetReason())
			}
		}
		assert.Equal(t, all, window/kv.PageTokens)
		if free < all {
			return false
		}
		live++
	}
	return live == 2
}

// right checks an answer: it is an error, or it is the answer to the question.
func right(t *testing.T, a rig.Answer, n int) {
	t.Helper()
	for i := range canary[:len(canary)-7] {
		if strings.Contains(a.Text, canary[i:i+8]) {
			t.Errorf("text of the victim in %q", a.Text)
		}
	}
	if a.Status == 200 && a.Text != rig.Copied(question(n), 40) || a.Status != 200 && (a.Code == "" || a.Text != "") {
		t.Errorf("question %d: %+v", n, a)
	}
}

func wait(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: never", what)
		}
	}
}

// state is the state of a process as the kernel tells it: "T" is stopped.
func state(pid int) string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return ""
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	return rest[:1]
}
