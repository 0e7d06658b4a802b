package token_test

import (
	"context"
	"crypto/ed25519"
	"encoding/base64"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"go.uber.org/goleak"

	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/tenancy/token"
	"bulkhead.dev/tenancy/token/issuertest"
)

func TestMain(m *testing.M) {
	issuertest.Main()
	goleak.VerifyTestMain(m)
}

var (
	tenantA, tenantB = id.Tenant{1}, id.Tenant{2}
	local            = []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}
)

// clock stands still unless it is moved.
type clock struct{ offset atomic.Int64 }

func (c *clock) now() time.Time {
	return time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC).Add(time.Duration(c.offset.Load()))
}
func (c *clock) advance(d time.Duration) { c.offset.Add(int64(d)) }

// trust is the issuers that are configured.
type trust struct {
	mu   sync.Mutex
	list []token.Issuer // under mu
	err  error          // under mu
	asks []string       // under mu; URLs that were asked for
	all  bool           // under mu; answer with all issuers, whatever the URL
}

func (s *trust) IssuersByURL(_ context.Context, url string) (out []token.Issuer, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asks = append(s.asks, url)
	for _, is := range s.list {
		if is.URL == url || s.all {
			out = append(out, is)
		}
	}
	return out, s.err
}

func (s *trust) set(list ...token.Issuer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.list = list
}

// bundle is a verifier that trusts one issuer for one tenant.
type bundle struct {
	clock
	trust
	issuer *issuertest.Issuer
	config token.Issuer // of the issuer
	v      *token.Verifier
}

func setup(t testing.TB) *bundle {
	t.Helper()
	b := &bundle{}
	b.issuer = issuertest.Start(t, "", b.now)
	b.config = token.Issuer{ID: "one", Tenant: tenantA, URL: b.issuer.URL(), Audience: "bulkhead"}
	b.set(b.config)
	b.v = token.NewVerifier(&b.trust, b.now, token.Options{Internal: local})
	t.Cleanup(b.v.Close)
	return b
}

// token makes a good token of the issuer, with other claims on top.
func (b *bundle) token(t testing.TB, with map[string]any) string {
	t.Helper()
	return must(b.issuer.Token(with))(t)
}

// good stops the test unless the token is good.
func (b *bundle) good(t testing.TB, raw string) token.Identity {
	t.Helper()
	who, err := b.v.Verify(t.Context(), raw)
	assert.NoError(t, err)
	return who
}

// refused stops the test unless the token is refused for a reason.
func (b *bundle) refused(t testing.TB, raw string, why token.Reason) {
	t.Helper()
	who, err := b.v.Verify(t.Context(), raw)
	assert.Equal(t, who, token.Identity{})
	refusal(t, err, why)
}

func refusal(t testing.TB, err error, why token.Reason) {
	t.Helper()
	e := assert.ErrorAs[*apperr.Error](t, err)
	assert.Equal(t, e.Code, "invalid_token")
	assert.Equal(t, e.Kind, apperr.Unauthenticated)
	assert.True(t, e.NoRetry)
	assert.Equal(t, assert.ErrorAs[token.Reason](t, err), why)
}

// unknown stops the test unless nothing can be said about the token.
func (b *bundle) unknown(t testing.TB, raw string) *apperr.Error {
	t.Helper()
	_, err := b.v.Verify(t.Context(), raw)
	e := assert.ErrorAs[*apperr.Error](t, err)
	assert.Equal(t, e.Code, "token_check_unavailable")
	assert.Equal(t, e.Kind, apperr.Unavailable)
	assert.True(t, e.RetryAfter >= time.Second && e.RetryAfter <= token.FetchEvery)
	return e
}

// fetches returns how often the issuer was asked for its keys.
func (b *bundle) fetches() int { return b.issuer.Requests()["/keys"] }

func must[T any](v T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		assert.NoError(t, err)
		return v
	}
}

// key makes a key pair.
func key(t testing.TB, id, alg string) issuertest.Key {
	t.Helper()
	return must(issuertest.NewKey(id, alg))(t)
}

// compact puts segments together as they are.
func compact(header, payload string, sig []byte) string {
	e := base64.RawURLEncoding
	return e.EncodeToString([]byte(header)) + "." + e.EncodeToString([]byte(payload)) + "." + e.EncodeToString(sig)
}

// parts takes a token apart: header and payload as text, signature as bytes.
func parts(t testing.TB, raw string) (header, payload string, sig []byte) {
	t.Helper()
	s := strings.Split(raw, ".")
	var b [3][]byte
	for i := range b {
		b[i] = must(base64.RawURLEncoding.DecodeString(s[i]))(t)
	}
	return string(b[0]), string(b[1]), b[2]
}

// method returns how a key signs.
func method(k issuertest.Key) jwt.SigningMethod { return jwt.GetSigningMethod(k.Alg) }

// private returns the key of a seed.
func private(seed [32]byte) ed25519.PrivateKey { return ed25519.NewKeyFromSeed(seed[:]) }
