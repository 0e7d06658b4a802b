package sim

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"bulkhead.dev/engine/handoff"
	"bulkhead.dev/infra/assert"
	"go.uber.org/goleak"
)

const (
	// envSoak is how long to go on with new seeds.
	envSoak = "BULKHEAD_SOAK"
	// envSeed is the one seed to play, with every step logged.
	envSeed = "BULKHEAD_SOAK_SEED"
	// schedules is how many seeds a plain test plays. They take about 3 s.
	schedules = 1000
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// play runs one schedule in a bubble of its own.
func play(t *testing.T, seed uint64, sum *tally, trace bool) (lines []string) {
	t.Helper()
	defer func() {
		if r := recover(); r != nil {
			panic(fmt.Sprintf("%s=%d: %v", envSeed, seed, r))
		}
	}()
	synctest.Test(t, func(t *testing.T) { lines = run(t, seed, sum, trace) })
	if t.Failed() {
		t.Fatalf("a schedule failed; play it again with %s=%d", envSeed, seed)
	}
	return lines
}

// Every schedule keeps what must hold, and together they meet every fault, and
// every reason to refuse.
func TestSchedules(t *testing.T) {
	if s := os.Getenv(envSeed); s != "" {
		seed, err := strconv.ParseUint(s, 10, 64)
		assert.NoError(t, err)
		sum := newTally()
		for _, line := range play(t, seed, sum, true) {
			t.Log(line)
		}
		t.Log(sum)
		return
	}
	if s := os.Getenv(envSoak); s != "" {
		d, err := time.ParseDuration(s)
		assert.NoError(t, err)
		soak(t, d)
		return
	}
	sum := newTally()
	n := schedules
	if raced {
		n /= 3 // it is many times slower
	}
	for seed := range uint64(n) {
		play(t, seed, sum, false)
	}
	t.Log(sum)
	for _, f := range allFaults() {
		if sum.faults[f] == 0 {
			t.Errorf("fault never injected: %s", f)
		}
	}
	for where := range sum.visits {
		for _, f := range stepFaults {
			if key := where + ": " + string(f); sum.steps[key] == 0 && possible(where, f) && !raced {
				t.Errorf("fault never injected: %s", key)
			}
		}
	}
	for _, reason := range handoff.Reasons() {
		if sum.refusals[reason] == 0 {
			t.Errorf("reason never given: %s", reason)
		}
	}
	assert.True(t, sum.commits > n && sum.clean > n)
}

// possible reports whether a step has what the fault is done to.
func possible(where string, f fault) bool {
	switch f {
	case closeInbound:
		return where != "planned" && where != "decode reserved"
	case abortOffer, abortFiller, staleSource:
		return where != "planned" && where != "decode reserved" && where != "announced" && where != "prefill reserved"
	}
	return true
}

// soak plays new seeds until the time is over.
func soak(t *testing.T, d time.Duration) {
	began := time.Now()
	first := uint64(began.Unix()) << 20
	t.Logf("seeds from %d on", first)
	sum := newTally()
	for seed := first; time.Since(began) < d; seed++ {
		play(t, seed, sum, false)
	}
	t.Logf("%.0f schedules per second\n%s", float64(sum.schedules)/time.Since(began).Seconds(), sum)
}

// A seed is a schedule: played again, the same happens at the same time.
func TestReproducible(t *testing.T) {
	for seed := range uint64(20) {
		a, b := play(t, seed, newTally(), true), play(t, seed, newTally(), true)
		slices.Sort(a)
		slices.Sort(b)
		assert.Equal(t, a, b)
	}
}
