package settle

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"bulkhead.dev/audit/receipt"
	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/infra/pgdb"
)

// Options of a Settler. Zero values are replaced by the defaults.
type Options struct {
	DB      pgdb.DB  // a pool of the role bulkhead_settle
	Replica id.Epoch // epoch of this process, minted at its start
	Log     *slog.Logger
	Now     func() time.Time

	Linger       time.Duration // how long facts wait for company; 2 ms
	IntendWithin time.Duration // how long intents wait for company; 5 ms
	MaxBatch     int           // requests in one transaction; 256
	HoldFor      time.Duration // how long Settle waits for the commit; 10 s
	MaxQueue     int           // facts in memory before Ready refuses; 8,192
}

const (
	defaultLinger       = 2 * time.Millisecond
	defaultIntendWithin = 5 * time.Millisecond
	defaultMaxBatch     = 256
	defaultHoldFor      = 10 * time.Second
	defaultMaxQueue     = 8192 // of about 4 kB each

	// maxIntents bounds the intents of one transaction.
	maxIntents = 1024
	// attemptFor bounds one attempt to write, and so the time for which facts
	// are in flight.
	attemptFor = 3 * time.Second
	// attemptMin is what an attempt gets even if the hold of its first fact is
	// about to end.
	attemptMin = 100 * time.Millisecond
	// The wait after an attempt that failed doubles from the first to the
	// second.
	retryFirst = 20 * time.Millisecond
	retryLast  = 500 * time.Millisecond
)

// Counts are counters since the start, for metrics.
type Counts struct {
	Committed uint64 // requests written
	Intents   uint64 // intents written
	Batches   uint64 // transactions that committed
	Retries   uint64 // attempts that the database did not answer
	Withheld  uint64 // requests whose hold ended before the commit
	Rejected  uint64 // requests whose facts cannot be written
	Conflicts uint64 // requests that had another receipt already
	LateAcks  uint64 // withheld requests whose receipt says otherwise; see the package comment
	Queued    int    // requests that wait now
}

// Settler writes facts and intents. Start it once; Stop it to flush. It is safe
// for concurrent use.
type Settler struct {
	opt    Options
	wake   chan struct{} // capacity 1; the queues have changed
	base   context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup // the writer

	mu       sync.Mutex
	facts    []*item   // under mu; queued, oldest first
	intents  []*Ticket // under mu; queued, oldest first
	flying   []*item   // under mu; in flight
	started  bool      // under mu
	stopping bool      // under mu; nothing new is taken, no lingering
	counts   Counts    // under mu
}

// item is the facts of one request on their way.
type item struct {
	rows     rows
	enqueued time.Time
	deadline time.Time      // end of the hold
	inFlight bool           // under the mutex of the settler
	expired  bool           // under the mutex of the settler; the hold ended in flight
	withheld bool           // under the mutex of the settler; the waiter was told, rows are re-encoded
	original receipt.Digest // before re-encoding
	done     chan struct{}  // closed when err is set for the waiter
	err      error
}

// Ticket is an intent on its way.
type Ticket struct {
	intent   Intent
	enqueued time.Time
	done     chan struct{}
	err      error // set before done is closed
}

// Done is closed when the intent is durable or cannot become it.
func (t *Ticket) Done() <-chan struct{} { return t.done }

// Wait returns when the intent is durable. Settle of the same request implies it.
func (t *Ticket) Wait(ctx context.Context) error {
	select {
	case <-t.done:
		return t.err
	case <-ctx.Done():
		return apperr.From(ctx.Err())
	}
}

// New makes a settler. It does nothing before Start.
func New(o Options) *Settler {
	setDefault(&o.Linger, defaultLinger)
	setDefault(&o.IntendWithin, defaultIntendWithin)
	setDefault(&o.MaxBatch, defaultMaxBatch)
	setDefault(&o.HoldFor, defaultHoldFor)
	setDefault(&o.MaxQueue, defaultMaxQueue)
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	base, cancel := context.WithCancel(context.Background())
	return &Settler{opt: o, wake: make(chan struct{}, 1), base: base, cancel: cancel}
}

func setDefault[T comparable](v *T, d T) {
	if *v == *new(T) {
		*v = d
	}
}

// Start starts the writer.
func (s *Settler) Start() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.started {
		return
	}
	s.started = true
	s.wg.Go(s.run)
}

// Stop takes nothing new, writes what is queued and returns when that is done
// or ctx ends. The error says how many requests and intents were left. Stopping
// twice is safe.
func (s *Settler) Stop(ctx context.Context) error {
	s.mu.Lock()
	s.stopping = true
	started := s.started
	s.mu.Unlock()
	s.poke()
	if started {
		drained := make(chan struct{})
		go func() { s.wg.Wait(); close(drained) }()
		select {
		case <-drained:
		case <-ctx.Done():
			s.cancel()
			<-drained
		}
	}
	s.cancel()
	s.mu.Lock()
	defer s.mu.Unlock()
	left, intents := len(s.facts), len(s.intents)
	for _, it := range s.facts {
		if !it.withheld {
			it.finish(Unavailable(errStopped))
		}
	}
	for _, t := range s.intents {
		t.finish(Unavailable(errStopped))
	}
	s.facts, s.intents = nil, nil
	if left+intents > 0 {
		return fmt.Errorf("settlement stopped with %d requests and %d intents unwritten", left, intents)
	}
	return nil
}

var errStopped = errors.New("settlement has stopped")

// Ready returns nil while new requests may be admitted, and otherwise an
// *apperr.Error of kind Unavailable with the code evidence_unavailable.
func (s *Settler) Ready() error {
	now := s.opt.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	oldest := now
	for _, queue := range [][]*item{s.flying, s.facts} {
		for _, it := range queue {
			if it.enqueued.Before(oldest) {
				oldest = it.enqueued
			}
		}
	}
	if len(s.intents) > 0 && s.intents[0].enqueued.Before(oldest) {
		oldest = s.intents[0].enqueued
	}
	switch {
	case s.stopping:
		return Unavailable(errStopped)
	case len(s.facts)+len(s.flying) >= s.opt.MaxQueue, len(s.intents) >= s.opt.MaxQueue:
		return Unavailable(errors.New("the settlement queue is full"))
	case now.Sub(oldest) > s.opt.HoldFor:
		return Unavailable(errors.New("settlement is behind"))
	}
	return nil
}

// Counts returns the counters.
func (s *Settler) Counts() Counts {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.counts
	c.Queued = len(s.facts) + len(s.flying)
	return c
}

// Intend queues the intent of a request that has just been admitted. It does
// not block.
func (s *Settler) Intend(in Intent) *Ticket {
	t := &Ticket{intent: in, enqueued: s.opt.Now(), done: make(chan struct{})}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopping {
		t.finish(Unavailable(errStopped))
		return t
	}
	s.intents = append(s.intents, t)
	s.poke()
	return t
}

// Settle queues facts and returns when they are durable. Errors are
// *apperr.Error: Unavailable with the code evidence_unavailable when they could not be
// written within the hold (they are kept, and written later with the mark
// withheld), Internal with evidence_rejected when they cannot be written at all and
// evidence_conflict when another receipt of the request exists. After any
// error the end of the answer must not leave. Settling the same facts again
// succeeds.
//
// If ctx ends, the call gives up waiting; the facts stay queued as they are.
func (s *Settler) Settle(ctx context.Context, f Facts) error {
	r, err := encode(f)
	if err != nil {
		s.mu.Lock()
		s.counts.Rejected++
		s.mu.Unlock()
		s.opt.Log.ErrorContext(ctx, "facts rejected", "request", f.Receipt.Request.String(), "error", err.Error())
		return errRejected(err)
	}
	now := s.opt.Now()
	it := &item{rows: r, enqueued: now, deadline: now.Add(s.opt.HoldFor), original: r.digest, done: make(chan struct{})}
	s.mu.Lock()
	if s.stopping {
		s.mu.Unlock()
		return Unavailable(errStopped)
	}
	s.facts = append(s.facts, it)
	s.mu.Unlock()
	s.poke()

	hold := time.NewTimer(s.opt.HoldFor)
	defer hold.Stop()
	for {
		select {
		case <-it.done:
			return it.err
		case <-ctx.Done():
			return apperr.From(ctx.Err())
		case <-hold.C:
			s.mu.Lock()
			// In flight: the writer decides when the attempt has ended.
			if it.expired = it.inFlight; !it.inFlight {
				s.withhold(it)
			}
			s.mu.Unlock()
		}
	}
}

// withhold needs the lock and an item that is queued. It tells the waiter and
// changes what will be written.
func (s *Settler) withhold(it *item) {
	select {
	case <-it.done:
		return
	default:
	}
	f := it.rows.facts
	f.Receipt = f.Receipt.Withhold()
	r, err := encode(f)
	if err != nil { // what was valid stays valid; keep the old bytes rather than none
		s.opt.Log.Error("facts cannot be marked as withheld", "request", f.Receipt.Request.String(), "error", err.Error())
	} else {
		it.rows = r
	}
	it.withheld = true
	s.counts.Withheld++
	it.finish(Unavailable(errors.New("the hold ended before the commit")))
}

func (it *item) finish(err error) {
	select {
	case <-it.done: // the waiter was told when the facts were withheld
	default:
		it.err = err
		close(it.done)
	}
}

func (t *Ticket) finish(err error) {
	t.err = err
	close(t.done)
}

func (s *Settler) poke() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// Unavailable is the error of an answer that is withheld because its receipt was not
// durable in time.
func Unavailable(cause error) *apperr.Error {
	return apperr.Wrap(cause, apperr.Unavailable, "evidence_unavailable",
		"The receipt of the request could not be made durable, so the answer is withheld.").WithNoRetry()
}

func errRejected(cause error) *apperr.Error {
	return apperr.Wrap(cause, apperr.Internal, "evidence_rejected",
		"The receipt of the request could not be written, so the answer is withheld.").WithNoRetry()
}

func errConflict() *apperr.Error {
	return apperr.New(apperr.Internal, "evidence_conflict",
		"The request has another receipt already, so the answer is withheld.").WithNoRetry()
}
