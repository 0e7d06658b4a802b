package token

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"net/netip"
	"sync"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"

	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/id"
)

// Identity is who presents a token of an external issuer, as the configuration of that
// issuer reads it. A person is an Issuer and a Subject together; neither alone is.
type Identity struct {
	Issuer  string    // Issuer.ID
	Tenant  id.Tenant // of the issuer; zero for the platform
	Subject string
	Email   string   // "" where there is none; a label
	Roles   []string // sorted, each once; nil where there are none
	Expires time.Time
	TokenID string // jti; "" where the token has none
}

// Options of a [Verifier].
type Options struct {
	// Internal are networks with addresses that are not of the Internet in which issuers may
	// be: those of an identity provider in the own network, or 127.0.0.0/8 and ::1/128 for one on
	// this machine. Everything else that is not of the Internet is not connected to, since whoever
	// may configure an issuer could reach internal services through it.
	Internal []netip.Prefix
	// RootCAs sign certificates of issuers; nil means those of the system.
	RootCAs *x509.CertPool
}

// Verifier checks tokens of external issuers. It is safe for concurrent use; Close must be
// called.
type Verifier struct {
	issuers Issuers
	keys    *keyring
	now     func() time.Time

	mu       sync.Mutex
	verified *simplelru.LRU[[sha256.Size]byte, *verified] // under mu; by digest of the whole token
	counts   Counts                                       // under mu
}

// verified is a token whose signature was good. Everything else about it is decided anew each time.
type verified struct {
	*opened
	key   *publicKey // that the signature was checked with
	until time.Time  // when this is forgotten
}

// Counts are counters since the start, for metrics.
type Counts struct {
	Hits     uint64 // good tokens whose signature was remembered
	Verified uint64 // good tokens whose signature was checked
	Fetches  uint64 // of keys, begun
	Failures uint64 // of keys, failed
}

// NewVerifier makes a verifier for the issuers that are trusted.
func NewVerifier(issuers Issuers, now func() time.Time, o Options) *Verifier {
	seen, _ := simplelru.NewLRU[[sha256.Size]byte, *verified](maxVerified, nil) // fails for a size of 0 only
	return &Verifier{issuers: issuers, now: now, verified: seen, keys: newKeyring(newClient(o.Internal, o.RootCAs), now, fetchFor)}
}

// Close stops fetches and waits for them. Calls of Verify that wait for one get an
// unavailable error.
func (v *Verifier) Close() { v.keys.close() }

// Counts returns the counters.
func (v *Verifier) Counts() Counts {
	v.mu.Lock()
	defer v.mu.Unlock()
	out := v.counts
	out.Fetches, out.Failures = v.keys.counts()
	return out
}

// Verify returns who presents a token. The error is an *apperr.Error: Unauthenticated with the code
// invalid_token and a [Reason] as its cause for a token that is not good, Unavailable with token_check_unavailable
// when that cannot be known now.
func (v *Verifier) Verify(ctx context.Context, raw string) (Identity, error) {
	if len(raw) > MaxSize {
		return Identity{}, refuse(ReasonSize)
	}
	now, digest := v.now(), sha256.Sum256([]byte(raw))
	t := v.recall(digest, now)
	if t == nil {
		o, err := open(raw, pinned, foreign)
		if err != nil {
			return Identity{}, err
		}
		t = &verified{opened: o}
	}
	// What the token says of itself has chosen among issuers that are configured, and chooses
	// among keys that they have published. It does nothing else.
	trusted, err := v.trusted(ctx, t.opened)
	if err != nil {
		return Identity{}, err
	}
	key, err := v.keys.find(ctx, t.issuer, t.kid, t.alg)
	if err != nil {
		return Identity{}, err
	}
	fresh := t.key != key
	if fresh {
		if err := t.verify(key.public); err != nil {
			return Identity{}, err
		}
		t = &verified{opened: t.opened, key: key, until: now.Add(verifiedFor)}
	}
	// The signature is the issuer's.
	is, err := choose(trusted, t.opened)
	if err != nil {
		return Identity{}, err
	}
	if err := t.inTime(is.URL, is.Audience, is.ClockSkew, MaxLifetime, now); err != nil {
		return Identity{}, err
	}
	who, err := is.identity(t.claims)
	if err != nil {
		return Identity{}, err
	}
	v.remember(digest, t, fresh)
	return who, nil
}

// trusted returns the issuers that are configured for the URL that a token names, of which at
// least one may sign so.
func (v *Verifier) trusted(ctx context.Context, t *opened) ([]Issuer, error) {
	if _, err := issuerURL(t.issuer); err != nil {
		return nil, refuse(ReasonIssuer) // also the platform's own, which no one can configure
	}
	all, err := v.issuers.IssuersByURL(ctx, t.issuer)
	if err != nil {
		if ctx.Err() != nil {
			return nil, apperr.From(ctx.Err())
		}
		return nil, cannotCheck(err, time.Second)
	}
	known, allowed := false, false
	for i := range all {
		known = known || all[i].URL == t.issuer
		allowed = allowed || all[i].URL == t.issuer && all[i].allows(t.alg)
	}
	switch {
	case !known:
		return nil, refuse(ReasonIssuer)
	case !allowed:
		return nil, refuse(ReasonAlgorithm)
	}
	return all, nil
}

// choose returns the one issuer that a token is of. Where it could be of several it is of none: guessing
// could let somebody of one tenant into another. Thousands of tenants may share an issuer, so only
// what fits is looked at closely.
func choose(trusted []Issuer, t *opened) (*Issuer, error) {
	var found *Issuer
	for i := range trusted {
		is := &trusted[i]
		if is.URL != t.issuer || !is.wants(t.claims) || is.Validate() != nil {
			continue
		}
		if found != nil {
			return nil, refuse(ReasonAmbiguous)
		}
		found = is
	}
	switch {
	case found == nil:
		return nil, refuse(ReasonAudience)
	case !found.allows(t.alg):
		return nil, refuse(ReasonAlgorithm)
	}
	return found, nil
}

// recall returns a token that was verified, or nil.
func (v *Verifier) recall(digest [sha256.Size]byte, now time.Time) *verified {
	v.mu.Lock()
	defer v.mu.Unlock()
	t, ok := v.verified.Get(digest)
	if !ok {
		return nil
	}
	if !now.Before(t.until) || !now.Before(t.expires.Time) {
		v.verified.Remove(digest)
		return nil
	}
	return t
}

// remember keeps a token whose signature was checked just now, and counts.
func (v *Verifier) remember(digest [sha256.Size]byte, t *verified, fresh bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if !fresh {
		v.counts.Hits++
		return
	}
	v.counts.Verified++
	v.verified.Add(digest, t)
}
