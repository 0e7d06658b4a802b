package tenancy

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"errors"
	"sync"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"
	"github.com/jackc/pgx/v5"

	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/infra/pgdb"
)

const (
	// freshFor is how old an outcome may be and still be used without asking.
	freshFor = 500 * time.Millisecond
	// revokedWithin is how old an outcome may be while the database answers.
	// A revoked key is refused everywhere after it.
	revokedWithin = time.Second
	// outageFor is how old a good outcome may be while the database does not
	// answer.
	outageFor = 10 * time.Second
	// askFor bounds one look-up. It is below revokedWithin, because an outcome
	// speaks about the moment at which its look-up began.
	askFor = 900 * time.Millisecond
	// pauseFor is how long nobody asks after a look-up could not be made, so
	// that an outage does not cost every request the time of a look-up.
	pauseFor = 250 * time.Millisecond
	// goodKeys and badKeys bound the two memories. An entry is about 300 bytes.
	goodKeys = 50_000
	badKeys  = 10_000
)

// Authenticator finds the principal behind an API key. See the package comment
// for how old its knowledge may be. It is safe for concurrent use; Close must be
// called.
type Authenticator struct {
	db   pgdb.DB
	keys KeyFile
	now  func() time.Time

	base   context.Context // of look-ups, which outlive the request that began them
	cancel context.CancelFunc
	wg     sync.WaitGroup // look-ups

	mu      sync.Mutex
	closed  bool                                       // under mu
	good    *simplelru.LRU[[sha256.Size]byte, outcome] // under mu; by digest of the whole key
	bad     *simplelru.LRU[[sha256.Size]byte, outcome] // under mu; kept apart so that a flood of bad keys evicts no good one
	flights map[[sha256.Size]byte]*flight              // under mu
	paused  time.Time                                  // under mu; nobody asks before
	counts  AuthCounts                                 // under mu
}

// AuthCounts are counters since the start, for metrics.
type AuthCounts struct {
	Hits        uint64 // answered from memory
	Lookups     uint64 // asked the database
	Unavailable uint64 // look-ups that could not be made
	Stale       uint64 // answered from memory because the database did not answer
	Malformed   uint64 // keys that fail their checksum
}

// outcome of a check: a principal or a refusal. at is when the look-up began,
// because that is the moment it speaks about.
type outcome struct {
	principal Principal
	refusal   *apperr.Error
	at        time.Time
}

// flight is one look-up that any number of callers wait for.
type flight struct {
	done chan struct{} // closed when the fields below are set
	out  outcome
	err  error // the database could not be asked
}

// NewAuthenticator makes an authenticator over a pool of the role bulkhead_auth.
func NewAuthenticator(db pgdb.DB, keys KeyFile, now func() time.Time) *Authenticator {
	base, cancel := context.WithCancel(context.Background())
	good, _ := simplelru.NewLRU[[sha256.Size]byte, outcome](goodKeys, nil) // sizes are positive
	bad, _ := simplelru.NewLRU[[sha256.Size]byte, outcome](badKeys, nil)
	return &Authenticator{
		db: db, keys: keys, now: now, base: base, cancel: cancel,
		good:    good,
		bad:     bad,
		flights: make(map[[sha256.Size]byte]*flight),
	}
}

// Close stops look-ups and waits for them. Calls of Authenticate that wait for
// one get an unavailable error.
func (a *Authenticator) Close() {
	a.mu.Lock()
	a.closed = true
	a.mu.Unlock()
	a.cancel()
	a.wg.Wait()
}

// Counts returns the counters.
func (a *Authenticator) Counts() AuthCounts {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.counts
}

// Authenticate returns the principal of an API key. The error is an
// *apperr.Error: Unauthenticated with the code invalid_api_key for a key that is
// not ours or not in force, Forbidden with tenant_suspended, Unavailable with
// key_check_unavailable when the database cannot be asked.
func (a *Authenticator) Authenticate(ctx context.Context, bearer string) (Principal, error) {
	prefix, ok := parseKey(bearer)
	if !ok {
		a.mu.Lock()
		a.counts.Malformed++
		a.mu.Unlock()
		return Principal{}, errInvalidKey()
	}
	digest := sha256.Sum256([]byte(bearer))

	a.mu.Lock()
	now := a.now()
	known, found := a.recall(digest)
	age := now.Sub(known.at)
	if found && age < freshFor {
		a.counts.Hits++
		a.mu.Unlock()
		return known.result()
	}
	f := a.flights[digest]
	if f == nil && !a.closed && !now.Before(a.paused) {
		f = a.takeOff(digest, prefix, bearer, now)
	}
	if found && age < revokedWithin {
		a.counts.Hits++
		a.mu.Unlock()
		return known.result()
	}
	a.mu.Unlock()

	if f != nil {
		select {
		case <-f.done:
			if f.err == nil {
				return f.out.result()
			}
		case <-ctx.Done():
			return Principal{}, apperr.From(ctx.Err())
		}
	}
	// The database does not answer. A refusal is not kept: it might have been
	// a key that has been made since.
	if found && known.refusal == nil && age < outageFor {
		a.mu.Lock()
		a.counts.Stale++
		a.mu.Unlock()
		return known.principal, nil
	}
	cause := error(nil)
	if f != nil {
		cause = f.err
	}
	return Principal{}, apperr.Wrap(cause, apperr.Unavailable, "key_check_unavailable",
		"The API key cannot be checked now. It may well be valid; try again.").WithRetryAfter(retryAfter)
}

func (o outcome) result() (Principal, error) {
	if o.refusal != nil {
		refusal := *o.refusal // callers may add to theirs
		return Principal{}, &refusal
	}
	return o.principal, nil
}

// recall needs the lock.
func (a *Authenticator) recall(digest [sha256.Size]byte) (outcome, bool) {
	if o, ok := a.good.Get(digest); ok {
		return o, true
	}
	return a.bad.Get(digest)
}

// takeOff needs the lock. It starts a look-up that callers can wait for.
func (a *Authenticator) takeOff(digest [sha256.Size]byte, prefix, key string, at time.Time) *flight {
	f := &flight{done: make(chan struct{})}
	a.flights[digest] = f
	a.counts.Lookups++
	a.wg.Go(func() {
		ctx, cancel := context.WithTimeout(a.base, askFor)
		defer cancel()
		out, err := a.lookUp(ctx, prefix, key)
		out.at = at

		a.mu.Lock()
		defer a.mu.Unlock()
		delete(a.flights, digest)
		f.out, f.err = out, err
		switch {
		case err != nil:
			a.counts.Unavailable++
			if pgdb.IsUnavailable(err) {
				a.paused = a.now().Add(pauseFor)
			}
		case out.refusal != nil:
			a.good.Remove(digest)
			a.bad.Add(digest, out)
		default:
			a.bad.Remove(digest)
			a.good.Add(digest, out)
		}
		close(f.done)
	})
	return f
}

// lookUp asks the database. An error means that it could not be asked.
func (a *Authenticator) lookUp(ctx context.Context, prefix, key string) (outcome, error) {
	r, err := findKey(ctx, a.db, prefix)
	if errors.Is(err, pgx.ErrNoRows) {
		return outcome{refusal: errInvalidKey()}, nil
	}
	if err != nil {
		return outcome{}, pgdb.Wrap("look up API key", err)
	}
	pepper, ok := a.keys.PepperByID(r.pepperID)
	if !ok {
		// Not the caller's fault: this replica has a key file that lacks a pepper.
		return outcome{}, errPepper
	}
	if !hmac.Equal(hashKey(pepper, key), r.hmac) || r.revoked {
		return outcome{refusal: errInvalidKey()}, nil
	}
	if r.suspended {
		return outcome{refusal: apperr.New(apperr.Forbidden, "tenant_suspended", "The tenant is suspended.").WithNoRetry()}, nil
	}
	return outcome{principal: Principal{
		Tenant: r.tenant, Project: r.project, Key: r.key,
		Owner:  OwnerTag(a.keys.PlatformKey(), r.tenant, r.isolationEpoch),
		Scopes: storedScopes(r.scopes),
	}}, nil
}

// errPepper means that a key was hashed with a pepper that is not in the key
// file of this replica.
var errPepper = errors.New("the key file lacks the pepper of an API key")

func errInvalidKey() *apperr.Error {
	return apperr.New(apperr.Unauthenticated, "invalid_api_key", "The API key is not valid.").WithNoRetry()
}

// keyRow is what find_api_key returns.
type keyRow struct {
	key            id.Key
	tenant         id.Tenant
	project        id.Project
	hmac           []byte
	pepperID       string
	scopes         []string
	isolationEpoch int64
	revoked        bool
	suspended      bool
}

// findKey is written by hand because sqlc does not see the columns of a
// function.
func findKey(ctx context.Context, db pgdb.DB, prefix string) (r keyRow, err error) {
	row := db.QueryRow(ctx, `SELECT id, tenant, project, hmac, pepper_id, scopes, isolation_epoch, revoked, suspended
		FROM find_api_key($1)`, prefix)
	err = row.Scan((*[16]byte)(&r.key), (*[16]byte)(&r.tenant), (*[16]byte)(&r.project), &r.hmac, &r.pepperID,
		&r.scopes, &r.isolationEpoch, &r.revoked, &r.suspended)
	return r, err
}
