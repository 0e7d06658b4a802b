package token_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"bulkhead.dev/infra/assert"
	"bulkhead.dev/tenancy/token"
)

// What is remembered is found by the whole token. Tokens that share their beginning, their end or everything
// but the signature are other tokens.
func TestAttackCutCacheKeys(t *testing.T) {
	t.Parallel()
	b := setup(t)
	raw := b.token(t, nil)
	b.good(t, raw)
	b.good(t, raw)
	assert.Equal(t, b.v.Counts(), token.Counts{Hits: 1, Verified: 1, Fetches: 1})
	header, payload, sig := parts(t, raw)

	// Same header and payload, another signature: one bit at each end of it, and one of another key.
	for _, at := range []int{0, len(sig) - 1} {
		other := append([]byte(nil), sig...)
		other[at] ^= 1
		b.refused(t, compact(header, payload, other), token.ReasonSignature)
	}
	b.refused(t, resign(t, key(t, "k1", "ES256"), header, payload), token.ReasonSignature)
	b.refused(t, compact(header, payload, nil), token.ReasonSignature)
	// Same header and signature, so same beginning and same end, another payload of the same length.
	for from, to := range map[string]string{"alice": "mable", `"bulkhead"`: `"bulkhaed"`} {
		b.refused(t, compact(header, strings.Replace(payload, from, to, 1), sig), token.ReasonSignature)
	}
	// Same payload and signature, another header.
	b.refused(t, compact(strings.Replace(header, `"typ":"JWT"`, `"typ":"jwt"`, 1), payload, sig), token.ReasonSignature)
	// Two good tokens that share their first hundreds of bytes are two people.
	long := strings.Repeat("a", 1000)
	for _, sub := range []string{"bob", "eve"} {
		k := b.issuer.Key()
		p := fmt.Sprintf(`{"a":%q,"iss":%q,"aud":"bulkhead","iat":%d,"exp":%d,"sub":%q,"z":%q}`, long, b.issuer.URL(), b.now().Unix(), b.now().Unix()+60, sub, long)
		assert.Equal(t, b.good(t, resign(t, k, header, p)).Subject, sub)
	}
}

// What is remembered is the signature. It is forgotten after a minute, and at exp.
func TestRememberedFor(t *testing.T) {
	t.Parallel()
	b := setup(t)
	raw := b.token(t, nil)
	b.good(t, raw)
	b.advance(token.VerifiedFor - 1)
	b.good(t, raw)
	assert.Equal(t, b.v.Counts().Verified, 1)
	b.advance(1)
	b.good(t, raw)
	assert.Equal(t, b.v.Counts().Verified, 2)

	short := b.token(t, map[string]any{"exp": b.now().Add(time.Second).Unix()})
	b.good(t, short)
	b.advance(time.Second)
	b.refused(t, short, token.ReasonExpired)
	assert.Equal(t, token.Remembered(b.v), 1)
	b.refused(t, b.token(t, map[string]any{"aud": "other"}), token.ReasonAudience)
	assert.Equal(t, token.Remembered(b.v), 1) // only good tokens are
}

func TestRememberedIsBounded(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.issuer.AddKey(key(t, "fast", "EdDSA"))
	first := b.token(t, nil)
	b.good(t, first)
	for i := range token.MaxVerified {
		b.good(t, b.token(t, map[string]any{"jti": fmt.Sprint(i)}))
	}
	assert.Equal(t, token.Remembered(b.v), token.MaxVerified)
	b.good(t, first)
	assert.Equal(t, b.v.Counts().Hits, 0)
}

// An issuer that is not trusted any more, or is trusted otherwise, is so with the next call.
func TestIssuerRemoved(t *testing.T) {
	t.Parallel()
	b := setup(t)
	raw := b.token(t, map[string]any{"role": "ops"})
	b.good(t, raw)
	b.set()
	b.refused(t, raw, token.ReasonIssuer)
	other := b.config
	other.ID, other.Tenant, other.Claims = "two", tenantB, token.Mapping{Roles: "role", RoleNames: map[string]string{"ops": "admin"}}
	b.set(other)
	who := b.good(t, raw)
	assert.Equal(t, who.Tenant, tenantB)
	assert.Equal(t, who.Roles, []string{"admin"})
	b.set(b.config, other)
	b.refused(t, raw, token.ReasonAmbiguous)
	other.Audience = "other"
	b.set(other)
	b.refused(t, raw, token.ReasonAudience)
	b.config.Algorithms = []string{"EdDSA"}
	b.set(b.config)
	b.refused(t, raw, token.ReasonAlgorithm)
	other = b.config
	other.Algorithms, other.ClockSkew = nil, token.MaxClockSkew+1 // cannot be configured
	b.set(other)
	b.refused(t, raw, token.ReasonAudience)
	assert.Equal(t, b.v.Counts().Verified, 1) // all of it without looking at the signature again
}
