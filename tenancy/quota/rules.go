package quota

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"
	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/singleflight"

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
	db      pgdb.DB
	now     func() time.Time
	flights singleflight.Group

	mu     sync.Mutex
	heard  time.Time                         // under mu; until when no change was missed
	deaf   bool                              // under mu; no connection hears of changes now
	known  *simplelru.LRU[subject, []*Limit] // under mu
	prices []Price                           // under mu; nil: not known
	epoch  uint64                            // under mu; rises when something is forgotten
}

// found is what a look-up finds.
type found struct {
	limits []*Limit
	prices []Price
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
	return &rules{db: db, now: now, known: known}
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
	f := found{limits, r.prices}
	trusted := r.now().Sub(r.heard) < trustFor
	r.mu.Unlock()
	if !trusted {
		return nil, prices{}, errUnavailable(errNotHeard)
	}
	if !ok || f.prices == nil {
		var err error
		if f, err = r.load(ctx, s); err != nil {
			return nil, prices{}, err
		}
	}
	return f.limits, priceOf(f.prices, a, r.now()), nil
}

// load looks up what is not known. Any number of callers wait for one look-up,
// so it does not end with one of them.
func (r *rules) load(ctx context.Context, s subject) (found, error) {
	flight := r.flights.DoChan(string(slices.Concat(s.tenant[:], s.project[:], s.key[:])), func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), askFor)
		defer cancel()
		r.mu.Lock()
		epoch, f := r.epoch, found{prices: r.prices}
		r.mu.Unlock()
		var err error
		if f.limits, err = loadLimits(ctx, r.db, s); err == nil && f.prices == nil {
			f.prices, err = ListPrices(ctx, r.db, "")
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		if err == nil && r.epoch == epoch {
			r.known.Add(s, f.limits)
			r.prices = f.prices
		}
		return f, err
	})
	select {
	case res := <-flight:
		if res.Err != nil {
			return found{}, errUnavailable(res.Err)
		}
		return res.Val.(found), nil
	case <-ctx.Done():
		return found{}, apperr.From(ctx.Err())
	}
}

func loadLimits(ctx context.Context, db pgdb.DB, s subject) ([]*Limit, error) {
	rows, err := db.Query(ctx, `SELECT `+limitColumns+` FROM quota_limit
		WHERE tenant = $1 AND (project IS NULL OR project = $2) AND (api_key IS NULL OR api_key = $3)
		ORDER BY meter, period, api_key IS NULL, project IS NULL, id`,
		[16]byte(s.tenant), [16]byte(s.project), [16]byte(s.key))
	if err != nil {
		return nil, pgdb.Wrap("read limits", err)
	}
	list, err := pgx.CollectRows(rows, scanLimit)
	return list, pgdb.Wrap("read limits", err)
}
