package token_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/tenancy/token"
)

// A token of each algorithm is good, with the key that was published for it.
func TestAlgorithms(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, alg := range token.Algorithms() {
		b.issuer.AddKey(key(t, "key-"+alg, alg))
	}
	for range token.Algorithms() {
		assert.Equal(t, b.good(t, b.token(t, nil)).Subject, "alice")
		b.issuer.RemoveKey(b.issuer.Key().ID) // the one before signs
	}
	assert.Equal(t, b.fetches(), 1)
}

func TestIdentity(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.config.Claims = token.Mapping{Email: "email", Roles: "/realm_access/roles", RoleNames: map[string]string{"ops": "admin", "root": "admin", "dev": "member"}}
	b.set(b.config)
	exp := b.now().Add(time.Hour)
	who := b.good(t, b.token(t, map[string]any{"email": "a@example.com", "jti": "t1", "exp": exp.Unix(), "aud": []string{"account", "bulkhead"},
		"realm_access": map[string]any{"roles": []string{"root", "dev", "ops", "admin"}}}))
	assert.Equal(t, who, token.Identity{Issuer: "one", Tenant: tenantA, Subject: "alice", Email: "a@example.com",
		Roles: []string{"admin", "member"}, Expires: exp.Local(), TokenID: "t1"})

	none := b.good(t, b.token(t, map[string]any{"email": nil, "realm_access": "none"}))
	assert.Equal(t, none.Email+none.TokenID, "")
	assert.Equal(t, none.Roles, nil)
	for _, verified := range []any{false, "false", nil, 1} {
		claims := b.issuer.Claims(map[string]any{"email": "a@example.com"})
		claims["email_verified"] = verified
		assert.Equal(t, b.good(t, must(b.issuer.Key().Sign(nil, claims))(t)).Email, "")
	}
	for _, verified := range []any{true, "true"} {
		assert.Equal(t, b.good(t, b.token(t, map[string]any{"email": "a@example.com", "email_verified": verified})).Email, "a@example.com")
	}
	// Claims that are there and are not what they should be are not guessed at.
	for name, v := range map[string]any{"sub": 1, "email": []string{"a"}, "jti": 7, "realm_access": map[string]any{"roles": []any{1}}} {
		_, err := b.v.Verify(t.Context(), b.token(t, map[string]any{name: v}))
		assert.Equal(t, assert.ErrorAs[*apperr.Error](t, err).Code, "invalid_token")
	}
	for _, sub := range []any{nil, "", "a\nb", string(make([]byte, 256))} {
		b.refused(t, b.token(t, map[string]any{"sub": sub}), token.ReasonClaims)
	}
	b.config.Claims = token.Mapping{Subject: "oid"}
	b.set(b.config)
	assert.Equal(t, b.good(t, b.token(t, map[string]any{"oid": "o-1"})).Subject, "o-1")
	b.refused(t, b.token(t, nil), token.ReasonClaims)
}

// Not to know which issuers are trusted is not to know whether a token is good.
func TestIssuersAreNotKnown(t *testing.T) {
	t.Parallel()
	b := setup(t)
	raw := b.token(t, nil)
	b.good(t, raw)
	b.err = errors.New("no database")
	for _, raw := range []string{raw, b.token(t, map[string]any{"sub": "bob"})} {
		b.unknown(t, raw)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := b.v.Verify(ctx, raw)
	assert.Equal(t, assert.ErrorAs[*apperr.Error](t, err).Kind, apperr.Canceled)
	b.err = nil
	b.good(t, raw)
}

// An issuer without a tenant is the platform's.
func TestPlatformWideIssuer(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.config.Tenant = id.Tenant{}
	b.set(b.config)
	assert.Equal(t, b.good(t, b.token(t, nil)).Tenant, id.Tenant{})
}

func TestClockSkew(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.config.ClockSkew = time.Minute
	b.set(b.config)
	at := func(iat, nbf, exp time.Duration) string {
		now := b.now()
		return b.token(t, map[string]any{"iat": now.Add(iat).Unix(), "nbf": now.Add(nbf).Unix(), "exp": now.Add(exp).Unix()})
	}
	b.good(t, at(-2*time.Minute, -2*time.Minute, -59*time.Second))
	b.refused(t, at(-2*time.Minute, -2*time.Minute, -time.Minute), token.ReasonExpired)
	b.good(t, at(time.Minute, time.Minute, 2*time.Minute))
	b.refused(t, at(61*time.Second, 0, 2*time.Minute), token.ReasonFuture)
	b.refused(t, at(0, 61*time.Second, 2*time.Minute), token.ReasonNotYet)
}
