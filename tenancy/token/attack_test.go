package token_test

import (
	"crypto/hmac"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"bulkhead.dev/infra/assert"
	"bulkhead.dev/tenancy/token"
	"bulkhead.dev/tenancy/token/issuertest"
)

// resign signs any header and payload with a key of the issuer, so that only what a test is about is
// wrong with the token.
func resign(t testing.TB, k issuertest.Key, header, payload string) string {
	t.Helper()
	raw := compact(header, payload, nil)
	signed := raw[:len(raw)-1]
	sig := must(method(k).Sign(signed, k.Private))(t)
	return signed + "." + base64.RawURLEncoding.EncodeToString(sig)
}

func TestAttackAlgNone(t *testing.T) {
	t.Parallel()
	b := setup(t)
	header, payload, sig := parts(t, b.token(t, nil))
	for _, alg := range []string{`"none"`, `"None"`, `"NONE"`, `"nOnE"`, `""`} {
		h := strings.Replace(header, `"ES256"`, alg, 1)
		b.refused(t, compact(h, payload, nil), token.ReasonAlgorithm)
		b.refused(t, compact(h, payload, sig), token.ReasonAlgorithm)
	}
	b.refused(t, compact(`{"kid":"k1"}`, payload, sig), token.ReasonAlgorithm)
	b.refused(t, compact(header, payload, nil), token.ReasonSignature) // the right algorithm and nothing signed
	for _, alg := range []string{`null`, `1`, `["none"]`, `{}`} {
		b.refused(t, compact(strings.Replace(header, `"ES256"`, alg, 1), payload, nil), token.ReasonHeader)
	}
}

// The public key of an issuer is no secret, so nothing that is signed with it counts.
func TestAttackHMACWithPublicKey(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, alg := range []string{"RS256", "ES256", "EdDSA"} {
		k := key(t, "k-"+alg, alg)
		b.issuer.AddKey(k)
		der := must(x509.MarshalPKIXPublicKey(k.Private.Public()))(t)
		text := pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der})
		header, payload, _ := parts(t, b.token(t, nil))
		h := strings.Replace(header, `"`+alg+`"`, `"HS256"`, 1)
		for _, secret := range [][]byte{der, text, []byte(strings.TrimSpace(string(text))), {}} {
			raw := compact(h, payload, nil)
			m := hmac.New(sha256.New, secret)
			m.Write([]byte(raw[:len(raw)-1]))
			b.refused(t, compact(h, payload, m.Sum(nil)), token.ReasonAlgorithm)
		}
	}
	assert.Equal(t, b.fetches(), 0) // nobody is asked about such a token
}

// A key makes signatures of its own kind only, and an issuer only those that are configured.
func TestAttackOtherAlgorithm(t *testing.T) {
	t.Parallel()
	b := setup(t)
	rsa := key(t, "rsa", "RS256")
	b.issuer.AddKey(rsa)
	b.good(t, b.token(t, nil))
	pss := rsa
	pss.Alg = "PS256" // the set says that the key is for RS256
	b.refused(t, must(pss.Sign(nil, b.issuer.Claims(nil)))(t), token.ReasonKey)
	header, payload, sig := parts(t, b.token(t, nil))
	for _, alg := range []string{"ES256", "EdDSA", "ES384"} { // a key of one kind under an algorithm of another
		b.refused(t, compact(strings.Replace(header, "RS256", alg, 1), payload, sig), token.ReasonKey)
	}
	for _, alg := range []string{"ES512", "PS384", "PS512", "HS384", "HS512", "ES256K", "RSA1_5"} {
		b.refused(t, compact(strings.Replace(header, "RS256", alg, 1), payload, sig), token.ReasonAlgorithm)
	}
	b.config.Algorithms = []string{"ES256"}
	b.set(b.config)
	b.refused(t, b.token(t, nil), token.ReasonAlgorithm)
	// Another tenant's configuration allows it, and that is not this token's tenant.
	other := b.config
	other.ID, other.Tenant, other.Audience, other.Algorithms = "two", tenantB, "other", nil
	b.set(b.config, other)
	b.refused(t, b.token(t, nil), token.ReasonAlgorithm)
	b.good(t, b.token(t, map[string]any{"aud": "other"}))
}

func TestAttackAudience(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, aud := range []any{"other", "Bulkhead", "bulkhead ", "bulkhead/", "", nil, []string{}, []string{"other", "account"}} {
		b.refused(t, b.token(t, map[string]any{"aud": aud}), token.ReasonAudience)
	}
	for _, aud := range []any{1, true, map[string]any{"a": "bulkhead"}, []any{"bulkhead", 1}, make([]string, 17)} {
		b.refused(t, b.token(t, map[string]any{"aud": aud}), token.ReasonMalformed)
	}
}

func TestAttackTime(t *testing.T) {
	t.Parallel()
	b := setup(t)
	now := b.now().Unix()
	for name, c := range map[string]struct {
		with map[string]any
		why  token.Reason
	}{
		"expired":                {map[string]any{"iat": now - 60, "exp": now}, token.ReasonExpired},
		"expired long ago":       {map[string]any{"iat": now - 7200, "exp": now - 3600}, token.ReasonExpired},
		"expired in 1970":        {map[string]any{"exp": 0}, token.ReasonExpired},
		"no exp":                 {map[string]any{"exp": nil}, token.ReasonClaims},
		"not yet valid":          {map[string]any{"nbf": now + 1}, token.ReasonNotYet},
		"issued in the future":   {map[string]any{"iat": now + 1}, token.ReasonFuture},
		"no iat":                 {map[string]any{"iat": nil}, token.ReasonClaims},
		"lifetime too long":      {map[string]any{"exp": now + 86401}, token.ReasonLifetime},
		"last day of a long one": {map[string]any{"iat": now - 86400*365, "exp": now + 60}, token.ReasonLifetime},
		"exp as text":            {map[string]any{"exp": "99999999999"}, token.ReasonMalformed},
		"exp beyond time":        {map[string]any{"exp": 1e300}, token.ReasonMalformed},
		"exp as null":            {map[string]any{"exp": []any{}}, token.ReasonMalformed},
		"iat below zero":         {map[string]any{"iat": -1}, token.ReasonMalformed},
		"nbf as true":            {map[string]any{"nbf": true}, token.ReasonMalformed},
	} {
		t.Run(name, func(t *testing.T) { b.refused(t, b.token(t, c.with), c.why) })
	}
	b.good(t, b.token(t, map[string]any{"exp": now + 86400}))
	b.good(t, b.token(t, map[string]any{"iat": float64(now) - 0.5, "exp": float64(now) + 1.5}))
}

// An issuer's key counts for that issuer only, whatever a token says.
func TestAttackIssuerMixUp(t *testing.T) {
	t.Parallel()
	b := setup(t)
	evil := issuertest.Start(t, "", b.now)
	second := token.Issuer{ID: "two", Tenant: tenantB, URL: evil.URL(), Audience: "bulkhead"}
	b.set(b.config, second)
	assert.Equal(t, b.good(t, must(evil.Token(nil))(t)).Tenant, tenantB)
	b.good(t, b.token(t, nil))
	// Both publish a key "k1".
	b.refused(t, must(evil.Token(map[string]any{"iss": b.issuer.URL()}))(t), token.ReasonSignature)
	for _, iss := range []any{nil, "", "https://evil.example.com", evil.URL() + "/", b.issuer.URL() + "/", strings.ToUpper(b.issuer.URL()),
		b.issuer.URL() + "/.", b.issuer.URL() + "#", b.issuer.URL() + "?", token.PlatformIssuer, "file:///etc/passwd", "http://10.0.0.1"} {
		b.refused(t, must(evil.Token(map[string]any{"iss": iss}))(t), token.ReasonIssuer)
		b.refused(t, b.token(t, map[string]any{"iss": iss}), token.ReasonIssuer)
	}
	// Even where the list of issuers answers with too many.
	b.all = true
	b.refused(t, b.token(t, map[string]any{"iss": b.issuer.URL() + "/"}), token.ReasonIssuer)
	assert.Equal(t, b.good(t, b.token(t, nil)).Tenant, tenantA)
	assert.Equal(t, b.good(t, must(evil.Token(nil))(t)).Tenant, tenantB)
	second.Audience = "other"
	b.set(b.config, second)
	b.refused(t, must(evil.Token(nil))(t), token.ReasonAudience) // which is another issuer's
	// An issuer with one that ends in a slash and one that does not: two issuers.
	b.all = false
	slash := issuertest.Start(t, "/", b.now)
	third := token.Issuer{ID: "three", Tenant: tenantB, URL: strings.TrimSuffix(slash.URL(), "/"), Audience: "bulkhead"}
	b.set(third)
	b.refused(t, must(slash.Token(nil))(t), token.ReasonIssuer)
	b.unknown(t, must(slash.Token(map[string]any{"iss": third.URL}))(t)) // it says itself that it is another
	third.URL = slash.URL()
	b.set(third)
	b.good(t, must(slash.Token(nil))(t))
}

// Tenants that share an issuer are told apart, or nobody comes in.
func TestAttackTenantMixUp(t *testing.T) {
	t.Parallel()
	b := setup(t)
	one, two := b.config, b.config
	two.ID, two.Tenant = "two", tenantB
	one.Claims.Required = map[string]string{"org_id": "acme"}
	two.Claims.Required = map[string]string{"org_id": "other", "mfa": "true"}
	b.set(one, two)
	assert.Equal(t, b.good(t, b.token(t, map[string]any{"org_id": "acme"})).Tenant, tenantA)
	assert.Equal(t, b.good(t, b.token(t, map[string]any{"org_id": "other", "mfa": true})).Tenant, tenantB)
	for _, with := range []map[string]any{{}, {"org_id": ""}, {"org_id": "Acme"}, {"org_id": []string{"acme"}}, {"org_id": 1}, {"org_id": true},
		{"org_id": map[string]any{"acme": "acme"}}, {"org_id": "other"}, {"org_id": "other", "mfa": false}, {"org_id": "acme,other"}} {
		b.refused(t, b.token(t, with), token.ReasonAudience)
	}
	// By audience; a token for both is for nobody.
	two.Claims.Required, two.Audience = nil, "b"
	b.set(one, two)
	assert.Equal(t, b.good(t, b.token(t, map[string]any{"aud": "b"})).Tenant, tenantB)
	b.refused(t, b.token(t, map[string]any{"aud": []string{"bulkhead", "b"}, "org_id": "acme"}), token.ReasonAmbiguous)
	// Whoever configures what somebody else has gets nobody's users.
	two = one
	two.ID, two.Tenant = "two", tenantB
	b.set(one, two)
	assert.True(t, one.Overlaps(two))
	b.refused(t, b.token(t, map[string]any{"org_id": "acme"}), token.ReasonAmbiguous)
}

func TestAttackSize(t *testing.T) {
	t.Parallel()
	b := setup(t)
	raw := b.token(t, map[string]any{"x": strings.Repeat("y", 8192)})
	b.refused(t, raw, token.ReasonSize)
	empty := len(b.token(t, map[string]any{"x": ""}))
	b.good(t, b.token(t, map[string]any{"x": strings.Repeat("y", (token.MaxSize-empty)/4*3)})) // nearly as long
	many := map[string]any{}
	for i := range 129 {
		many[fmt.Sprint("c", i)] = 1
	}
	b.refused(t, b.token(t, many), token.ReasonMalformed)
	k, header := b.issuer.Key(), map[string]any{}
	for i := range 17 {
		header[fmt.Sprint("h", i)] = 1
	}
	b.refused(t, must(k.Sign(header, b.issuer.Claims(nil)))(t), token.ReasonMalformed)
	b.refused(t, must(k.Sign(map[string]any{"h": strings.Repeat("y", 2048)}, b.issuer.Claims(nil)))(t), token.ReasonMalformed)
	b.refused(t, must(k.Sign(map[string]any{"kid": strings.Repeat("y", 256)}, b.issuer.Claims(nil)))(t), token.ReasonHeader)
	assert.Equal(t, b.fetches(), 1)
}

// A token has one text, three segments, and JSON that every parser reads in the same way.
func TestAttackForm(t *testing.T) {
	t.Parallel()
	b := setup(t)
	raw := b.token(t, nil)
	b.good(t, raw)
	h, p, _ := strings.Cut(raw, ".")
	p, s, _ := strings.Cut(p, ".")
	for _, bad := range []string{"", ".", "..", "a.b", raw + ".", "." + raw, raw + "." + s, h + "." + p, h + "." + p + "." + s + "." + s,
		h + ".\n" + p + "." + s, raw + "\n", " " + raw, raw + "=", h + "=." + p + "." + s, h + "." + p + "." + s + "\r\n",
		h + "..." + s, strings.ReplaceAll(raw, ".", "%2e"), raw + "\x00", "é" + raw, h + "." + p + "." + s[:len(s)-1] + lastBits(s)} {
		b.refused(t, bad, token.ReasonMalformed)
	}
	header, payload, _ := parts(t, raw)
	k := b.issuer.Key()
	b.good(t, resign(t, k, header, payload)) // the way in which the bad ones are made
	for _, bad := range []string{`null`, `[]`, `"x"`, `1`, `{`, header + `{}`, header + ` x`, ``} {
		b.refused(t, resign(t, k, bad, payload), token.ReasonMalformed)
		if bad != `{` {
			b.refused(t, resign(t, k, header, strings.Replace(bad, header, payload, 1)), token.ReasonMalformed)
		}
	}
}

// lastBits returns the last character of unpadded base64 with other bits behind the last byte.
func lastBits(s string) string {
	const alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
	return string(alphabet[strings.IndexByte(alphabet, s[len(s)-1])|1])
}

func TestAttackDuplicateKeys(t *testing.T) {
	t.Parallel()
	b := setup(t)
	header, payload, _ := parts(t, b.token(t, nil))
	k := b.issuer.Key()
	for _, extra := range []string{`"alg":"ES256"`, `"kid":"k1"`, `"typ":"JWT"`} {
		b.refused(t, resign(t, k, `{`+extra+`,`+header[1:], payload), token.ReasonMalformed)
	}
	for _, extra := range []string{`"sub":"root"`, `"aud":"x"`, `"iss":"x"`, `"exp":1`, `"o":{"a":1,"a":2}`, `"o":[{"a":1,"\u0061":2}]`, "\"o\":\"\xff\""} {
		b.refused(t, resign(t, k, header, `{`+extra+`,`+payload[1:]), token.ReasonMalformed)
	}
	// Names are exact: these are other claims, which mean nothing.
	who := b.good(t, resign(t, k, `{"ALG":"none","Kid":"x",`+header[1:], `{"Sub":"root","SUB":"root","EXP":1,`+payload[1:]))
	assert.Equal(t, who.Subject, "alice")
}

// Keys come from the issuer's key set, and from nowhere that a token points to.
func TestAttackEmbeddedKeys(t *testing.T) {
	t.Parallel()
	b := setup(t)
	evil := issuertest.Start(t, "", b.now)
	header, payload, _ := parts(t, b.token(t, nil))
	jwk := `{"kty":"EC","crv":"P-256","x":"` + strings.Repeat("A", 43) + `","y":"` + strings.Repeat("A", 43) + `"}`
	for _, extra := range []string{`"jwk":` + jwk, `"jku":"` + evil.URL() + `/keys"`, `"x5u":"` + evil.URL() + `/x5u"`, `"x5c":["AAAA"]`,
		`"crit":["exp"]`, `"crit":[]`, `"b64":false`, `"zip":"DEF"`, `"enc":"A128GCM"`, `"cty":"JWT"`, `"jwk":null`} {
		h := `{` + extra + `,` + header[1:]
		b.refused(t, resign(t, evil.Key(), h, payload), token.ReasonHeader)
		b.refused(t, resign(t, b.issuer.Key(), h, payload), token.ReasonHeader) // even with a good signature
	}
	b.good(t, resign(t, b.issuer.Key(), `{"x5t":"AAAA","nonce":"1",`+header[1:], payload))
	assert.Equal(t, len(evil.Requests()), 0)
}

// A key id is compared, and used for nothing else.
func TestAttackKeyID(t *testing.T) {
	t.Parallel()
	b := setup(t)
	k := b.issuer.Key()
	for _, kid := range []string{"../../../../etc/passwd", "/dev/null", "../keys", "keys?x=1", "k1/../k1", "k1%00", "K1", "k1 ", "' OR 1=1 --", "http://127.0.0.1/keys", "k1;ls", "k2", "*"} {
		b.refused(t, must(k.Sign(map[string]any{"kid": kid}, b.issuer.Claims(nil)))(t), token.ReasonKey)
	}
	for _, kid := range []any{"k1\x00", "k1\n", 1, nil, []string{"k1"}} {
		b.refused(t, must(k.Sign(map[string]any{"kid": kid}, b.issuer.Claims(nil)))(t), token.ReasonHeader)
	}
	assert.Equal(t, b.issuer.Requests(), map[string]int{"/keys": 1, "/.well-known/openid-configuration": 1})
	// An issuer may choose such an id.
	odd := key(t, "../a/b?c", "ES256")
	b.issuer.AddKey(odd)
	b.advance(token.FetchEvery)
	b.good(t, b.token(t, nil))
	// Without an id there must be no choice.
	nameless := k
	nameless.ID = ""
	b.refused(t, must(nameless.Sign(nil, b.issuer.Claims(nil)))(t), token.ReasonKey)
	b.issuer.RemoveKey(odd.ID)
	b.advance(token.FetchEvery)
	b.good(t, must(nameless.Sign(nil, b.issuer.Claims(nil)))(t))
}

// A token that was made for something else is not a token for here.
func TestAttackType(t *testing.T) {
	t.Parallel()
	b := setup(t)
	k := b.issuer.Key()
	for _, typ := range []string{"logout+jwt", "secevent+jwt", "dpop+jwt", "bulkhead+jwt", "JWE", "application/jose"} {
		b.refused(t, must(k.Sign(map[string]any{"typ": typ}, b.issuer.Claims(nil)))(t), token.ReasonType)
	}
	for _, typ := range []string{"JWT", "jwt", "at+jwt", "application/at+jwt", ""} {
		b.good(t, must(k.Sign(map[string]any{"typ": typ}, b.issuer.Claims(nil)))(t))
	}
}

// A token of the platform is none of an issuer, even where the platform were configured as one.
func TestAttackPlatformTokenAsIssuers(t *testing.T) {
	t.Parallel()
	b := setup(t)
	seed := [32]byte{7}
	mint := must(token.NewMint("k1", map[string][32]byte{"k1": seed}, b.now))(t)
	raw, _, err := mint.Mint(token.Grant{Subject: "user", Tenant: tenantA, Roles: []string{"admin"}}, time.Minute)
	assert.NoError(t, err)
	b.refused(t, raw.Reveal(), token.ReasonType)
	// An issuer that has the platform's key says that it is the platform.
	k := issuertest.Key{ID: "k1", Alg: "EdDSA", Private: private(seed)}
	b.issuer.RemoveKey("k1")
	b.issuer.AddKey(k)
	b.config.URL = token.PlatformIssuer
	b.set(b.config)
	b.refused(t, b.token(t, map[string]any{"iss": token.PlatformIssuer}), token.ReasonIssuer)
	assert.Equal(t, b.fetches(), 0)
}

// The issuer that is told to be internal is not asked, by whatever way it is reached.
func TestAttackInternalAddresses(t *testing.T) {
	t.Parallel()
	b := setup(t)
	closed := token.NewVerifier(&b.trust, b.now, token.Options{})
	defer closed.Close()
	b.v = closed
	e := b.unknown(t, b.token(t, nil))
	assert.True(t, strings.Contains(e.Unwrap().Error(), "internal address"))
	assert.Equal(t, len(b.issuer.Requests()), 0)
}

// What an issuer says about where its keys are is held to the same rules.
func TestAttackKeysElsewhere(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, to := range []string{"http://169.254.169.254/latest", "file:///etc/passwd", "", "/keys", "http://example.com/keys", "https://10.0.0.1/keys", "https://[fd00::1]/keys"} {
		b.issuer.Fault("/.well-known/openid-configuration", func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprintf(w, `{"issuer":%q,"jwks_uri":%q}`, b.issuer.URL(), to)
		})
		b.unknown(t, b.token(t, nil))
		b.advance(token.FetchEvery)
	}
	assert.Equal(t, b.fetches(), 0)
	b.issuer.Fault("/.well-known/openid-configuration", nil)
	b.good(t, b.token(t, nil))
}
