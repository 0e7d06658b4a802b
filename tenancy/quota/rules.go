package quota

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"
	"github.com/jackc/pgx/v5"

	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/infra/pgdb"
)

// subject is whose limits are asked for.
type subject struct {
	tenant  id.Tenant
	project id.Project
	key     id.Key
}

// rules remembers which limits bind whom, and prices. What it remembers is true
// for as long as the connection stands that hears of changes; see [Book.listen].
type rules struct {
	db  pgdb.DB
	now func() time.Time

	mu     sync.Mutex
	heard  time.Time                         // under mu; until when no change was missed
	deaf   bool                              // under mu; no connection hears of changes now
	known  *simplelru.LRU[subject, []*Limit] // under mu
	prices []price                           // under mu; nil: not known
	epoch  uint64                            // under mu; rises when something is forgotten
	flight map[subject]*load                 // under mu
}

// load is one look-up that any number of callers wait for.
type load struct {
	done   chan struct{}
	limits []*Limit
	list   []price
	err    error
}

const (
	// maxSubjects bounds the memory: about a kilobyte each.
	maxSubjects = 50_000
	// trustFor is how long limits are believed after the connection that hears
	// of changes was seen alive.
	trustFor = 10 * time.Second
)

func newRules(db pgdb.DB, now func() time.Time) *rules {
	known, _ := simplelru.NewLRU[subject, []*Limit](maxSubjects, nil) // the size is positive
	return &rules{db: db, now: now, known: known, flight: map[subject]*load{}}
}

// alive says that up to a moment every change was heard.
func (r *rules) alive(at time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.heard, r.deaf = at, false
}

// lost says that the connection that heard of changes broke.
func (r *rules) lost() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.deaf = true
}

func (r *rules) hears() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return !r.deaf
}

// forgetAll is for when changes may have been missed.
func (r *rules) forgetAll() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.epoch++
	r.known.Purge()
	r.prices = nil
}

func (r *rules) forget(t id.Tenant) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.epoch++
	for _, s := range r.known.Keys() {
		if s.tenant == t {
			r.known.Remove(s)
		}
	}
}

func (r *rules) forgetPrices() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.epoch++
	r.prices = nil
}

// of returns the limits that bind a request, and the prices of its model.
func (r *rules) of(ctx context.Context, a Ask) ([]*Limit, prices, error) {
	s := subject{a.Tenant, a.Project, a.Key}
	r.mu.Lock()
	limits, ok := r.known.Get(s)
	list := r.prices
	trusted := r.now().Sub(r.heard) < trustFor
	r.mu.Unlock()
	if !trusted {
		return nil, prices{}, errUnavailable(errNotHeard)
	}
	if !ok || list == nil {
		var err error
		if limits, list, err = r.load(ctx, s); err != nil {
			return nil, prices{}, err
		}
	}
	return limits, priceOf(list, a, r.now()), nil
}

func (r *rules) load(ctx context.Context, s subject) ([]*Limit, []price, error) {
	r.mu.Lock()
	f := r.flight[s]
	if f == nil {
		f = &load{done: make(chan struct{})}
		r.flight[s] = f
		epoch := r.epoch
		go func() {
			// Others wait for it too, so it does not end with this caller.
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), askFor)
			defer cancel()
			var list []price
			f.limits, f.err = loadLimits(ctx, r.db, s)
			if f.err == nil {
				list, f.err = loadPrices(ctx, r.db)
			}
			r.mu.Lock()
			defer r.mu.Unlock()
			delete(r.flight, s)
			if f.err == nil && r.epoch == epoch {
				r.known.Add(s, f.limits)
				r.prices = list
			}
			f.list = list
			close(f.done)
		}()
	}
	r.mu.Unlock()
	select {
	case <-f.done:
		if f.err != nil {
			return nil, nil, errUnavailable(f.err)
		}
		return f.limits, f.list, nil
	case <-ctx.Done():
		return nil, nil, apperr.From(ctx.Err())
	}
}

func loadLimits(ctx context.Context, db pgdb.DB, s subject) ([]*Limit, error) {
	rows, err := db.Query(ctx, `SELECT `+limitColumns+` FROM quota_limit
		WHERE tenant = $1 AND (project IS NULL OR project = $2) AND (api_key IS NULL OR api_key = $3)`,
		[16]byte(s.tenant), [16]byte(s.project), [16]byte(s.key))
	if err != nil {
		return nil, pgdb.Wrap("read limits", err)
	}
	list, err := pgx.CollectRows(rows, scanLimit)
	if err != nil {
		return nil, pgdb.Wrap("read limits", err)
	}
	slices.SortFunc(list, order)
	return list, nil
}

func loadPrices(ctx context.Context, db querier) ([]price, error) {
	rows, err := db.Query(ctx, `SELECT model, model_digest, meter, effective_from, micros_per_million FROM price`)
	if err != nil {
		return nil, pgdb.Wrap("read prices", err)
	}
	list, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (p price, err error) {
		err = row.Scan(&p.model, &p.digest, &p.meter, &p.from, &p.micros)
		return p, err
	})
	if err != nil {
		return nil, pgdb.Wrap("read prices", err)
	}
	if list == nil {
		list = []price{} // known to be none
	}
	return list, nil
}
