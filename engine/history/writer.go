package history

import (
	"context"
	"errors"
	"sync"
	"time"

	"bulkhead.dev/engine/kv"
	"bulkhead.dev/infra/id"
)

const (
	// bufferEvents is how many events wait to be cut into blocks.
	bufferEvents = 1 << 16
	// maxPending is how many blocks wait to be delivered.
	maxPending = 64
	// every is how long an event waits at most until it is cut into a block.
	every = time.Second
	// lastWords bounds the delivery at the end.
	lastWords = 5 * time.Second
)

// Ship delivers blocks of an epoch, in order, and returns the number of the last
// one that is stored. Delivering a block twice is no harm.
type Ship func(ctx context.Context, blocks [][]byte) (stored uint64, err error)

// Writer cuts the events of a pool into blocks and delivers them.
type Writer struct {
	epoch id.Epoch
	now   func() time.Time
	ship  Ship
	every time.Duration
	limit int // events that wait

	mu       sync.Mutex
	events   []Event // under mu; consecutive
	gapFirst uint64  // under mu; first lost event after events, 0 for none
	gapLast  uint64  // under mu
	cut      chan struct{}

	// Of Run.
	link    Link
	pending [][]byte // cut and not stored
	stored  uint64
}

// NewWriter makes a writer for one run of a worker. Give Note to the pool, and
// run Run.
func NewWriter(epoch id.Epoch, now func() time.Time, ship Ship) *Writer {
	return &Writer{epoch: epoch, now: now, ship: ship, every: every, limit: bufferEvents, cut: make(chan struct{}, 1)}
}

// Note takes in an event. It never waits.
func (w *Writer) Note(e kv.Event) {
	at := w.now().Truncate(time.Microsecond)
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case w.gapFirst != 0:
		w.gapLast = e.Seq
		return
	case len(w.events) >= w.limit:
		w.gapFirst, w.gapLast = e.Seq, e.Seq
		return
	}
	w.events = append(w.events, Event{e, at})
	if len(w.events) >= MaxEvents {
		select {
		case w.cut <- struct{}{}:
		default:
		}
	}
}

// Waiting returns the events that were noted and are not in a block yet, those
// that were lost included.
func (w *Writer) Waiting() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := len(w.events)
	if w.gapFirst != 0 {
		n += int(w.gapLast - w.gapFirst + 1)
	}
	return n
}

// Run cuts and delivers until ctx ends, and then delivers what is left, for at
// most five seconds. An error says that the other side has another history of
// this epoch, which no retry can heal.
func (w *Writer) Run(ctx context.Context) error {
	tick := time.NewTicker(w.every)
	defer tick.Stop()
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-tick.C:
		case <-w.cut:
		}
		if ctx.Err() != nil {
			break
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
	for len(w.pending) < maxPending && w.cutOne() {
	}
	if len(w.pending) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, lastWords)
	defer cancel()
	stored, err := w.ship(ctx, w.pending)
	if err != nil {
		return err
	}
	if stored > w.link.Number || stored < w.stored {
		return ErrBlock
	}
	w.pending = append(w.pending[:0], w.pending[stored-w.stored:]...)
	w.stored = stored
	return nil
}

// cutOne makes the next block of what waits.
func (w *Writer) cutOne() bool {
	w.mu.Lock()
	n := min(len(w.events), MaxEvents)
	events := append([]Event(nil), w.events[:n]...)
	w.events = append(w.events[:0], w.events[n:]...)
	first, last := w.gapFirst, w.gapLast
	if n == 0 {
		w.gapFirst = 0
	}
	w.mu.Unlock()
	var block []byte
	switch {
	case n > 0:
		block = encode(w.epoch, w.link.Number+1, w.link.Hash, events)
	case first != 0:
		block = encodeGap(w.epoch, w.link.Number+1, w.link.Hash, first, last)
	default:
		return false
	}
	if n > 0 {
		last = events[n-1].Seq
	}
	w.link = Link{w.link.Number + 1, last, Hash(block)}
	w.pending = append(w.pending, block)
	return true
}
