package token_test

import (
	"strings"
	"testing"
	"time"

	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/tenancy/token"
)

// FuzzVerify: whatever the bytes, both verifiers answer with an *apperr.Error, and only tokens that were
// signed are good.
func FuzzVerify(f *testing.F) {
	b := setup(f)
	b.config.Claims = token.Mapping{Subject: "/a/b", Email: "email", Roles: "/r/0/x", RoleNames: map[string]string{"x": "y"}, Required: map[string]string{"/o": "true"}}
	b.set(b.config)
	m := newMint(f, &b.clock, "t1")
	platform, _, err := m.Mint(admin, time.Minute)
	assert.NoError(f, err)
	ours := b.token(f, map[string]any{"a": map[string]any{"b": "s"}, "email": "e", "r": map[string]any{"0": map[string]any{"x": "x"}}, "o": true})
	b.good(f, ours)
	good := map[string]bool{platform.Reveal(): true, ours: true}
	for raw := range good {
		f.Add(raw)
		header, payload, sig := parts(f, raw)
		f.Add(compact(`{"alg":"none"}`, payload, nil))
		f.Add(compact(header, `{"iss":"`+b.issuer.URL()+`","aud":["bulkhead"],"exp":1e3,"iat":-0}`, sig))
		f.Add(compact(header, `null`, sig))
		f.Add(compact(`{"alg":"ES256","kid":"`+strings.Repeat("k", 100)+`"}`, payload, sig))
		f.Add(raw[:len(raw)/2])
		f.Add(raw + "." + raw)
	}
	f.Fuzz(func(t *testing.T, raw string) {
		_, one := b.v.Verify(t.Context(), raw)
		_, two := m.Verify(raw)
		for _, err := range []error{one, two} {
			if err != nil {
				e := assert.ErrorAs[*apperr.Error](t, err)
				assert.True(t, e.Kind == apperr.Unauthenticated || e.Kind == apperr.Unavailable)
			} else if !good[raw] {
				t.Errorf("a token that nobody signed is good: %q", raw)
			}
		}
		token.FromPlatform(raw)
	})
}

// FuzzKeySet: what an issuer answers is keys that can be used, or an error.
func FuzzKeySet(f *testing.F) {
	for _, s := range []string{`{"keys":[{"kty":"OKP","crv":"Ed25519","x":"11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo","kid":"a"}]}`,
		`{"keys":[{"kty":"RSA","n":"AQAB","e":"AQAB"},{"kty":"EC","crv":"P-256","x":"AAAA","y":"AAAA"}]}`, `{"keys":[{"kty":"oct","k":"AA","x5c":["AA"],"x5u":":"}]}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if n, err := token.ParseKeys(b); (n == 0) != (err != nil) {
			t.Errorf("%d keys and error %v", n, err)
		}
	})
}
