package sim

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime/debug"
	"sync"
	"testing"
	"time"

	"bulkhead.dev/engine/fabric"
	"bulkhead.dev/engine/handoff"
	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/kv/kvtest"
	"bulkhead.dev/infra/id"
)

// poolPages is little for the requests that come at once, so that pages change
// their owners all the time.
const poolPages = 24

var (
	geometry = kvtest.Geometry()
	model    = [32]byte{4}
)

// world is one schedule.
type world struct {
	t       *testing.T
	seed    uint64
	rate    float64 // of faults, for each step
	trace   bool
	pattern kv.Pattern
	scrub   bool           // pages are wiped ahead
	wg      sync.WaitGroup // of everything that ends by itself
	scrubs  sync.WaitGroup

	prefills []*slot
	decode   *slot

	mu      sync.Mutex
	tally   *tally      // under mu
	lives   []*life     // under mu; all that ever were
	archive []archived  // under mu; manifests that were sent once
	all     []*transfer // under mu
	lines   []string    // under mu, with trace
}

// archived is a manifest that was sent.
type archived struct {
	r   *transfer
	enc []byte
}

// slot is the place of a worker, in which one life follows the other.
type slot struct {
	name    string
	prefill bool

	mu      sync.Mutex
	current *life // under mu; nil while it is down
}

func (s *slot) now() *life {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.current
}

// life is one run of a worker process.
type life struct {
	slot     *slot
	epoch    id.Epoch
	pool     *kv.Pool
	track    *track
	server   *fabric.Server    // prefill
	receiver *handoff.Receiver // decode
	ctx      context.Context   // ends with the life
	end      context.CancelFunc

	mu     sync.Mutex
	killed bool     // under mu; the context has ended
	morgue []func() // under mu; what a dead process did not get to give back
}

func (l *life) dead() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.killed
}

// cleanup gives something back, unless the process died before it could.
func (l *life) cleanup(f func()) {
	l.mu.Lock()
	if l.killed {
		l.morgue = append(l.morgue, f)
		f = func() {}
	}
	l.mu.Unlock()
	f()
}

// actor is one line of events with random numbers of its own, so that nothing
// depends on which of two lines the scheduler runs first.
type actor struct {
	w    *world
	name string
	*rand.Rand
}

func (a *actor) fork(name string) *actor {
	return &actor{a.w, a.name + "/" + name, rand.New(rand.NewPCG(a.Uint64(), a.Uint64()))}
}

func (a *actor) chance(p float64) bool { return a.Float64() < p }

// sleep passes up to most of virtual time. Hardly anybody else wakes at that
// nanosecond, so what happens after it happens alone.
func (a *actor) sleep(most time.Duration) {
	time.Sleep(1 + time.Duration(a.Int64N(int64(most))))
}

func (a *actor) id() (b [16]byte) {
	for i := range b {
		b[i] = byte(a.Uint32())
	}
	return b
}

// run plays one schedule. It is called in a bubble.
func run(t *testing.T, seed uint64, sum *tally, trace bool) []string {
	a := &actor{name: "gateway", Rand: rand.New(rand.NewPCG(seed, 0x9E3779B97F4A7C15))}
	w := &world{t: t, seed: seed, trace: trace, tally: newTally()}
	a.w = w
	w.rate = []float64{0, 0.01, 0.02, 0.05}[a.IntN(4)]
	w.scrub = a.chance(0.3)
	if a.chance(0.5) {
		w.pattern = kv.NaN
	}
	w.prefills = []*slot{{name: "prefill-0", prefill: true}, {name: "prefill-1", prefill: true}}
	w.decode = &slot{name: "decode"}
	for _, s := range append([]*slot{w.decode}, w.prefills...) {
		w.start(a.fork(s.name), s)
	}
	owners := 2 + a.IntN(3)
	for n := range 3 + a.IntN(6) {
		b := a.fork(fmt.Sprint(n))
		owner := uint64(1 + b.IntN(owners))
		w.spawn(func() { w.request(b, owner, uint64(n)) })
	}
	w.wg.Wait()
	w.finish()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.tally.schedules++
	sum.add(w.tally)
	return w.lines
}

// start brings a worker up, under a new epoch.
func (w *world) start(a *actor, s *slot) *life {
	l := &life{slot: s, epoch: a.id(), track: newTrack(w)}
	l.ctx, l.end = context.WithCancel(context.Background())
	pool, err := kv.New(kv.Config{Geometry: geometry, Pages: poolPages, Pattern: w.pattern, OnEvent: l.track.event})
	if err != nil {
		w.fail("make a pool: %v", err)
		return l
	}
	l.pool = pool
	if s.prefill {
		l.server = fabric.NewServer(fabric.ServerOptions{})
	} else {
		l.receiver = handoff.NewReceiver(handoff.ReceiverConfig{Epoch: l.epoch, Geometry: geometry, Model: model})
	}
	if w.scrub {
		w.scrubs.Go(func() {
			if err := pool.Scrub(l.ctx, 1<<18); err != nil {
				w.fail("scrub: %v", err)
			}
		})
	}
	s.mu.Lock()
	s.current = l
	s.mu.Unlock()
	w.mu.Lock()
	w.lives = append(w.lives, l)
	w.mu.Unlock()
	return l
}

// kill ends a process: what it held is not given back, and the other side sees
// errors only. Another one takes its place later and replays what was sent.
func (w *world) kill(a *actor, s *slot) bool {
	s.mu.Lock()
	l := s.current
	s.current = nil
	s.mu.Unlock()
	if l == nil {
		return false
	}
	l.mu.Lock()
	l.killed = true
	l.mu.Unlock()
	l.end()
	b := a.fork("restart")
	w.spawn(func() {
		b.sleep(100 * time.Millisecond)
		next := w.start(b, s)
		for range 1 + b.IntN(3) {
			w.replay(b, next)
		}
	})
	return true
}

// spawn runs a line of events. A panic names the seed.
func (w *world) spawn(f func()) {
	w.wg.Go(func() {
		defer func() {
			if r := recover(); r != nil {
				panic(fmt.Sprintf("%s=%d: %v\n%s", envSeed, w.seed, r, debug.Stack()))
			}
		}()
		f()
	})
}

// fail notes that something that must hold does not.
func (w *world) fail(format string, args ...any) {
	w.t.Helper()
	w.t.Errorf("%s=%d: "+format, append([]any{envSeed, w.seed}, args...)...)
}

// note logs a step.
func (w *world) note(a *actor, format string, args ...any) {
	if !w.trace {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lines = append(w.lines, fmt.Sprintf("%v %s: ", time.Since(time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)), a.name)+fmt.Sprintf(format, args...))
}

// check looks at everything that can be looked at, after a step.
func (w *world) check(a *actor) {
	for _, s := range append([]*slot{w.decode}, w.prefills...) {
		l := s.now()
		if l == nil {
			continue
		}
		l.track.check(l.pool)
		for _, q := range l.track.sequences() {
			q.spot(a)
		}
	}
}

// finish checks what is left when everything has ended.
func (w *world) finish() {
	for _, l := range w.lives {
		l.end()
	}
	w.scrubs.Wait()
	for _, l := range w.lives {
		if l.dead() {
			// The system takes back what a dead process had.
			for _, f := range l.morgue {
				f()
			}
		}
		l.track.idle(l.pool)
		if l.server != nil && l.server.Offers() != 0 {
			w.fail("%d offers are open in the end", l.server.Offers())
		}
		if err := l.pool.Close(); err != nil {
			w.fail("close a pool: %v", err)
		}
	}
	for _, r := range w.all {
		r.finish()
	}
}

// intrude grants as much as there is of a pool to somebody else for a while.
func (w *world) intrude(a *actor, l *life) {
	b := a.fork("intruder")
	n := l.pool.Stats().Free
	if n == 0 {
		return
	}
	credits, err := l.pool.Reserve(kvtest.Owner(99), n)
	if err != nil {
		if !w.scrub { // or a page was just taken out to be wiped
			w.fail("reserve %d free pages: %v", n, err)
		}
		return
	}
	f, err := credits.Fill(b.id())
	if err != nil {
		w.fail("fill: %v", err)
		return
	}
	w.spawn(func() {
		defer l.cleanup(f.Abort)
		if err := f.Grant(n); err != nil {
			w.fail("grant against credits: %v", err)
			return
		}
		tokens := n * geometry.PageTokens
		table, err := f.Table(0, tokens)
		if err != nil {
			w.fail("open a pass: %v", err)
			return
		}
		kvtest.Write(w.t, geometry, table, 0, tokens, 1<<40)
		if err := table.Advance(tokens); err != nil {
			w.fail("advance: %v", err)
		}
		table.Close()
		b.sleep(20 * time.Millisecond)
	})
}

var (
	errTimeout     = errors.New("no answer in time")
	errUnreachable = errors.New("nobody answers")
	errBusy        = errors.New("no room")
)
