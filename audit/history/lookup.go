package history

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"bulkhead.dev/audit/history/historydb"
	"bulkhead.dev/engine/history"
	"bulkhead.dev/engine/kv"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/infra/pgdb"
)

// Tenure is the time for which somebody held a page. Times are zero for what is
// not recorded, or has not happened.
type Tenure struct {
	Generation uint64
	Owner      id.Owner
	Lease      id.Lease
	Granted    time.Time
	// AtGrant is when the page was wiped for this tenure; Ahead when it was wiped
	// after it, before anybody else had it.
	AtGrant, Ahead time.Time
	LastWrite      time.Time // sealed
	Quarantined    time.Time
	Reason         kv.QuarantineReason
	Freed          time.Time // given back, or out of quarantine
	// The events it is made of lie between these, both included.
	FirstSeq, LastSeq uint64
}

// Past is what is known of a page.
type Past struct {
	// From is the event from which on everything was looked at; 1 is the
	// beginning of the worker.
	From    uint64
	Tenures []Tenure // in order of generation
	// Gaps are ranges of events of the worker that were lost. What happened to
	// the page in them is unknown.
	Gaps [][2]uint64
}

// Of returns the whole past of a page of a run of a worker.
func (s *Store) Of(ctx context.Context, epoch id.Epoch, page uint32) (Past, error) {
	r := reading{s: s, epoch: epoch, page: page, from: 1}
	err := r.forward(ctx, 0, func(history.Header, []history.Event) bool { return true })
	return r.past(), err
}

// Grant returns the tenure with the generation and the one before it: whose
// bytes the page could still have held. Only blocks around them are read. It is
// empty if the grant is not recorded, or not yet.
func (s *Store) Grant(ctx context.Context, epoch id.Epoch, page uint32, generation uint64) (Past, error) {
	if generation > math.MaxInt64 {
		return Past{}, nil
	}
	at, err := s.q.BlockOfGrant(ctx, historydb.BlockOfGrantParams{Epoch: epoch, Generation: int64(generation)})
	if errors.Is(err, pgx.ErrNoRows) {
		return Past{}, nil
	}
	if err != nil {
		return Past{}, pgdb.Wrap("find a grant in the page history", err)
	}
	r := reading{s: s, epoch: epoch, page: page}
	if err := r.back(ctx, at+1, func(e kv.Event) bool { return e.Generation < generation }); err != nil {
		return Past{}, err
	}
	later := func(e history.Event) bool { return e.Kind == kv.EventGrant && e.Generation > generation }
	if !slices.ContainsFunc(r.events, later) {
		if err := r.forward(ctx, at, func(_ history.Header, es []history.Event) bool { return !slices.ContainsFunc(es, later) }); err != nil {
			return Past{}, err
		}
	}
	if i := slices.IndexFunc(r.events, later); i >= 0 {
		r.until(r.events[i].Seq)
	}
	return r.past(), nil
}

// Between returns the tenures that had not ended before from and had begun at
// to. What happened after to is left out.
func (s *Store) Between(ctx context.Context, epoch id.Epoch, page uint32, from, to time.Time) (Past, error) {
	at, err := s.q.BlockAt(ctx, historydb.BlockAtParams{Epoch: epoch, At: &from})
	if errors.Is(err, pgx.ErrNoRows) {
		at, err = math.MaxInt64, nil // all of it is older
	}
	if err != nil {
		return Past{}, pgdb.Wrap("find a moment in the page history", err)
	}
	r := reading{s: s, epoch: epoch, page: page}
	if err := r.back(ctx, at, func(kv.Event) bool { return true }); err != nil {
		return Past{}, err
	}
	after := func(e history.Event) bool { return e.At.After(to) }
	if at != math.MaxInt64 {
		if err := r.forward(ctx, at-1, func(h history.Header, _ []history.Event) bool { return !h.LastAt.After(to) }); err != nil {
			return Past{}, err
		}
	}
	if i := slices.IndexFunc(r.events, after); i >= 0 {
		r.until(r.events[i].Seq)
	}
	p := r.past()
	for len(p.Tenures) > 0 {
		t := p.Tenures[0]
		ended := !t.Freed.IsZero() && t.Freed.Before(from)
		if len(p.Tenures) > 1 {
			next := p.Tenures[1]
			ended = ended || !next.Granted.IsZero() && next.Granted.Before(from)
		}
		if !ended {
			break
		}
		p.Tenures = p.Tenures[1:]
		p.From = t.LastSeq + 1
	}
	p.Gaps = slices.DeleteFunc(p.Gaps, func(g [2]uint64) bool { return g[1] < p.From })
	return p, nil
}

// Before returns the tenure in front of the one with the generation, none if the
// page was never granted before, and whether that is sure: both ends are
// recorded, and nothing between them was lost.
func (p Past) Before(generation uint64) (t Tenure, sure bool) {
	i := slices.IndexFunc(p.Tenures, func(t Tenure) bool { return t.Generation >= generation })
	found := i >= 0 && p.Tenures[i].Generation == generation && !p.Tenures[i].Granted.IsZero()
	if i < 0 {
		i = len(p.Tenures)
	}
	if i > 0 {
		t = p.Tenures[i-1]
	}
	if !found || i == 0 && p.From != 1 {
		return t, false
	}
	for _, g := range p.Gaps {
		if g[1] > t.LastSeq && g[0] < p.Tenures[i].FirstSeq {
			return t, false
		}
	}
	return t, true
}

// take adds an event to the tenure that it belongs to.
func (p *Past) take(e history.Event) {
	n := len(p.Tenures) - 1
	if n < 0 || p.Tenures[n].Generation != e.Generation {
		// Its beginning may be lost.
		p.Tenures = append(p.Tenures, Tenure{Generation: e.Generation, Owner: e.Owner, Lease: e.Lease, FirstSeq: e.Seq})
		n++
	}
	t := &p.Tenures[n]
	t.LastSeq = e.Seq
	switch e.Kind {
	case kv.EventGrant:
		t.Granted = e.At
	case kv.EventScrub:
		if e.Method == kv.Ahead {
			t.Ahead = e.At
		} else {
			t.AtGrant = e.At
		}
	case kv.EventSeal:
		t.LastWrite = e.At
	case kv.EventQuarantine:
		t.Quarantined, t.Reason = e.At, e.Reason
	case kv.EventFree, kv.EventClear:
		t.Freed = e.At
	}
}

// reading collects what happened to one page.
type reading struct {
	s      *Store
	epoch  id.Epoch
	page   uint32
	from   uint64
	events []history.Event // in order
	gaps   [][2]uint64     // in order
}

func (r *reading) past() Past {
	p := Past{From: r.from, Gaps: r.gaps}
	for _, e := range r.events {
		p.take(e)
	}
	return p
}

// until leaves out an event and what follows.
func (r *reading) until(seq uint64) {
	r.events = slices.DeleteFunc(r.events, func(e history.Event) bool { return e.Seq >= seq })
	r.gaps = slices.DeleteFunc(r.gaps, func(g [2]uint64) bool { return g[0] >= seq })
}

// open decodes a block and picks what is about the page. It does not believe
// what is not the block that was stored.
func (r *reading) open(number int64, hash, body []byte) (history.Header, []history.Event, error) {
	h, events, err := history.Decode(body)
	if err == nil && (h.Epoch != r.epoch || h.Number != uint64(number) || history.Hash(body) != [32]byte(hash)) {
		err = fmt.Errorf("%w: another block is stored as block %d of %v", history.ErrBlock, number, r.epoch)
	}
	if err != nil {
		return h, nil, err
	}
	return h, slices.DeleteFunc(events, func(e history.Event) bool { return r.page < e.First || r.page-e.First >= e.Count }), nil
}

// forward reads the blocks behind one until more says that it was enough.
func (r *reading) forward(ctx context.Context, after int64, more func(history.Header, []history.Event) bool) error {
	for {
		rows, err := r.s.q.BlocksAfter(ctx, historydb.BlocksAfterParams{Epoch: r.epoch, After: after, Page: int64(r.page), PageSize: pageSize})
		if err != nil {
			return pgdb.Wrap("read page history", err)
		}
		for _, row := range rows {
			h, events, err := r.open(row.Number, row.Hash, row.Body)
			if err != nil {
				return err
			}
			if h.Gap {
				r.gaps = append(r.gaps, [2]uint64{h.FirstSeq, h.LastSeq})
			}
			r.events = append(r.events, events...)
			if !more(h, events) {
				return nil
			}
			after = row.Number
		}
		if len(rows) < pageSize {
			return nil
		}
	}
}

// back reads the blocks in front of one, backwards, until it finds a grant that
// is the one looked for, or the beginning.
func (r *reading) back(ctx context.Context, before int64, found func(kv.Event) bool) error {
	r.from = 1
	for {
		rows, err := r.s.q.BlocksBefore(ctx, historydb.BlocksBeforeParams{Epoch: r.epoch, Before: before, Page: int64(r.page), PageSize: pageSize})
		if err != nil {
			return pgdb.Wrap("read page history", err)
		}
		for _, row := range rows {
			h, events, err := r.open(row.Number, row.Hash, row.Body)
			if err != nil {
				return err
			}
			if h.Gap {
				r.gaps = slices.Insert(r.gaps, 0, [2]uint64{h.FirstSeq, h.LastSeq})
			}
			for i, e := range slices.Backward(events) {
				if e.Kind == kv.EventGrant && found(e.Event) {
					r.events = append(events[i:], r.events...)
					r.from = e.Seq
					return nil
				}
			}
			r.events = append(events, r.events...)
			before = row.Number
		}
		if len(rows) < pageSize {
			return nil
		}
	}
}
