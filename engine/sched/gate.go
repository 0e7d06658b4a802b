package sched

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"bulkhead.dev/engine/kv"
	"bulkhead.dev/infra/id"
)

// maxPassed is how often waiting work that lacks credits may be passed by work
// of other owners. Small enough that the wait of a large request is bounded by
// a few short ones, large enough that one large request does not empty the
// batch while it waits.
const maxPassed = 8

// Reserver is the part of *kv.Pool that a gate needs.
type Reserver interface {
	Reserve(owner id.Owner, pages int) (*kv.Credits, error)
	Stats() kv.Stats
}

// GateOptions are the limits of a gate. All are at least 1, except Queue.
type GateOptions struct {
	// Slots is how many may have entered at once.
	Slots int
	// Queue is how many may wait. 0 refuses what cannot start at once.
	Queue int
	// PerOwner is how many one owner may have entered and waiting together. It
	// should be well below Queue, or one owner can fill the queue.
	PerOwner int
	// QuarantineWait is how long work waits for pages to come out of quarantine
	// once more are in it than may be; 0 is DefaultQuarantineWait.
	QuarantineWait time.Duration
	// Now is the clock for the waiting time.
	Now func() time.Time
}

// DefaultQuarantineWait is above what a reader that lives needs to end, and
// below what makes a client wait for nothing.
const DefaultQuarantineWait = time.Second

// Gate admits work to a worker. It is safe for concurrent use.
type Gate struct {
	pool Reserver
	opts GateOptions

	mu      sync.Mutex
	closed  bool
	entered int
	waiting int
	owners  map[id.Owner]*ownerQueue // owners with anything entered or waiting
	ring    []*ownerQueue            // owners that wait; the next in turn is first
	idle    chan struct{}            // closed when a closed gate has nothing entered
}

// ownerQueue is under the mutex of its gate.
type ownerQueue struct {
	owner   id.Owner
	entered int
	queue   []*waiter
}

// waiter is under the mutex of its gate until ready is closed.
type waiter struct {
	pages  int
	since  time.Time
	passed int
	slot   *Slot
	err    error
	ready  chan struct{}
}

// NewGate makes a gate in front of the pool.
func NewGate(pool Reserver, opts GateOptions) *Gate {
	if opts.QuarantineWait == 0 {
		opts.QuarantineWait = DefaultQuarantineWait
	}
	return &Gate{pool: pool, opts: opts, owners: map[id.Owner]*ownerQueue{}, idle: make(chan struct{})}
}

// Slot is the right to work, with the credits that were reserved for it.
type Slot struct {
	gate    *Gate
	q       *ownerQueue
	credits *kv.Credits
	waited  time.Duration
	left    bool // under the mutex of the gate
}

// Credits returns the credits. Whoever takes them must have released what came
// of them before Leave.
func (s *Slot) Credits() *kv.Credits { return s.credits }

// Waited returns how long the work was in the queue.
func (s *Slot) Waited() time.Duration { return s.waited }

// Leave gives the slot back, with the credits if nobody took them, and lets
// waiting work in. It is idempotent.
func (s *Slot) Leave() {
	g := s.gate
	g.mu.Lock()
	defer g.mu.Unlock()
	if s.left {
		return
	}
	s.left = true
	s.credits.Return()
	g.entered--
	s.q.entered--
	g.forget(s.q)
	g.admit()
	if g.closed && g.entered == 0 {
		close(g.idle)
	}
}

// Enter waits for a slot and credits for the given pages. It fails at once with
// ErrQueueFull, ErrOwnerLimit, ErrDraining or *TooLargeError, later with
// ErrDraining or a kv.ErrQuarantine, and with the error of ctx when that ends.
// The caller must Leave the slot.
func (g *Gate) Enter(ctx context.Context, owner id.Owner, pages int) (*Slot, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	w, err := g.enqueue(owner, pages)
	if err != nil {
		return nil, err
	}
	patience := time.NewTimer(g.opts.QuarantineWait)
	defer patience.Stop()
	for waiting := true; waiting; {
		select {
		case <-w.ready:
			return w.slot, w.err
		case <-ctx.Done():
			waiting = false
		case <-patience.C:
			if err := g.stuck(owner, w); err != nil {
				return nil, err
			}
			patience.Reset(g.opts.QuarantineWait)
		}
	}
	g.mu.Lock()
	slot := w.slot
	if slot == nil && w.err == nil {
		g.remove(owner, w)
		g.admit() // it may have been what the others waited behind
	}
	g.mu.Unlock()
	if slot != nil { // it was let in at the last moment
		slot.Leave()
	}
	return nil, ctx.Err()
}

// stuck ends the wait of a waiter whom the quarantine keeps from starting. Those
// whom work that runs keeps from it go on waiting.
func (g *Gate) stuck(owner id.Owner, w *waiter) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if w.slot != nil || w.err != nil {
		return nil // it just came through
	}
	credits, err := g.pool.Reserve(owner, w.pages)
	if err == nil {
		credits.Return()
	}
	q, stuck := errors.AsType[kv.ErrQuarantine](err)
	if !stuck {
		return nil
	}
	g.remove(owner, w)
	return q
}

// enqueue adds a waiter and lets in what can start.
func (g *Gate) enqueue(owner id.Owner, pages int) (*waiter, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return nil, ErrDraining
	}
	if err := g.fits(pages); err != nil {
		return nil, err
	}
	q := g.owners[owner]
	if q == nil {
		q = &ownerQueue{owner: owner}
		g.owners[owner] = q
	}
	if q.entered+len(q.queue) >= g.opts.PerOwner {
		return nil, ErrOwnerLimit
	}
	w := &waiter{pages: pages, since: g.opts.Now(), ready: make(chan struct{})}
	if len(q.queue) == 0 {
		g.ring = append(g.ring, q)
	}
	q.queue = append(q.queue, w)
	g.waiting++
	g.admit()
	if w.slot == nil && w.err == nil && g.waiting > g.opts.Queue {
		g.remove(owner, w)
		return nil, ErrQueueFull
	}
	return w, nil
}

// admit lets in what can start, in turn. The mutex is held.
func (g *Gate) admit() {
	for !g.closed && g.entered < g.opts.Slots {
		if !g.admitOne() {
			return
		}
	}
}

// admitOne looks at the first waiter of each owner, in turn, and lets in or
// refuses the first that it can. It reports whether there was one.
func (g *Gate) admitOne() bool {
	for i, q := range g.ring {
		w := q.queue[0]
		credits, err := g.pool.Reserve(q.owner, w.pages)
		if short(err) {
			if w.passed >= maxPassed {
				return false // its turn: nobody else starts before it
			}
			continue
		}
		if err != nil {
			g.refuse(i, err)
			return true
		}
		for _, passed := range g.ring[:i] {
			passed.queue[0].passed++
		}
		g.pop(i)
		g.entered++
		q.entered++
		w.slot = &Slot{gate: g, q: q, credits: credits, waited: g.opts.Now().Sub(w.since)}
		close(w.ready)
		return true
	}
	return false
}

// short reports whether what is missing can come back.
func short(err error) bool {
	if _, ok := errors.AsType[kv.ErrExhausted](err); ok {
		return true
	}
	_, ok := errors.AsType[kv.ErrQuarantine](err)
	return ok
}

// fits checks that the pool could hold the pages if nothing else were in it.
// Quarantined pages count: they come back when their last reader or writer ends.
func (g *Gate) fits(pages int) error {
	if have := g.pool.Stats().Pages; pages > have {
		return &TooLargeError{Want: pages, Have: have}
	}
	return nil
}

// refuse ends the wait of the first waiter of the i-th owner. The mutex is held.
func (g *Gate) refuse(i int, err error) {
	q := g.ring[i]
	w := q.queue[0]
	g.pop(i)
	w.err = err
	close(w.ready)
	g.forget(q)
}

// pop takes the first waiter of the i-th owner out of the queue and puts the
// owner at the end of the ring. The mutex is held.
func (g *Gate) pop(i int) {
	q := g.ring[i]
	q.queue = slices.Delete(q.queue, 0, 1)
	g.waiting--
	if i == 0 {
		g.ring = append(g.ring[1:], q)
	} else {
		// Those before i keep their turn: they were passed for lack of credits.
		g.ring = append(slices.Delete(g.ring, i, i+1), q)
	}
	if len(q.queue) == 0 {
		g.ring = g.ring[:len(g.ring)-1]
	}
}

// remove takes a waiter out of the queue. The mutex is held.
func (g *Gate) remove(owner id.Owner, w *waiter) {
	q := g.owners[owner]
	at := slices.Index(q.queue, w)
	q.queue = slices.Delete(q.queue, at, at+1)
	g.waiting--
	if len(q.queue) == 0 {
		g.ring = slices.DeleteFunc(g.ring, func(x *ownerQueue) bool { return x == q })
	}
	g.forget(q)
}

// forget drops an owner that has nothing any more. The mutex is held.
func (g *Gate) forget(q *ownerQueue) {
	if q.entered == 0 && len(q.queue) == 0 {
		delete(g.owners, q.owner)
	}
}

// Recheck lets in what can start now. It is for pages that became free without
// a Leave, for example when a quarantine ends.
func (g *Gate) Recheck() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.admit()
}

// Counts returns how many wait and how many have entered.
func (g *Gate) Counts() (waiting, entered int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.waiting, g.entered
}

// Close refuses everything that waits and everything that comes. It returns a
// channel that closes when the last slot was left. It is idempotent.
func (g *Gate) Close() <-chan struct{} {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return g.idle
	}
	g.closed = true
	for _, q := range g.ring {
		for _, w := range q.queue {
			w.err = ErrDraining
			close(w.ready)
		}
		q.queue = nil
		g.forget(q)
	}
	g.ring, g.waiting = nil, 0
	if g.entered == 0 {
		close(g.idle)
	}
	return g.idle
}
