package token_test

import (
	"strings"
	"testing"
	"time"

	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/tenancy/token"
	"bulkhead.dev/tenancy/token/issuertest"
)

// FuzzVerify: whatever the bytes, both verifiers answer with an *apperr.Error, and only tokens that were
// signed are good.
func FuzzVerify(f *testing.F) {
	b := setup(f)
	b.config.Claims = token.Mapping{Subject: "/a/b", Email: "email", Roles: "/r/0/x", RoleNames: map[string]string{"x": "y"}, Required: map[string]string{"/o": "true"}}
	b.set(b.config)
	m := newMint(f, &b.clock, "t1")
	// The processes of a fuzzer share what they find, so the good token is the same in all.
	own := issuertest.Key{ID: "t1", Alg: "EdDSA", Private: private(seeds["t1"])}
	now := b.now().Unix()
	platform := must(own.Sign(map[string]any{"typ": "bulkhead+jwt"}, map[string]any{"iss": token.PlatformIssuer, "aud": token.PlatformAudience,
		"sub": "usr_1", "jti": "x", "iat": now, "nbf": now, "exp": now + 60, "roles": []string{"admin"}}))(f)
	_, err := m.Verify(platform)
	assert.NoError(f, err)
	ours := b.token(f, map[string]any{"a": map[string]any{"b": "s"}, "email": "e", "r": map[string]any{"0": map[string]any{"x": "x"}}, "o": true})
	b.good(f, ours)
	good := map[string]bool{platform: true, ours: true}
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

// FuzzSigned: also behind a good signature, header and payload are refused or mean what they say.
func FuzzSigned(f *testing.F) {
	b := setup(f)
	b.config.Claims = token.Mapping{Subject: "/a/b", Email: "email", Roles: "/r/0/x", RoleNames: map[string]string{"x": "y"}, Required: map[string]string{"/o": "true"}}
	b.set(b.config)
	m := newMint(f, &b.clock, "t1")
	platform, _, err := m.Mint(admin, time.Minute)
	assert.NoError(f, err)
	ours := b.token(f, map[string]any{"a": map[string]any{"b": "s"}, "email": "e", "r": map[string]any{"0": map[string]any{"x": "x"}}, "o": true})
	for _, raw := range []string{platform.Reveal(), ours} {
		header, payload, _ := parts(f, raw)
		// The issuer is at another port each time.
		f.Add(header, strings.ReplaceAll(payload, b.issuer.URL(), "URL"))
	}
	own := issuertest.Key{ID: "t1", Alg: "EdDSA", Private: private(seeds["t1"])}
	f.Fuzz(func(t *testing.T, header, payload string) {
		payload = strings.ReplaceAll(payload, "URL", b.issuer.URL())
		if who, err := b.v.Verify(t.Context(), resign(t, b.issuer.Key(), header, payload)); err == nil {
			assert.True(t, who.Issuer == "one" && who.Tenant == tenantA && who.Subject != "" && len(who.Roles) < 2)
			assert.True(t, who.Expires.After(b.now()) && who.Expires.Before(b.now().Add(token.MaxLifetime+time.Second)))
		} else {
			assert.ErrorAs[*apperr.Error](t, err)
		}
		if g, err := m.Verify(resign(t, own, header, payload)); err == nil {
			_, _, err := m.Mint(g, time.Second) // it is something that can be granted
			assert.NoError(t, err)
			assert.True(t, g.ID != "" && g.Expires.Before(b.now().Add(token.MaxPlatformLifetime+token.PlatformSkew+time.Second)))
		} else {
			refusal(t, err, assert.ErrorAs[token.Reason](t, err))
		}
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
