package quota

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/infra/pgdb"
)

// Options of a Book. DB, Replica, Fenced and Now are required.
type Options struct {
	DB      DB       // a pool of the role bulkhead_settle
	Replica id.Epoch // that has joined the replicas
	// Fenced reports whether the lease of the replica may be over.
	Fenced func() bool
	Log    *slog.Logger
	Now    func() time.Time // with a monotonic reading
}

// DB is what a book needs of the database.
type DB interface {
	pgdb.DB
	pgdb.Listener
}

// Counts are counters since the start, for metrics.
type Counts struct {
	Local       uint64 // reservations out of slices, without asking
	Asked       uint64 // reservations that waited for an exchange
	Refused     uint64
	Unavailable uint64
	Exchanges   uint64
	Warnings    uint64 // soft limits that were passed
	Slices      int    // held now
}

// Book holds the slices of one replica. It is safe for concurrent use. Run must
// be running for anything to be reserved.
type Book struct {
	opt   Options
	rules *rules
	wake  chan struct{} // capacity 1; somebody waits, or wants more
	hears chan struct{} // closed when changes are heard for the first time
	// number of the last exchange. It belongs to Run.
	number int64

	mu      sync.Mutex
	slices  map[id.Limit]*slice // under mu; of the current windows
	urgent  map[id.Limit]bool   // under mu; of them, those that want more or are wanted back
	waiters []*waiter           // under mu; oldest first
	stopped bool                // under mu
	counts  Counts              // under mu
}

// waiter is a reservation that the slices did not suffice for.
type waiter struct {
	needs  []need
	notYet time.Time // when to try again after a recall
	giveUp time.Time // when a recall was in vain; zero before there was one
	done   chan struct{}
	parts  []part
	err    error
}

// need is what a reservation takes of one limit.
type need struct {
	limit  *Limit
	amount int64
}

const (
	// tick is how often what is due without haste is exchanged.
	tick = time.Second
	// recallFor is how long a reservation waits for other replicas to give back
	// what they do not use, and recallAgain how often it looks unless it hears of it.
	recallFor   = 150 * time.Millisecond
	recallAgain = 50 * time.Millisecond
	// vainFor is how long after that was in vain nobody waits.
	vainFor = 100 * time.Millisecond
	// askFor bounds one question to the database.
	askFor = time.Second
	// maxWishes bounds one exchange.
	maxWishes = 512
	// retryAfter is the hint when a limit cannot be checked.
	retryAfter = time.Second
)

// New makes a book.
func New(o Options) *Book {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return &Book{opt: o, rules: newRules(o.DB, o.Now), wake: make(chan struct{}, 1), hears: make(chan struct{}), slices: map[id.Limit]*slice{}, urgent: map[id.Limit]bool{}}
}

// WaitReady returns when limits can be known, which takes a moment after Run
// begins.
func (b *Book) WaitReady(ctx context.Context) error {
	select {
	case <-b.hears:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Counts returns the counters.
func (b *Book) Counts() Counts {
	b.mu.Lock()
	defer b.mu.Unlock()
	c := b.counts
	c.Slices = len(b.slices)
	return c
}

// Reserve takes all that a request may use from every limit that applies, or
// nothing. The error is an *apperr.Error: TooMany around a *[Refusal], or Unavailable
// with the code quota_check_unavailable when it cannot be known. The caller must call Close.
func (b *Book) Reserve(ctx context.Context, a Ask) (*Reservation, error) {
	limits, p, err := b.rules.of(ctx, a)
	if err != nil {
		return nil, b.failed(err)
	}
	r := &Reservation{book: b, prices: p}
	needs := make([]need, 0, len(limits))
	for _, l := range limits {
		if l.Model != "" && l.Model != a.Model {
			continue
		}
		if n := l.amount(p, a.Input, a.Output); n > 0 {
			needs = append(needs, need{l, n})
		}
	}
	b.mu.Lock()
	now := b.opt.Now()
	if b.opt.Fenced() || b.stopped {
		b.mu.Unlock()
		return nil, b.failed(errUnavailable(errFenced))
	}
	if parts := b.take(needs, now); parts != nil {
		b.counts.Local++
		r.parts = parts
		r.Status = b.status(needs)
		b.mu.Unlock()
		return r, nil
	}
	w := &waiter{needs: needs, done: make(chan struct{})}
	b.waiters = append(b.waiters, w)
	b.counts.Asked++
	b.mu.Unlock()
	b.poke()
	select {
	case <-w.done:
	case <-ctx.Done():
		b.mu.Lock()
		select {
		case <-w.done:
			if w.err == nil {
				r.parts = w.parts
			}
		default:
			w.err = ctx.Err()
			close(w.done) // whoever finds it in the queue passes it over
		}
		b.mu.Unlock()
		r.Close()
		return nil, apperr.From(ctx.Err())
	}
	if w.err != nil {
		return nil, b.failed(w.err)
	}
	r.parts = w.parts
	b.mu.Lock()
	r.Status = b.status(needs)
	b.mu.Unlock()
	return r, nil
}

func (b *Book) failed(err error) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if apperr.From(err).Kind == apperr.Unavailable {
		b.counts.Unavailable++
	} else {
		b.counts.Refused++
	}
	return err
}

// take needs the lock. It reserves everything or returns nil.
func (b *Book) take(needs []need, now time.Time) []part {
	for _, n := range needs {
		s := b.slices[n.limit.ID]
		if s == nil || s.avail < n.amount || s.over(now) {
			return nil
		}
	}
	parts := make([]part, len(needs)) // not nil, even if nothing is needed
	for i, n := range needs {
		s := b.slices[n.limit.ID]
		s.take(n.amount, now)
		parts[i] = part{slice: s, amount: n.amount, turn: s.turn, at: now}
		if s.wanted {
			b.urge(s)
		}
	}
	return parts
}

// urge has a slice exchanged before the next tick; it needs the lock.
func (b *Book) urge(s *slice) {
	b.urgent[s.limit.ID] = true
	b.poke()
}

func (b *Book) poke() {
	select {
	case b.wake <- struct{}{}:
	default:
	}
}

var (
	errFenced   = errors.New("the lease of this replica may be over")
	errNotHeard = errors.New("changes of limits may have been missed")
)

func errUnavailable(cause error) *apperr.Error {
	return apperr.Wrap(cause, apperr.Unavailable, "quota_check_unavailable",
		"The limits of the tenant cannot be checked now; try again.").WithRetryAfter(retryAfter)
}

// Reservation is what one request holds. It belongs to one goroutine. The zero
// value holds nothing.
type Reservation struct {
	book   *Book
	prices prices
	parts  []part
	spent  []int64 // of each part; nil: nothing
	closed bool
	// Status is how much is left after this reservation.
	Status Status
}

// Holds returns what the request holds of limits that do not flow back by
// themselves, for its intent.
func (r *Reservation) Holds() []Hold {
	var out []Hold
	for _, p := range r.parts {
		if p.slice.limit.Period != Minute {
			out = append(out, Hold{p.slice.limit.ID, p.amount})
		}
	}
	return out
}

// Spend says what the request used in the end: tokens of the prompt that were
// computed or remembered, and tokens of the answer that were computed. It returns what has to be
// written with the usage of the request, before Close is called. Nobody is charged
// more than was reserved.
func (r *Reservation) Spend(input, output int) []Charge {
	var out []Charge
	r.spent = make([]int64, len(r.parts))
	for i, p := range r.parts {
		l := p.slice.limit
		n := min(l.amount(r.prices, input, output), p.amount)
		switch {
		case l.Meter == Concurrent: // it ends
			n = 0
		case l.Meter == Requests && input+output == 0 && l.Period != Minute: // nothing was done
			n = 0
		}
		r.spent[i] = n
		if l.Period.window() && n > 0 {
			out = append(out, Charge{l.ID, p.slice.window, n})
		}
	}
	return out
}

// Close gives back what was not spent. It is called when nothing is computed
// for the request any more, and its usage is written or on its way. A second call does
// nothing.
func (r *Reservation) Close() {
	if r.closed {
		return
	}
	r.closed = true
	if len(r.parts) == 0 {
		return
	}
	r.book.mu.Lock()
	defer r.book.mu.Unlock()
	now := r.book.opt.Now()
	for i, p := range r.parts {
		var spent int64
		if r.spent != nil {
			spent = r.spent[i]
		}
		p.settle(spent, now)
		if p.slice.recall {
			r.book.urge(p.slice)
		}
	}
}
