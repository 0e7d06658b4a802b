package quota

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"bulkhead.dev/infra/id"
	"bulkhead.dev/infra/pgdb"
)

// Run exchanges with the database until ctx ends, then gives back what no
// request holds. Requests that still run can be closed after it.
func (b *Book) Run(ctx context.Context) error {
	listening := make(chan struct{})
	go func() { defer close(listening); b.listen(ctx) }()
	defer func() { <-listening }()
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	for {
		var retry <-chan time.Time
		if d, ok := b.nextTry(); ok {
			retry = time.After(d)
		}
		due := false
		select {
		case <-ctx.Done():
			b.stop()
			return nil
		case <-b.wake:
		case <-retry:
		case <-ticker.C:
			due = true
		}
		for b.exchange(ctx, due) {
		}
	}
}

// nextTry returns how long nobody who waits has to be looked at.
func (b *Book) nextTry() (time.Duration, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	var first time.Time
	for _, w := range b.waiters {
		if first.IsZero() || w.notYet.Before(first) {
			first = w.notYet
		}
	}
	return first.Sub(b.opt.Now()), !first.IsZero()
}

// stop refuses whoever waits and gives back what is available.
func (b *Book) stop() {
	b.mu.Lock()
	b.stopped = true
	waiting := b.waiters
	b.waiters = nil
	for _, w := range waiting {
		w.finish(nil, errUnavailable(errFenced))
	}
	for _, s := range b.slices {
		s.recall = true
	}
	b.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), askFor)
	defer cancel()
	for b.exchange(ctx, true) {
	}
}

// finish needs the lock of the book.
func (w *waiter) finish(parts []part, err error) {
	select {
	case <-w.done: // it went away
		for _, p := range parts {
			p.settle(0, p.at)
		}
	default:
		w.parts, w.err = parts, err
		close(w.done)
	}
}

// exchange does one exchange if there is something to exchange: what somebody
// waits for, and what is due if that is asked for. It returns true if another is needed at
// once.
func (b *Book) exchange(ctx context.Context, due bool) bool {
	wishes, served, more := b.collect(due)
	if len(wishes) == 0 {
		return false
	}
	asked, cancel := context.WithTimeout(ctx, askFor)
	defer cancel()
	b.number++
	answers, err := ask(asked, b.opt.DB, b.opt.Replica, b.number, wishes)
	b.mu.Lock()
	defer b.mu.Unlock()
	now := b.opt.Now()
	if err != nil {
		b.opt.Log.WarnContext(ctx, "limits were not exchanged", "error", err.Error())
		for _, w := range served {
			w.finish(nil, errUnavailable(err))
		}
		return false
	}
	b.counts.Exchanges++
	for _, w := range wishes {
		a, ok := answers[w.limit]
		if !ok { // it was deleted
			if b.slices[w.limit] == w.slice {
				delete(b.slices, w.limit)
			}
			continue
		}
		b.enter(w, a, now)
	}
	again := b.serve(served, answers, now)
	return more || again
}

// collect gathers what to exchange, and who waits for it.
func (b *Book) collect(due bool) (wishes []wish, served []*waiter, more bool) {
	// What would be given back to a database that is away would be lost: nobody
	// knows what became of it.
	hears := b.rules.hears()
	b.mu.Lock()
	defer b.mu.Unlock()
	now := b.opt.Now()
	type sum struct{ need, least int64 }
	needs := map[id.Limit]sum{}
	var rest []*waiter
	for _, w := range b.waiters {
		select {
		case <-w.done:
			continue // it went away
		default:
		}
		if now.Before(w.notYet) || len(needs)+len(w.needs) > maxWishes {
			rest = append(rest, w)
			more = more || !now.Before(w.notYet)
			continue
		}
		if parts := b.take(w.needs, now); parts != nil {
			w.finish(parts, nil)
			continue
		}
		served = append(served, w)
		for _, n := range w.needs {
			old := needs[n.limit.ID]
			if old.least == 0 || n.amount < old.least {
				old.least = n.amount
			}
			needs[n.limit.ID] = sum{old.need + n.amount, old.least}
			if b.slices[n.limit.ID] == nil {
				b.slices[n.limit.ID] = &slice{limit: n.limit}
			}
		}
	}
	b.waiters = rest
	for limit, s := range needs {
		wishes = append(wishes, b.slices[limit].wish(s.need, s.least, now))
	}
	if !hears && !b.stopped {
		return wishes, served, more
	}
	if due {
		for limit, s := range b.slices {
			switch {
			case s.empty(now):
				delete(b.slices, limit)
			case s.restless(now):
				b.urgent[limit] = true
			}
		}
	}
	for limit := range b.urgent {
		if len(wishes) == maxWishes {
			return wishes, served, true
		}
		delete(b.urgent, limit)
		s := b.slices[limit]
		if _, asked := needs[limit]; s != nil && !asked && (due || s.wanted || s.recall) {
			wishes = append(wishes, s.wish(0, 0, now))
		}
	}
	return wishes, served, more
}

// enter takes the answer about one slice into the books; it needs the lock.
func (b *Book) enter(w wish, a answer, now time.Time) {
	s := w.slice
	if !a.window.Equal(w.window) {
		// The first exchange, or a new window. Requests that still run keep the
		// old slice.
		if b.slices[w.limit] != s {
			return
		}
		old := s
		s = &slice{limit: old.limit, window: a.window, pace: old.pace, took: old.took, paced: old.paced, last: old.last,
			spent: a.spent, refunded: a.refunded}
		b.slices[w.limit] = s
		s.avail = a.slice
	} else {
		s.avail += a.slice - w.keep
	}
	if a.endsIn > 0 {
		s.ends = now.Add(a.endsIn)
	}
	s.asked = false
	s.told = [2]int64{a.spent, a.refunded}
	s.amount, s.free, s.others, s.wait = a.amount, a.free, a.others, a.wait
	if a.warn {
		b.counts.Warnings++
		b.opt.Log.Warn("a limit is nearly used up", "tenant", s.limit.Tenant.String(), "limit", s.limit.ID.String(),
			"meter", string(s.limit.Meter), "period", string(s.limit.Period), "amount", a.amount, "left", a.free)
	}
}

// serve gives those who waited what they need, in their order, and tells the
// others why not; it needs the lock.
func (b *Book) serve(served []*waiter, answers map[id.Limit]answer, now time.Time) (again bool) {
	for _, w := range served {
		if parts := b.take(w.needs, now); parts != nil {
			w.finish(parts, nil)
			continue
		}
		lacking, gone := b.lacking(w.needs, answers, now)
		switch {
		case gone:
			w.finish(nil, errUnavailable(errLimitGone))
		case lacking == nil:
			// Somebody before it took what there was, and there is more.
			b.waiters = append(b.waiters, w)
			again = true
		case b.mayComeBack(w, lacking, now):
			w.notYet = now.Add(recallAgain)
			b.waiters = append(b.waiters, w)
		default:
			if !w.giveUp.IsZero() {
				b.slices[lacking.limit.ID].inVain = now
			}
			w.finish(nil, b.refuse(w.needs, *lacking))
		}
	}
	return again
}

// mayComeBack reports whether it is worth waiting for other replicas, who have
// been asked to give back what they do not use.
func (b *Book) mayComeBack(w *waiter, n *need, now time.Time) bool {
	s := b.slices[n.limit.ID]
	if s.others == 0 || n.amount > s.amount {
		return false
	}
	if w.giveUp.IsZero() && now.Sub(s.inVain) >= vainFor {
		w.giveUp = now.Add(recallFor)
	}
	return now.Before(w.giveUp)
}

var errLimitGone = errors.New("a limit was deleted meanwhile")

// lacking returns the first need for which there is no room at all.
func (b *Book) lacking(needs []need, answers map[id.Limit]answer, now time.Time) (lacking *need, gone bool) {
	for i, n := range needs {
		s := b.slices[n.limit.ID]
		if _, ok := answers[n.limit.ID]; !ok || s == nil {
			return nil, true
		}
		if !s.over(now) && s.avail < n.amount && s.free+s.avail < n.amount {
			return &needs[i], false
		}
	}
	return nil, false
}

// answer is what the database says of one limit.
type answer struct {
	window          time.Time
	endsIn          time.Duration // 0: never
	slice           int64         // what the replica holds now
	spent, refunded int64         // as the database knows them
	amount, free    int64
	others          int64 // what other replicas hold
	wait            time.Duration
	warn            bool
}

func ask(ctx context.Context, db pgdb.DB, me id.Epoch, number int64, wishes []wish) (map[id.Limit]answer, error) {
	n := len(wishes)
	var (
		limits                       = make([][16]byte, n)
		windows                      = make([]time.Time, n)
		keep, spent, refunded, least = make([]int64, n), make([]int64, n), make([]int64, n), make([]int64, n)
		need, more                   = make([]int64, n), make([]int64, n)
	)
	for i, w := range wishes {
		limits[i], windows[i] = w.limit, w.window
		keep[i], spent[i], refunded[i], least[i], need[i], more[i] = w.keep, w.spent, w.refunded, w.least, w.need, w.more
	}
	rows, err := db.Query(ctx, `SELECT limit_id, window_start, coalesce(ends_in_us, 0), slice, told_spent, told_refunded, amount, free, others, coalesce(wait_us, 0), warn
		FROM quota_exchange($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)`, [16]byte(me), number, limits, windows, keep, spent, refunded, least, need, more)
	if err != nil {
		return nil, pgdb.Wrap("exchange limits", err)
	}
	out := make(map[id.Limit]answer, n)
	var limit [16]byte
	var a answer
	var ends, wait int64
	_, err = pgx.ForEachRow(rows, []any{&limit, &a.window, &ends, &a.slice, &a.spent, &a.refunded, &a.amount, &a.free, &a.others, &wait, &a.warn}, func() error {
		a.endsIn, a.wait = time.Duration(ends)*time.Microsecond, time.Duration(wait)*time.Microsecond
		out[limit] = a
		return nil
	})
	if err != nil {
		return nil, pgdb.Wrap("exchange limits", err)
	}
	return out, nil
}
