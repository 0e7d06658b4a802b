package token_test

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"strings"
	"testing"
	"time"

	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/tenancy/token"
	"bulkhead.dev/tenancy/token/issuertest"
)

var seeds = map[string][32]byte{"t1": {1}, "t2": {2}}

// admin is what a common token grants.
var admin = token.Grant{Subject: "usr_1", Tenant: tenantA, Roles: []string{"admin", "member"}}

func newMint(t testing.TB, c *clock, current string, names ...string) *token.Mint {
	t.Helper()
	some := map[string][32]byte{}
	for _, name := range append(names, current) {
		some[name] = seeds[name]
	}
	return must(token.NewMint(current, some, c.now))(t)
}

func TestMint(t *testing.T) {
	t.Parallel()
	var c clock
	m := newMint(t, &c, "t1")
	for _, g := range []token.Grant{
		admin,
		{Subject: "usr_1", Roles: []string{"operator"}},
		{Subject: "usr_1", Tenant: tenantA, Scopes: []string{"inference", "keys:read"}},
		{Subject: "usr_1", Tenant: tenantA, Roles: []string{"admin"}, Scopes: []string{"keys:read"}, Actor: "usr_2"},
	} {
		raw, minted, err := m.Mint(g, token.MaxPlatformLifetime)
		assert.NoError(t, err)
		assert.True(t, token.FromPlatform(raw.Reveal()))
		assert.True(t, len(minted.ID) == 22 && minted.Expires.Equal(c.now().Add(15*time.Minute)))
		got, err := m.Verify(raw.Reveal())
		assert.NoError(t, err)
		assert.Equal(t, got, minted)
		got.ID, got.Expires = "", time.Time{}
		assert.Equal(t, got, g)
	}
	one, _, err := m.Mint(admin, time.Minute)
	assert.NoError(t, err)
	two, _, err := m.Mint(admin, time.Minute)
	assert.NoError(t, err)
	assert.True(t, one.Reveal() != two.Reveal())
}

func TestMintRefuses(t *testing.T) {
	t.Parallel()
	var c clock
	m := newMint(t, &c, "t1")
	many := strings.Split(strings.Repeat("a ", 64)+"a", " ")
	for _, g := range []token.Grant{
		{}, {Subject: "u"}, {Roles: []string{"admin"}}, {Subject: "u", Roles: []string{""}}, {Subject: "u", Roles: []string{"a b"}},
		{Subject: "u", Roles: []string{"admin"}, Scopes: []string{}}, {Subject: "u", Scopes: []string{"a b"}}, {Subject: "u", Scopes: many},
		{Subject: "u\n", Roles: []string{"admin"}}, {Subject: strings.Repeat("u", 256), Roles: []string{"admin"}},
		{Subject: "u", Roles: []string{"admin"}, Actor: "u"}, {Subject: "u", Roles: many},
	} {
		_, _, err := m.Mint(g, time.Minute)
		assert.True(t, err != nil)
	}
	for _, d := range []time.Duration{0, -time.Minute, token.MaxPlatformLifetime + 1} {
		_, _, err := m.Mint(admin, d)
		assert.True(t, err != nil)
	}
	for current, seeds := range map[string]map[string][32]byte{"": nil, "t3": seeds, "../t1": {"../t1": {1}}, "T1": {"T1": {}}, "t1": {"t1": {}, "": {}}} {
		_, err := token.NewMint(current, seeds, c.now)
		assert.True(t, err != nil)
	}
}

// Old keys are accepted until they are taken out of the file. Only the current one signs.
func TestMintRotation(t *testing.T) {
	t.Parallel()
	var c clock
	before, during, after := newMint(t, &c, "t1", "t2"), newMint(t, &c, "t2", "t1"), newMint(t, &c, "t2")
	old, _, err := before.Mint(admin, time.Minute)
	assert.NoError(t, err)
	fresh, _, err := during.Mint(admin, time.Minute)
	assert.NoError(t, err)
	header, _, _ := parts(t, fresh.Reveal())
	assert.True(t, strings.Contains(header, `"kid":"t2"`))
	for _, raw := range []string{old.Reveal(), fresh.Reveal()} {
		_, err = during.Verify(raw)
		assert.NoError(t, err)
		_, err = before.Verify(raw)
		assert.NoError(t, err)
	}
	_, err = after.Verify(fresh.Reveal())
	assert.NoError(t, err)
	_, err = after.Verify(old.Reveal())
	refusal(t, err, token.ReasonKey)
}

// Each forged token differs in one thing from one that is good.
func TestAttackForgedPlatformTokens(t *testing.T) {
	t.Parallel()
	var c clock
	m := newMint(t, &c, "t1")
	mine := issuertest.Key{ID: "t1", Alg: "EdDSA", Private: private(seeds["t1"])}
	now := c.now().Unix()
	claims := func(with map[string]any) map[string]any {
		out := map[string]any{"iss": token.PlatformIssuer, "aud": token.PlatformAudience, "sub": "usr_1", "jti": "x", "iat": now, "nbf": now, "exp": now + 900,
			"tenant": tenantA.String(), "roles": []string{"admin"}}
		maps.Copy(out, with)
		maps.DeleteFunc(out, func(_ string, v any) bool { return v == nil })
		return out
	}
	typ := map[string]any{"typ": "bulkhead+jwt"}
	forge := func(k issuertest.Key, header, with map[string]any) string {
		h := maps.Clone(typ)
		maps.Copy(h, header)
		return must(k.Sign(h, claims(with)))(t)
	}
	_, err := m.Verify(forge(mine, nil, nil))
	assert.NoError(t, err)

	other := mine
	other.Private = private([32]byte{9})
	ec := key(t, "t1", "ES256")
	for name, f := range map[string]struct {
		raw string
		why token.Reason
	}{
		"another key under the same name": {forge(other, nil, nil), token.ReasonSignature},
		"a key name that is not there":    {forge(mine, map[string]any{"kid": "t9"}, nil), token.ReasonKey},
		"no key name":                     {forge(mine, map[string]any{"kid": ""}, nil), token.ReasonKey},
		"a path as key name":              {forge(mine, map[string]any{"kid": "../t1"}, nil), token.ReasonKey},
		"another algorithm":               {forge(ec, nil, nil), token.ReasonAlgorithm},
		"none":                            {forge(mine, map[string]any{"alg": "none"}, nil), token.ReasonAlgorithm},
		"an embedded key":                 {forge(mine, map[string]any{"jwk": map[string]any{}}, nil), token.ReasonHeader},
		"type of an ID token":             {forge(mine, map[string]any{"typ": "JWT"}, nil), token.ReasonType},
		"no type":                         {forge(mine, map[string]any{"typ": ""}, nil), token.ReasonType},
		"another issuer":                  {forge(mine, nil, map[string]any{"iss": "https://id.example.com"}), token.ReasonIssuer},
		"no issuer":                       {forge(mine, nil, map[string]any{"iss": nil}), token.ReasonClaims},
		"another audience":                {forge(mine, nil, map[string]any{"aud": "other"}), token.ReasonAudience},
		"two audiences":                   {forge(mine, nil, map[string]any{"aud": []string{"bulkhead", "other"}}), token.ReasonClaims},
		"expired":                         {forge(mine, nil, map[string]any{"iat": now - 65, "exp": now - 5}), token.ReasonExpired},
		"too long":                        {forge(mine, nil, map[string]any{"exp": now + 901}), token.ReasonLifetime},
		"issued in the future":            {forge(mine, nil, map[string]any{"iat": now + 6}), token.ReasonFuture},
		"not yet valid":                   {forge(mine, nil, map[string]any{"nbf": now + 6}), token.ReasonNotYet},
		"no exp":                          {forge(mine, nil, map[string]any{"exp": nil}), token.ReasonClaims},
		"no iat":                          {forge(mine, nil, map[string]any{"iat": nil}), token.ReasonClaims},
		"no nbf":                          {forge(mine, nil, map[string]any{"nbf": nil}), token.ReasonClaims},
		"no id":                           {forge(mine, nil, map[string]any{"jti": nil}), token.ReasonClaims},
		"no subject":                      {forge(mine, nil, map[string]any{"sub": nil}), token.ReasonClaims},
		"neither role nor scope":          {forge(mine, nil, map[string]any{"roles": nil}), token.ReasonClaims},
		"roles of the wrong type":         {forge(mine, nil, map[string]any{"roles": map[string]any{}}), token.ReasonClaims},
		"an empty restriction":            {forge(mine, nil, map[string]any{"scope": ""}), token.ReasonClaims},
		"a restriction of the wrong type": {forge(mine, nil, map[string]any{"scope": []string{"a"}}), token.ReasonClaims},
		"a tenant that is none":           {forge(mine, nil, map[string]any{"tenant": "ten_x"}), token.ReasonClaims},
		"an empty tenant":                 {forge(mine, nil, map[string]any{"tenant": ""}), token.ReasonClaims},
		"the zero tenant":                 {forge(mine, nil, map[string]any{"tenant": id.Tenant{}.String()}), token.ReasonClaims},
		"nobody acts":                     {forge(mine, nil, map[string]any{"act": map[string]any{}}), token.ReasonClaims},
		"an actor as text":                {forge(mine, nil, map[string]any{"act": "usr_2"}), token.ReasonClaims},
		"a claim that could restrict":     {forge(mine, nil, map[string]any{"cnf": map[string]any{}}), token.ReasonClaims},
		"oversized":                       {forge(mine, nil, map[string]any{"jti": strings.Repeat("x", token.MaxSize)}), token.ReasonSize},
	} {
		t.Run(name, func(t *testing.T) {
			g, err := m.Verify(f.raw)
			refusal(t, err, f.why)
			assert.Equal(t, g, token.Grant{})
		})
	}
	// Clocks of replicas differ by seconds.
	for _, with := range []map[string]any{{"iat": now + 5}, {"nbf": now + 5}, {"iat": now - 65, "exp": now - 4}} {
		_, err := m.Verify(forge(mine, nil, with))
		assert.NoError(t, err)
	}
	// The signature covers header and payload.
	header, payload, sig := parts(t, forge(mine, nil, nil))
	_, err = m.Verify(compact(header, strings.Replace(payload, "usr_1", "usr_2", 1), sig))
	refusal(t, err, token.ReasonSignature)
	_, err = m.Verify(compact(`{"alg":"EdDSA",`+header[1:], payload, sig))
	refusal(t, err, token.ReasonMalformed)
}

// A token of an issuer is none of the platform, even where the issuer has the platform's key and
// key name.
func TestAttackIssuersTokenAsPlatforms(t *testing.T) {
	t.Parallel()
	b := setup(t)
	m := newMint(t, &b.clock, "t1")
	b.issuer.AddKey(issuertest.Key{ID: "t1", Alg: "EdDSA", Private: private(seeds["t1"])})
	claims := map[string]any{"nbf": b.now().Unix(), "jti": "x", "roles": []string{"admin"}, "aud": token.PlatformAudience}
	raw := b.token(t, claims)
	b.good(t, raw)
	assert.False(t, token.FromPlatform(raw))
	_, err := m.Verify(raw)
	refusal(t, err, token.ReasonType)
	raw = must(b.issuer.Key().Sign(map[string]any{"typ": "bulkhead+jwt"}, b.issuer.Claims(claims)))(t)
	assert.True(t, token.FromPlatform(raw))
	_, err = m.Verify(raw)
	refusal(t, err, token.ReasonIssuer)
}

func TestMintPrintsNothing(t *testing.T) {
	t.Parallel()
	var c clock
	m := newMint(t, &c, "t1")
	raw, _, err := m.Mint(admin, time.Minute)
	assert.NoError(t, err)
	var log strings.Builder
	slog.New(slog.NewJSONHandler(&log, nil)).Info("x", "mint", m, "token", raw)
	j, err := json.Marshal(map[string]any{"m": m, "t": raw})
	assert.NoError(t, err)
	all := log.String() + string(j) + fmt.Sprintf("%v %+v %#v %d %x %v %v", m, m, m, m, m, *m, raw)
	assert.False(t, strings.Contains(all, raw.Reveal()))
	for _, form := range []string{"%d", "%x", "%v"} {
		assert.False(t, strings.Contains(all, strings.Trim(fmt.Sprintf(form, []byte(private(seeds["t1"]))[:32]), "[]")))
	}
}
