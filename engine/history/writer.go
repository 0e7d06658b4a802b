package history

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"bulkhead.dev/engine/kv"
	"bulkhead.dev/infra/id"
)

const (
	// buffers is how many blocks' worth of events wait to be cut into blocks. One
	// is being filled and one encoded; the others are for bursts.
	buffers = 4
	// MaxPending is how many blocks wait to be delivered, so that no delivery has
	// more.
	MaxPending = 64
	// every is how long an event waits at most until it is cut into a block.
	every = time.Second
	// shipTimeout bounds one delivery, lastWords all of them at the end.
	shipTimeout = 5 * time.Second
	lastWords   = 5 * time.Second
	// MaxDelivery is how many bytes of blocks go out at once, more than any single
	// block has: an outage must not end in a delivery that takes longer than it may.
	MaxDelivery = 4 << 20
)

// Ship delivers blocks of an epoch, in order, and returns the number of the last
// one that is stored. Delivering a block twice is no harm.
type Ship func(ctx context.Context, blocks [][]byte) (stored uint64, err error)

// Options of a Writer.
type Options struct {
	Epoch id.Epoch
	Now   func() time.Time
	Ship  Ship
	// Log is told when deliveries begin to fail, when they work again, and what
	// was lost.
	Log *slog.Logger
}

// Writer cuts the events of a pool into blocks and delivers them.
type Writer struct {
	o     Options
	every time.Duration
	most  int // bytes of a delivery

	mu       sync.Mutex
	cur      []Event   // under mu; what Note fills, never grown
	full     [][]Event // under mu; the oldest first
	spare    [][]Event // under mu
	gapFirst uint64    // under mu; first event lost after those that wait, 0 for none
	gapLast  uint64    // under mu
	last     time.Time // under mu; of the last event
	wake     chan struct{}

	// Of Run.
	link    Link
	pending [][]byte // cut and not stored
	stored  uint64
	away    bool // the last delivery failed
}

// NewWriter makes a writer for one run of a worker. Give Note to the pool, and
// run Run.
func NewWriter(o Options) *Writer { return newWriter(o, buffers, MaxEvents) }

func newWriter(o Options, n, size int) *Writer {
	w := &Writer{o: o, every: every, most: MaxDelivery, full: make([][]Event, 0, n), wake: make(chan struct{}, 1), last: time.UnixMicro(1).UTC()}
	for range n {
		w.spare = append(w.spare, make([]Event, 0, size))
	}
	w.cur = w.takeSpare()
	return w
}

func (w *Writer) takeSpare() []Event {
	n := len(w.spare) - 1
	out := w.spare[n]
	w.spare = w.spare[:n]
	return out
}

// Note takes in an event. It never waits for a delivery, copies nothing but the
// event, and allocates nothing: a pool calls it under its lock. A clock that is set
// back stands still here, so that times do not go back.
func (w *Writer) Note(e kv.Event) {
	at := w.o.Now().Truncate(time.Microsecond).UTC()
	w.mu.Lock()
	defer w.mu.Unlock()
	if at.Before(w.last) {
		at = w.last
	}
	w.last = at
	if w.gapFirst != 0 {
		w.gapLast = e.Seq
		return
	}
	if len(w.cur) == cap(w.cur) {
		if len(w.spare) == 0 {
			w.gapFirst, w.gapLast = e.Seq, e.Seq
			return
		}
		w.full = append(w.full, w.cur)
		w.cur = w.takeSpare()
	}
	w.cur = append(w.cur, Event{e, at})
	if len(w.cur) == cap(w.cur) {
		select {
		case w.wake <- struct{}{}:
		default:
		}
	}
}

// Waiting returns the events that were noted and are not in a block yet, those
// that were lost included.
func (w *Writer) Waiting() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := len(w.cur)
	for _, b := range w.full {
		n += len(b)
	}
	if w.gapFirst != 0 {
		n += int(w.gapLast - w.gapFirst + 1)
	}
	return n
}

// Run cuts and delivers until ctx ends, and then delivers what is left, for at
// most five seconds. An error that is an ErrBlock says that the other side has
// another history of this epoch, which no retry can heal, and comes at once.
func (w *Writer) Run(ctx context.Context) error {
	tick := time.NewTicker(w.every)
	defer tick.Stop()
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
			continue
		case <-tick.C:
		case <-w.wake:
		}
		if err := w.flush(ctx); errors.Is(err, ErrBlock) {
			return err
		}
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastWords)
	defer cancel()
	for w.Waiting() > 0 || len(w.pending) > 0 {
		err := w.flush(last)
		if errors.Is(err, ErrBlock) || last.Err() != nil {
			return err
		}
		if err != nil && !sleep(last, 50*time.Millisecond) {
			return err
		}
	}
	return nil
}

func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// flush cuts what waits and delivers what is cut.
func (w *Writer) flush(ctx context.Context) error {
	for {
		for len(w.pending) < MaxPending && w.cutOne(ctx) {
		}
		if len(w.pending) == 0 {
			return nil
		}
		if err := w.deliver(ctx); err != nil {
			return err
		}
	}
}

func (w *Writer) deliver(ctx context.Context) error {
	n, size := 1, len(w.pending[0])
	for n < len(w.pending) && size+len(w.pending[n]) <= w.most {
		size += len(w.pending[n])
		n++
	}
	call, cancel := context.WithTimeout(ctx, shipTimeout)
	stored, err := w.o.Ship(call, w.pending[:n])
	cancel()
	if err == nil && (stored <= w.stored || stored > w.stored+uint64(n)) {
		err = ErrBlock
	}
	if away := err != nil; away != w.away && ctx.Err() == nil {
		w.away = away
		if away {
			w.o.Log.WarnContext(ctx, "page history cannot be delivered", "waiting", len(w.pending), "error", err)
		} else {
			w.o.Log.InfoContext(ctx, "page history is delivered again")
		}
	}
	if err != nil {
		return err
	}
	w.pending = append(w.pending[:0], w.pending[stored-w.stored:]...)
	w.stored = stored
	return nil
}

// take returns the oldest events that wait, or the range of those that were lost
// after the last of them. Give the events back with giveBack before the next call.
func (w *Writer) take() (events []Event, first, last uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case len(w.full) > 0:
		events = w.full[0]
		w.full = append(w.full[:0], w.full[1:]...)
	case len(w.cur) > 0:
		events, w.cur = w.cur, w.takeSpare()
	default:
		first, last = w.gapFirst, w.gapLast
		w.gapFirst = 0
	}
	return events, first, last
}

func (w *Writer) giveBack(events []Event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.spare = append(w.spare, events[:0])
}

// cutOne makes the next block of what waits.
func (w *Writer) cutOne(ctx context.Context) bool {
	events, first, last := w.take()
	var block []byte
	switch {
	case events != nil:
		last = events[len(events)-1].Seq
		block = encode(w.o.Epoch, w.link.Number+1, w.link.Hash, events)
		w.giveBack(events)
	case first != 0:
		w.o.Log.ErrorContext(ctx, "page history has a gap", "first", first, "last", last)
		block = encodeGap(w.o.Epoch, w.link.Number+1, w.link.Hash, first, last)
	default:
		return false
	}
	w.link = Link{w.link.Number + 1, last, Hash(block)}
	w.pending = append(w.pending, block)
	return true
}
