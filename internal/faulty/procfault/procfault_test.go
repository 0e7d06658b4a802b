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
// them.
var steps = []string{
	"decode.entered", "decode.reserved", "prefill.entered", "prefill.pass", "prefill.preview", "decode.preview", "decode.reading",
	"prefill.sealed", "prefill.offered", "decode.offered", "decode.pulled", "decode.committed", "prefill.acknowledged",
	"decode.pass", "decode.finished",
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
		assert.True(t, found[s])
		delete(found, s)
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
	window = 512
	canary = "victim-canary/7f3a9c1e-0b5d2468;" // as long as the model copies over
	// held is longer than anything waits for a worker: the registry 2 s, an offer
	// and a page half a second (below).
	held = 2600 * time.Millisecond
	soon = 500 * time.Millisecond
)

func question(n int) string {
	return fmt.Sprintf("QUESTION %04d: %s WHAT IS THE WEATHER LIKE WHERE YOU ARE? TELL ME!", n, strings.Repeat("AND THEN. ", 13))
}

// TestFaults breaks one leg at one step while several tenants are served.
// Whatever happens: who gets an answer gets the right one, nobody sees anything
// of the victim, all pages come back, and the next requests are served.
func TestFaults(t *testing.T) {
	t.Parallel()
	model := filepath.Join(t.TempDir(), "copy.gguf")
	assert.NoError(t, os.WriteFile(model, synth.CopyModel(window), 0o600))
	slots := make(chan struct{}, 6) // most of the time is waiting
	for _, step := range steps {
		for _, action := range []string{"kill", "stop", "fail"} {
			t.Run(step+" "+action, func(t *testing.T) {
				t.Parallel()
				slots <- struct{}{}
				defer func() { <-slots }()
				fault(t, model, step, action)
			})
		}
	}
}

func fault(t *testing.T, model, step, action string) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	short := func(b *worker.Boot) {
		b.OfferWait, b.PageStall = worker.Span(soon), worker.Span(soon)
		if b.FabricListen != "" {
			b.Chunk = 48 // several passes, with previews between them
		}
	}
	r, err := rig.Start(ctx, rig.Options{
		Model: model, Tenants: tenants, PrefillProgram: "points", DecodeProgram: "points", Prefill: short, Decode: short,
		Args: []string{step + "=" + action},
	})
	assert.NoError(t, err)
	defer func() { assert.NoError(t, r.Close()) }()
	leg := r.Decode
	if strings.HasPrefix(step, "prefill.") {
		leg = r.Prefill
	}
	a, err := r.Ask(ctx, victim, strings.Repeat(canary, 9), 180)
	assert.NoError(t, err)
	assert.Equal(t, a.Status, 200)
	assert.NoError(t, leg.Signal(syscall.SIGUSR1))
	wait(t, "armed", func() bool { return strings.HasSuffix(leg.LastLine(), "armed") })

	var asked sync.WaitGroup
	answers := make([]rig.Answer, 4)
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
	switch action {
	case "kill":
		<-leg.Done()
	case "stop":
		wait(t, "stopped", func() bool { return state(leg.PID()) == "T" })
		time.Sleep(held) // what is tested is the time itself
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
	// What has to fail, did: the fault was there. Only a pass of decode that fails
	// once is made good, by trying again request by request.
	if failed == 0 && action != "stop" && step+action != "decode.passfail" {
		t.Errorf("%s at %s made nothing fail", action, step)
	}

	if action == "kill" {
		leg.Args = nil
		assert.NoError(t, leg.Start())
	}
	assert.NoError(t, r.WaitReady(ctx))
	for _, p := range []*rig.Process{r.Prefill, r.Decode} {
		wait(t, "all pages are back", func() bool {
			pages := p.Pages()
			free, all := pages["clean"]+pages["dirty"]+pages["scrubbing"], 0
			for _, n := range pages {
				all += n
			}
			return all > 0 && free == all
		})
	}
	for i := range 4 {
		a, err := r.Ask(ctx, asker+i%2, question(10+i), 40)
		assert.NoError(t, err)
		assert.Equal(t, a.Status, 200)
		right(t, a, 10+i)
	}
	for _, rec := range r.Receipts() {
		ok := []string{"completed", "refused", "failed", "canceled"}
		assert.True(t, slices.Contains(ok, string(rec.Outcome)))
	}
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
