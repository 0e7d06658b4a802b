package settle

import (
	"context"
	"time"

	"bulkhead.dev/audit/receipt"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/infra/pgdb"
)

// run is the writer. It ends when it is told to stop and the queues are empty,
// or when base is canceled.
func (s *Settler) run() {
	wait := retryFirst
	for s.gather() {
		items, tickets := s.take()
		items, tickets, err := s.commit(items, tickets)
		if err == nil {
			wait = retryFirst
			continue
		}
		s.giveBack(items, tickets)
		s.opt.Log.Warn("settlement waits for the database", "error", err.Error(), "requests", len(items))
		select {
		case <-s.base.Done():
			return
		case <-time.After(wait):
		}
		wait = min(2*wait, retryLast)
	}
}

// gather returns true when there is something to write and it has waited long
// enough for company, and false when the writer shall end.
func (s *Settler) gather() bool {
	for {
		s.mu.Lock()
		facts, intents, stopping := len(s.facts), len(s.intents), s.stopping
		var due time.Time
		if intents > 0 {
			due = s.intents[0].enqueued.Add(s.opt.IntendWithin)
		}
		if facts > 0 {
			if d := s.facts[0].enqueued.Add(s.opt.Linger); due.IsZero() || d.Before(due) {
				due = d
			}
		}
		s.mu.Unlock()
		if s.base.Err() != nil {
			return false
		}
		var wait <-chan time.Time
		if facts+intents > 0 {
			left := due.Sub(s.opt.Now())
			if stopping || left <= 0 || facts >= s.opt.MaxBatch || intents >= maxIntents {
				return true
			}
			wait = time.After(left)
		} else if stopping {
			return false
		}
		select {
		case <-s.base.Done():
			return false
		case <-s.wake:
		case <-wait:
		}
	}
}

// take moves the oldest facts and intents out of the queues. Two facts of one
// request never share a batch, so that the second is compared with the first.
func (s *Settler) take() ([]*item, []*Ticket) {
	s.mu.Lock()
	defer s.mu.Unlock()
	seen := make(map[id.Request]bool, min(len(s.facts), s.opt.MaxBatch))
	var items, rest []*item
	for _, it := range s.facts {
		request := it.rows.facts.Receipt.Request
		if len(items) == s.opt.MaxBatch || seen[request] {
			rest = append(rest, it)
			continue
		}
		seen[request] = true
		it.inFlight = true
		items = append(items, it)
	}
	s.facts, s.flying = rest, items
	n := min(len(s.intents), maxIntents)
	tickets, left := s.intents[:n:n], s.intents[n:]
	// An intent must not become durable after the receipt that takes its place.
	s.intents = nil
	for _, t := range left {
		if seen[t.intent.Request] {
			tickets = append(tickets, t)
		} else {
			s.intents = append(s.intents, t)
		}
	}
	return items, tickets
}

// giveBack puts what was not written in front of the queues again, and
// withholds what has waited too long.
func (s *Settler) giveBack(items []*item, tickets []*Ticket) {
	now := s.opt.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counts.Retries++
	s.flying = nil
	for _, it := range items {
		it.inFlight = false
		if it.expired || !now.Before(it.deadline) {
			s.withhold(it)
		}
	}
	s.facts = append(items, s.facts...)
	s.intents = append(tickets, s.intents...)
}

// commit writes facts and intents and tells their waiters. It returns what was
// not written because the database did not answer. If a value is at fault it
// halves the batch until the rows at fault stand alone, so that they fail and
// nothing else does.
func (s *Settler) commit(items []*item, tickets []*Ticket) ([]*item, []*Ticket, error) {
	stored, err := s.attempt(items, tickets)
	switch {
	case err == nil:
		s.finish(items, tickets, stored)
		return nil, nil, nil
	case !pgdb.IsData(err):
		return items, tickets, err
	case len(items)+len(tickets) == 1:
		s.reject(items, tickets, err)
		return nil, nil, nil
	}
	// Intents first: the facts of a request delete its intent.
	var parts [2]struct {
		items   []*item
		tickets []*Ticket
	}
	switch {
	case len(items) > 0 && len(tickets) > 0:
		parts[0].tickets, parts[1].items = tickets, items
	case len(items) > 0:
		parts[0].items, parts[1].items = items[:len(items)/2], items[len(items)/2:]
	default:
		parts[0].tickets, parts[1].tickets = tickets[:len(tickets)/2], tickets[len(tickets)/2:]
	}
	for i, part := range parts {
		restItems, restTickets, err := s.commit(part.items, part.tickets)
		if err != nil {
			if i == 0 {
				restItems = append(restItems[:len(restItems):len(restItems)], parts[1].items...)
				restTickets = append(restTickets[:len(restTickets):len(restTickets)], parts[1].tickets...)
			}
			return restItems, restTickets, err
		}
	}
	return nil, nil, nil
}

// attempt is one transaction. It is cut off when the hold of a fact in it ends.
func (s *Settler) attempt(items []*item, tickets []*Ticket) (map[id.Request]receipt.Digest, error) {
	now := s.opt.Now()
	limit := attemptFor
	facts := make([]rows, len(items))
	inBatch := make(map[id.Request]bool, len(items))
	for i, it := range items {
		facts[i] = it.rows
		inBatch[it.rows.facts.Receipt.Request] = true
		if left := it.deadline.Sub(now); left > 0 {
			limit = min(limit, left)
		}
	}
	// An intent that this very transaction would delete again is left out.
	intents := make([]Intent, 0, len(tickets))
	for _, t := range tickets {
		if !inBatch[t.intent.Request] {
			intents = append(intents, t.intent)
		}
	}
	ctx, cancel := context.WithTimeout(s.base, max(limit, attemptMin))
	defer cancel()
	return write(ctx, s.opt.DB, s.opt.Replica, facts, intents)
}

func (s *Settler) finish(items []*item, tickets []*Ticket, stored map[id.Request]receipt.Digest) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.flying = without(s.flying, items)
	s.counts.Batches++
	s.counts.Intents += uint64(len(tickets))
	for _, t := range tickets {
		t.finish(nil)
	}
	for _, it := range items {
		it.inFlight = false
		request := it.rows.facts.Receipt.Request
		switch had, replay := stored[request]; {
		case !replay, had == it.rows.digest:
			s.counts.Committed++
			it.finish(nil)
		case it.withheld && had == it.original:
			s.counts.Committed++
			s.counts.LateAcks++
			s.opt.Log.Warn("the commit of a receipt was acknowledged after its answer had been withheld", "request", request.String())
		default:
			s.counts.Conflicts++
			s.opt.Log.Error("a request has another receipt already", "request", request.String())
			it.finish(errConflict())
		}
	}
}

func (s *Settler) reject(items []*item, tickets []*Ticket, cause error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.flying = without(s.flying, items)
	for _, t := range tickets {
		s.opt.Log.Error("intent rejected", "request", t.intent.Request.String(), "error", cause.Error())
		t.finish(errRejected(cause))
	}
	for _, it := range items {
		it.inFlight = false
		s.counts.Rejected++
		s.opt.Log.Error("facts rejected", "request", it.rows.facts.Receipt.Request.String(), "error", cause.Error())
		it.finish(errRejected(cause))
	}
}

func without(list, gone []*item) []*item {
	drop := make(map[*item]bool, len(gone))
	for _, it := range gone {
		drop[it] = true
	}
	var out []*item
	for _, it := range list {
		if !drop[it] {
			out = append(out, it)
		}
	}
	return out
}
