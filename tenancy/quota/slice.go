package quota

import (
	"time"

	"bulkhead.dev/infra/id"
)

// slice is what this replica has taken from one limit, in one window. It needs
// the lock of the book.
type slice struct {
	limit  *Limit
	window time.Time // when the window began; the zero time before the first exchange
	ends   time.Time // when it ends, by our clock; zero: never

	refs    int   // reservations that are not closed
	avail   int64 // can be reserved
	pending int64 // by the minute: reserved since the last exchange
	out     int64 // windows, concurrent: reserved by requests that run
	done    int64 // windows: spent by requests that ended
	// Totals since the slice began, by the minute only.
	spent, refunded int64
	told            [2]int64 // spent and refunded, as the last exchange told
	turn            uint64   // rises with each exchange
	asked           bool     // an exchange was begun and has not been answered

	// As of the last exchange:
	amount int64         // the limit
	free   int64         // of it, in no slice
	wait   time.Duration // until enough of it comes back; 0: it is not known
	others int64         // of it, in slices of other replicas

	pace   float64 // reserved per second, decaying
	took   int64   // reserved since pace was measured
	paced  time.Time
	last   time.Time // of the last reservation
	wanted bool      // more is to be taken ahead of need
	recall bool      // another replica needs what is not used
	owed   time.Time // until then what becomes free is given back at once
	inVain time.Time // when others were last waited for in vain
}

const (
	// idleAfter is how long what is not used stays in a slice.
	idleAfter = time.Second
	// paceOver is the time over which the pace is measured, and ahead of which
	// a slice takes.
	paceOver = time.Second
	// owedFor is how long after a recall what becomes free goes back at once.
	owedFor = time.Second
)

// over reports whether the window has ended.
func (s *slice) over(now time.Time) bool { return !s.ends.IsZero() && !now.Before(s.ends) }

// take reserves n, which must be available.
func (s *slice) take(n int64, now time.Time) {
	s.refs++
	s.avail -= n
	if s.limit.Period == Minute {
		s.pending += n
	} else {
		s.out += n
	}
	s.took += n
	s.last = now
	// The next one like this should not have to wait, if there are more of them.
	lately := max(s.took, int64(s.pace*paceOver.Seconds()))
	if lately >= 2*n && (s.avail < n || s.avail < lately/4) {
		s.wanted = true
	}
}

// part is what a reservation has of one slice.
type part struct {
	slice  *slice
	amount int64
	turn   uint64 // of the slice when it was reserved
	at     time.Time
}

// settle ends a part of which so much was spent.
func (p part) settle(spent int64, now time.Time) {
	s, unused := p.slice, p.amount-spent
	s.refs--
	switch {
	case s.limit.Period != Minute:
		s.out -= p.amount
		s.avail += unused
		if s.limit.Period.window() {
			s.done += spent
		}
	case p.turn == s.turn: // the database has not heard of it
		s.pending -= p.amount
		s.spent += spent
		s.avail += unused
	default:
		// It drains since then. What has drained is not given back again.
		drained := int64(now.Sub(p.at).Seconds() * float64(s.limit.Amount) / 60)
		s.refunded += max(unused-drained-1, 0)
	}
	if now.Before(s.owed) {
		s.recall = true
	}
}

// wish is what a slice says in an exchange.
type wish struct {
	slice                                    *slice
	limit                                    id.Limit
	window                                   time.Time
	keep, spent, refunded, least, need, more int64
}

// wish prepares an exchange: need is what requests wait for, least the smallest
// of them.
func (s *slice) wish(need, least int64, now time.Time) wish {
	s.measure(now)
	if s.limit.Period == Minute {
		s.spent += s.pending
		s.pending = 0
		s.turn++
	}
	target := int64(s.pace * paceOver.Seconds())
	if need == 0 && (s.recall || now.Sub(s.last) >= idleAfter) {
		target = 0
	}
	// What is not needed goes back; nobody reserves from a window that is over.
	if target == 0 && need == 0 || s.over(now) {
		s.avail = 0
	}
	w := wish{slice: s, limit: s.limit.ID, window: s.window, spent: s.spent, refunded: s.refunded,
		keep: s.avail + s.out + s.done, least: max(least-s.avail, 0), need: max(need-s.avail, 0)}
	if !s.recall && (s.wanted || w.need > 0) {
		w.more = max(target-s.avail, 0)
	}
	s.wanted, s.recall, s.asked = false, false, true
	return w
}

// measure brings the pace up to date.
func (s *slice) measure(now time.Time) {
	d := now.Sub(s.paced)
	if s.paced.IsZero() || d >= paceOver {
		if s.paced.IsZero() || d > 2*paceOver {
			d = paceOver
		}
		s.pace = float64(s.took) / d.Seconds()
		s.took, s.paced = 0, now
		return
	}
	// Part of the time has passed: the pace can only be higher.
	s.pace = max(s.pace, float64(s.took)/paceOver.Seconds())
}

// restless reports whether an exchange is due although nobody waits.
func (s *slice) restless(now time.Time) bool {
	idle := now.Sub(s.last) >= idleAfter
	return s.wanted || s.recall || s.asked || (s.avail > 0 && idle) || s.pending > 0 || s.told != [2]int64{s.spent, s.refunded}
}

// empty reports whether nothing would be lost by forgetting the slice.
func (s *slice) empty(now time.Time) bool {
	return s.refs == 0 && s.avail == 0 && !s.asked && s.told == [2]int64{s.spent, s.refunded} &&
		now.Sub(s.last) >= 2*idleAfter && (s.done == 0 || s.over(now))
}
