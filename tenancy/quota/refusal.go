package quota

import (
	"fmt"
	"time"

	"bulkhead.dev/infra/apperr"
)

// Refusal says which limit had no room. It is the cause of an *apperr.Error of
// the kind TooMany.
type Refusal struct {
	Limit  *Limit
	Needed int64 // what was asked for
	Left   int64 // what was left, at most
	Status Status
}

// Error implements error. It names no tenant.
func (r *Refusal) Error() string {
	return fmt.Sprintf("%s limit: %s of %d per %s", r.Limit.Scope(), r.Limit.Meter, r.Limit.Amount, r.Limit.Period)
}

// Status is what is left of the rates that bind a request most, at the last
// exchange with the database less what this replica has reserved since. A zero
// Limit says that there is no such rate.
type Status struct{ Requests, Tokens Rate }

// Rate is one rate.
type Rate struct {
	Limit     int64
	Remaining int64
	Reset     time.Duration // until it is full again if nothing is used
}

// status needs the lock.
func (b *Book) status(needs []need) (out Status) {
	for _, n := range needs {
		if n.limit.Period != Minute {
			continue
		}
		s := b.slices[n.limit.ID]
		if s == nil {
			continue
		}
		rate := Rate{Limit: s.amount, Remaining: max(s.free, 0) + s.avail}
		if rate.Limit > 0 {
			rate.Reset = time.Duration(float64(max(rate.Limit-rate.Remaining, 0)) / float64(rate.Limit) * float64(time.Minute))
		}
		to := &out.Tokens
		if n.limit.Meter == Requests {
			to = &out.Requests
		}
		if to.Limit == 0 || rate.Remaining < to.Remaining {
			*to = rate
		}
	}
	return out
}

// refuse makes the error for a need that does not fit; it needs the lock.
func (b *Book) refuse(needs []need, n need) error {
	s := b.slices[n.limit.ID]
	r := &Refusal{Limit: n.limit, Needed: n.amount, Left: max(s.free, 0) + s.avail, Status: b.status(needs)}
	e := refusalError(r, s)
	if n.amount > s.amount {
		return e.WithNoRetry()
	}
	if s.wait > 0 {
		e = e.WithRetryAfter(s.wait)
	}
	// A rate comes back by itself, and a slot when a request ends. What a day or
	// a month allowed does not come back before anybody has given up.
	if n.limit.Period.window() {
		e = e.WithNoRetry()
	}
	return e
}

func refusalError(r *Refusal, s *slice) *apperr.Error {
	l := r.Limit
	who := map[string]string{"tenant": "organization", "project": "project", "key": "key"}[l.Scope()]
	of := ""
	if l.Model != "" {
		of = " of model " + l.Model
	}
	switch {
	case l.Meter == Concurrent:
		return apperr.Wrap(r, apperr.TooMany, "rate_limit_exceeded",
			"%d requests%s of this %s may run at once, and that many do; wait for one to end.", s.amount, of, who)
	case r.Needed > s.amount && l.Meter != Money:
		return apperr.Wrap(r, apperr.TooMany, "rate_limit_exceeded",
			"This request may use %d %s%s, and the limit of the %s is %d per %s; ask for a shorter answer or shorten the prompt.", r.Needed, l.Meter, of, who, s.amount, l.Period)
	case l.Period == Minute:
		return apperr.Wrap(r, apperr.TooMany, "rate_limit_exceeded",
			"The limit of this %s is %d %s%s per minute; this request may use %d, and %d are left.", who, s.amount, l.Meter, of, r.Needed, r.Left)
	case l.Meter == Money:
		return apperr.Wrap(r, apperr.TooMany, who+"_spend_limit_exceeded",
			"The spending limit of this %s for the %s%s does not cover what this request may cost.", who, l.Period, of)
	}
	return apperr.Wrap(r, apperr.TooMany, who+"_usage_limit_exceeded",
		"The limit of this %s is %d %s%s per %s; this request may use %d, and %d are left.", who, s.amount, l.Meter, of, l.Period, r.Needed, r.Left)
}
