package sched

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"bulkhead.dev/engine/kv"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
	"pgregory.net/rapid"
)

// door enters a gate in the background and notes the order.
type door struct {
	t     *testing.T
	gate  *Gate
	mu    sync.Mutex
	order []string
	slots map[string]*Slot
	errs  map[string]error
}

func newDoor(t *testing.T, g *Gate) *door {
	return &door{t: t, gate: g, slots: map[string]*Slot{}, errs: map[string]error{}}
}

// enter must be called in a synctest bubble; it returns when the work has
// entered, was refused, or waits.
func (d *door) enter(ctx context.Context, name string, o id.Owner, pages int) {
	go func() {
		s, err := d.gate.Enter(ctx, o, pages)
		d.mu.Lock()
		defer d.mu.Unlock()
		d.slots[name], d.errs[name] = s, err
		if err == nil {
			d.order = append(d.order, name)
		}
	}()
	synctest.Wait()
}

func (d *door) leave(names ...string) {
	for _, n := range names {
		d.mu.Lock()
		s := d.slots[n]
		d.mu.Unlock()
		if s == nil {
			d.t.Fatalf("%s has not entered", n)
		}
		s.Leave()
		s.Leave()
		synctest.Wait()
	}
}

func (d *door) entered(names ...string) {
	d.t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	assert.Equal(d.t, d.order, names)
	d.order = nil
}

func TestGateLimits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		g := NewGate(newPool(t, 10), GateOptions{Slots: 1, Queue: 2, PerOwner: 2, Now: time.Now})
		d := newDoor(t, g)

		_, err := g.Enter(ctx, owner(1), 11)
		assert.Equal(t, *assert.ErrorAs[*TooLargeError](t, err), TooLargeError{Want: 11, Have: 10})
		_, err = g.Enter(ctx, id.Owner{}, 1)
		assert.ErrorIs(t, err, kv.ErrOwner)

		d.enter(ctx, "a1", owner(1), 1)
		d.enter(ctx, "a2", owner(1), 1) // waits
		d.entered("a1")
		_, err = g.Enter(ctx, owner(1), 1)
		assert.ErrorIs(t, err, ErrOwnerLimit)
		d.enter(ctx, "b1", owner(2), 1) // waits
		_, err = g.Enter(ctx, owner(3), 1)
		assert.ErrorIs(t, err, ErrQueueFull)
		waiting, entered := g.Counts()
		assert.Equal(t, []int{waiting, entered}, []int{2, 1})

		time.Sleep(time.Second)
		d.leave("a1")
		d.entered("a2")
		assert.Equal(t, d.slots["a2"].Waited(), time.Second)
		d.leave("a2")
		d.leave("b1")
		assert.Equal(t, len(g.owners), 0)
	})
}

func TestGateTurns(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		g := NewGate(newPool(t, 10), GateOptions{Slots: 1, Queue: 100, PerOwner: 100, Now: time.Now})
		d := newDoor(t, g)
		d.enter(ctx, "first", owner(9), 1)
		// One owner floods the queue; two others come later with one each.
		for i := range 5 {
			d.enter(ctx, fmt.Sprint("a", i), owner(1), 1)
		}
		d.enter(ctx, "b0", owner(2), 1)
		d.enter(ctx, "c0", owner(3), 1)
		d.enter(ctx, "b1", owner(2), 1)
		want := []string{"first", "a0", "b0", "c0", "a1", "b1", "a2", "a3", "a4"}
		for _, n := range want {
			d.leave(n)
		}
		d.entered(want...)
	})
}

// Small work may pass a large request that lacks credits, but only so often.
func TestGateLargeRequestDoesNotStarve(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		g := NewGate(newPool(t, 10), GateOptions{Slots: 100, Queue: 100, PerOwner: 100, Now: time.Now})
		d := newDoor(t, g)
		d.enter(ctx, "running", owner(9), 5)
		d.enter(ctx, "large", owner(1), 10)
		for i := range maxPassed {
			d.enter(ctx, fmt.Sprint("small", i), owner(2), 1)
			d.leave(fmt.Sprint("small", i))
		}
		d.enter(ctx, "late", owner(2), 1)
		d.enter(ctx, "later", owner(3), 1)
		assert.Equal(t, len(d.order), 1+maxPassed) // neither of the last two
		d.order = nil
		d.leave("running")
		d.entered("large")
		d.leave("large")
		d.leave("late", "later")
	})
}

func TestGateCancel(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g := NewGate(newPool(t, 10), GateOptions{Slots: 100, Queue: 100, PerOwner: 100, Now: time.Now})
		d := newDoor(t, g)
		ctx, cancel := context.WithCancel(t.Context())
		d.enter(t.Context(), "running", owner(9), 5)
		d.enter(ctx, "large", owner(1), 8)
		g.ring[0].queue[0].passed = maxPassed
		d.enter(t.Context(), "small", owner(2), 1)
		d.entered("running")
		cancel() // what waited behind it starts
		synctest.Wait()
		d.entered("small")
		assert.ErrorIs(t, d.errs["large"], context.Canceled)
		_, err := g.Enter(ctx, owner(1), 1)
		assert.ErrorIs(t, err, context.Canceled)
		d.leave("running", "small")
	})
}

func TestGateClose(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g := NewGate(newPool(t, 10), GateOptions{Slots: 1, Queue: 100, PerOwner: 100, Now: time.Now})
		d := newDoor(t, g)
		d.enter(t.Context(), "running", owner(9), 5)
		d.enter(t.Context(), "waiting", owner(1), 1)
		idle := g.Close()
		synctest.Wait()
		assert.ErrorIs(t, d.errs["waiting"], ErrDraining)
		_, err := g.Enter(t.Context(), owner(1), 1)
		assert.ErrorIs(t, err, ErrDraining)
		select {
		case <-idle:
			t.Fatal("idle, although one is running")
		default:
		}
		d.leave("running")
		<-idle
		<-g.Close()
	})
}

// Random schedules: limits hold at every moment, nobody is lost, and all
// credits come back (newPool checks that).
func TestGateSchedules(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		pool, err := kv.New(kv.Config{Geometry: geometry, Pages: 12})
		if err != nil {
			rt.Fatal(err)
		}
		opts := GateOptions{
			Slots:    rapid.IntRange(1, 4).Draw(rt, "slots"),
			Queue:    rapid.IntRange(0, 4).Draw(rt, "queue"),
			PerOwner: rapid.IntRange(1, 5).Draw(rt, "per owner"),
			Now:      clock,
		}
		g := NewGate(pool, opts)
		type entry struct {
			w *waiter
			o id.Owner
		}
		var held, waiting []entry
		settle := func() {
			still := waiting[:0]
			for _, e := range waiting {
				select {
				case <-e.w.ready:
					held = append(held, e)
				default:
					still = append(still, e)
				}
			}
			waiting = still
		}
		for range rapid.IntRange(1, 60).Draw(rt, "steps") {
			switch op := rapid.IntRange(0, 3).Draw(rt, "op"); {
			case op <= 1:
				o := owner(byte(rapid.IntRange(1, 3).Draw(rt, "owner")))
				w, err := g.enqueue(o, rapid.IntRange(1, 12).Draw(rt, "pages"))
				if err == nil {
					waiting = append(waiting, entry{w, o})
				} else if !errors.Is(err, ErrQueueFull) && !errors.Is(err, ErrOwnerLimit) {
					rt.Fatal(err)
				}
			case op == 2 && len(held) > 0:
				i := rapid.IntRange(0, len(held)-1).Draw(rt, "who")
				held[i].w.slot.Leave()
				held = append(held[:i], held[i+1:]...)
			case op == 3 && len(waiting) > 0:
				i := rapid.IntRange(0, len(waiting)-1).Draw(rt, "who")
				g.mu.Lock()
				g.remove(waiting[i].o, waiting[i].w)
				g.admit()
				g.mu.Unlock()
				waiting = append(waiting[:i], waiting[i+1:]...)
			}
			settle()
			perOwner, pages := map[id.Owner]int{}, 0
			for _, e := range held {
				perOwner[e.o]++
				pages += e.w.slot.Credits().Pages()
			}
			for _, e := range waiting {
				perOwner[e.o]++
			}
			q, in := g.Counts()
			if q != len(waiting) || in != len(held) || in > opts.Slots || q > opts.Queue || pages != pool.Stats().Credits {
				rt.Fatalf("%d waiting (%d), %d entered (%d), %d pages (%d)", q, len(waiting), in, len(held), pages, pool.Stats().Credits)
			}
			for o, n := range perOwner {
				if n > opts.PerOwner {
					rt.Fatalf("owner %v has %d", o, n)
				}
			}
			if in == 0 && q > 0 {
				rt.Fatal("nothing runs and something waits")
			}
		}
		// Once all leave, everything that waited gets its turn.
		for len(held) > 0 {
			held[0].w.slot.Leave()
			held = held[1:]
			settle()
		}
		if len(waiting) != 0 || len(g.owners) != 0 || len(g.ring) != 0 {
			rt.Fatalf("%d are left", len(waiting))
		}
		if err := pool.Close(); err != nil {
			rt.Fatal(err)
		}
	})
}

// stuckPool is a pool in which too much is in quarantine, or not.
type stuckPool struct {
	Reserver
	mu    sync.Mutex
	stuck bool
}

func (p *stuckPool) set(stuck bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stuck = stuck
}

func (p *stuckPool) Reserve(o id.Owner, n int) (*kv.Credits, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stuck {
		return nil, kv.ErrQuarantine{Pages: 9, Max: 8}
	}
	return p.Reserver.Reserve(o, n)
}

// Work that only the quarantine keeps from starting waits for its end, but not
// for ever. Work that waits for other work does.
func TestGateQuarantine(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		pool := &stuckPool{Reserver: newPool(t, 10), stuck: true}
		g := NewGate(pool, GateOptions{Slots: 2, Queue: 5, PerOwner: 5, QuarantineWait: time.Second, Now: time.Now})
		began := time.Now()
		_, err := g.Enter(t.Context(), owner(1), 2)
		assert.Equal(t, assert.ErrorAs[kv.ErrQuarantine](t, err), kv.ErrQuarantine{Pages: 9, Max: 8})
		assert.Equal(t, time.Since(began), time.Second)
		waiting, _ := g.Counts()
		assert.Equal(t, waiting, 0)

		time.AfterFunc(500*time.Millisecond, func() { pool.set(false); g.Recheck() })
		slot, err := g.Enter(t.Context(), owner(1), 10)
		assert.NoError(t, err)
		assert.Equal(t, slot.Waited(), 500*time.Millisecond)
		time.AfterFunc(time.Minute, slot.Leave)
		next, err := g.Enter(t.Context(), owner(2), 10)
		assert.NoError(t, err)
		assert.Equal(t, next.Waited(), time.Minute)
		next.Leave()
	})
}
