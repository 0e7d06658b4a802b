package token

import (
	"context"
	"net/http"
	"sync"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"

	"bulkhead.dev/infra/apperr"
)

// keyring remembers the keys of issuers and asks for them, as rarely as the
// constants in limits.go say. It is safe for concurrent use.
type keyring struct {
	client *http.Client
	now    func() time.Time
	limit  time.Duration // of a fetch

	base   context.Context // of fetches, which outlive the call that began them
	cancel context.CancelFunc
	wg     sync.WaitGroup // fetches

	mu      sync.Mutex
	closed  bool                            // under mu
	sources *simplelru.LRU[string, *source] // under mu; by URL of the issuer
	fetches uint64                          // under mu
	failed  uint64                          // under mu
}

// source is one issuer. All of it is under the lock of the keyring.
type source struct {
	keys   []*publicKey
	at     time.Time // when the fetch that brought the keys began; zero where there are none
	tried  time.Time // when the last fetch began
	err    error     // of the last fetch
	flight *flight   // the fetch that is under way, or nil
}

// flight is one fetch that any number of callers wait for.
type flight struct {
	done chan struct{} // closed when the fields below are set
	keys []*publicKey
	err  error
}

func newKeyring(client *http.Client, now func() time.Time, limit time.Duration) *keyring {
	base, cancel := context.WithCancel(context.Background())
	sources, _ := simplelru.NewLRU[string, *source](maxSources, nil) // fails for a size of 0 only
	return &keyring{client: client, now: now, limit: limit, base: base, cancel: cancel, sources: sources}
}

func (r *keyring) close() {
	r.mu.Lock()
	r.closed = true
	r.mu.Unlock()
	r.cancel()
	r.wg.Wait()
}

// find returns the key of an issuer, which must be a configured one. The error is an *apperr.Error:
// Unauthenticated where the issuer has no such key, Unavailable where it cannot be asked. "No such key" is
// knowledge at most fetchEvery old.
func (r *keyring) find(ctx context.Context, issuer, kid, alg string) (*publicKey, error) {
	r.mu.Lock()
	s, ok := r.sources.Get(issuer)
	if !ok {
		s = new(source)
		r.sources.Add(issuer, s)
	}
	now := r.now()
	age := now.Sub(s.at)
	known := !s.at.IsZero() && age < keysServeFor
	var key *publicKey
	if known {
		if key = pick(s.keys, kid, alg); key != nil && age < keysRenewAfter {
			r.mu.Unlock()
			return key, nil
		}
	}
	pause := fetchEvery - now.Sub(s.tried)
	if s.flight == nil && !r.closed && (s.tried.IsZero() || pause <= 0) {
		r.takeOff(issuer, s, now)
	}
	f, last, until := s.flight, s.err, s.at.Add(keysServeFor)
	// While an issuer does not answer, nobody waits for it who can do without.
	wait := key == nil || age >= keysWaitAfter && last == nil
	r.mu.Unlock()

	if !wait {
		return key, nil
	}
	if f == nil { // it was asked just now
		if known && key == nil && age < fetchEvery {
			return nil, refuse(ReasonKey)
		}
		return nil, cannotCheck(last, pause)
	}
	select {
	case <-f.done:
	case <-ctx.Done():
		return nil, apperr.From(ctx.Err())
	}
	switch {
	case f.err == nil:
		if key := pick(f.keys, kid, alg); key != nil {
			return key, nil
		}
		return nil, refuse(ReasonKey)
	case key != nil && r.now().Before(until):
		return key, nil
	}
	return nil, cannotCheck(f.err, fetchEvery)
}

// takeOff needs the lock. It starts a fetch that callers can wait for.
func (r *keyring) takeOff(issuer string, s *source, at time.Time) {
	f := &flight{done: make(chan struct{})}
	s.flight, s.tried = f, at
	r.fetches++
	r.wg.Go(func() {
		ctx, cancel := context.WithTimeout(r.base, r.limit)
		defer cancel()
		keys, err := fetchKeys(ctx, r.client, issuer)

		r.mu.Lock()
		defer r.mu.Unlock()
		f.keys, f.err = keys, err
		s.flight, s.err = nil, err
		if err == nil {
			s.keys, s.at = keys, at
		} else {
			r.failed++
		}
		close(f.done)
	})
}

func (r *keyring) counts() (fetches, failed uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.fetches, r.failed
}
