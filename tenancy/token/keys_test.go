package token_test

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/tenancy/token"
	"bulkhead.dev/tenancy/token/issuertest"
)

// A flood of made-up key ids costs one fetch in ten seconds, and good tokens go on.
func TestAttackUnknownKeyFlood(t *testing.T) {
	t.Parallel()
	b := setup(t)
	k := b.issuer.Key()
	flood := func() {
		var wg sync.WaitGroup
		for i := range 20 {
			wg.Go(func() {
				for j := range 10 {
					raw, err := k.Sign(map[string]any{"kid": fmt.Sprint("made-up-", i, "-", j)}, b.issuer.Claims(nil))
					if err != nil {
						t.Error(err)
					}
					if _, err := b.v.Verify(context.Background(), raw); err == nil {
						t.Error("a token with a made-up key id is good")
					}
				}
			})
		}
		wg.Wait()
	}
	for n := range 4 {
		flood()
		b.good(t, b.token(t, nil))
		b.advance(token.FetchEvery - 1)
		flood()
		b.good(t, b.token(t, nil))
		assert.Equal(t, b.fetches(), n+1)
		assert.Equal(t, b.issuer.Requests()["/.well-known/openid-configuration"], n+1)
		b.advance(1)
	}
	assert.Equal(t, b.v.Counts().Fetches, 4)
}

// The same where the issuer is down: nobody is told that a token is not good.
func TestAttackUnknownKeyFloodInOutage(t *testing.T) {
	t.Parallel()
	b := setup(t)
	good := b.token(t, nil)
	b.issuer.Fault("/keys", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) })
	odd := must(b.issuer.Key().Sign(map[string]any{"kid": "odd"}, b.issuer.Claims(nil)))(t)
	for range 50 {
		b.unknown(t, odd)
		b.unknown(t, good)
	}
	assert.Equal(t, b.fetches(), 1)
	b.advance(token.FetchEvery)
	b.issuer.Fault("/keys", nil)
	b.good(t, good)
	b.refused(t, odd, token.ReasonKey)
	assert.Equal(t, b.fetches(), 2)
}

// A crowd that arrives at once asks once.
func TestCrowdAsksOnce(t *testing.T) {
	t.Parallel()
	b := setup(t)
	raw := b.token(t, nil)
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			if _, err := b.v.Verify(context.Background(), raw); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	assert.Equal(t, b.fetches(), 1)
}

// A new key is known at once when it is seen, unless somebody asked just now; a withdrawn
// one is refused five minutes after the last fetch, though its tokens were remembered.
func TestKeyRotation(t *testing.T) {
	t.Parallel()
	b := setup(t)
	old := b.token(t, map[string]any{"exp": b.now().Add(time.Hour).Unix()})
	b.good(t, old)
	b.issuer.AddKey(key(t, "k2", "EdDSA"))
	fresh := b.token(t, nil)
	b.refused(t, fresh, token.ReasonKey) // within ten seconds of a fetch
	b.advance(token.FetchEvery)
	b.good(t, fresh)
	b.good(t, old)

	b.issuer.RemoveKey("k1")
	b.advance(token.KeysWaitAfter - 1)
	b.good(t, old) // and a renewal is under way, for which nobody waits
	token.AwaitFetches(b.v)
	b.refused(t, old, token.ReasonKey)

	b.issuer.RemoveKey("k2")
	b.issuer.AddKey(key(t, "k3", "ES384"))
	late := b.token(t, map[string]any{"exp": b.now().Add(time.Hour).Unix()})
	b.advance(token.KeysWaitAfter)
	before := b.fetches()
	b.refused(t, fresh, token.ReasonKey) // waits for a fetch
	b.good(t, late)
	assert.Equal(t, b.fetches(), before+1)
}

// The keys of an issuer that took another key under the same id are the new ones.
func TestKeyReplacedUnderItsID(t *testing.T) {
	t.Parallel()
	b := setup(t)
	old := b.token(t, map[string]any{"exp": b.now().Add(time.Hour).Unix()})
	b.good(t, old)
	b.issuer.RemoveKey("k1")
	b.issuer.AddKey(key(t, "k1", "ES256"))
	b.advance(token.KeysRenewAfter)
	b.good(t, old) // and a renewal is under way
	token.AwaitFetches(b.v)
	b.refused(t, old, token.ReasonSignature) // although it was remembered just now
	b.good(t, b.token(t, nil))
}

// While an issuer is down its keys serve for ten minutes, and then nothing is known.
func TestIssuerDown(t *testing.T) {
	t.Parallel()
	b := setup(t)
	raw := b.token(t, map[string]any{"exp": b.now().Add(time.Hour).Unix()})
	b.good(t, raw)
	b.issuer.Fault("/.well-known/openid-configuration", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusInternalServerError) })
	for _, age := range []time.Duration{token.KeysRenewAfter, token.KeysWaitAfter, token.KeysServeFor - 1} {
		b.advance(age - time.Duration(b.offset.Load()))
		b.good(t, raw)
		b.good(t, b.token(t, map[string]any{"sub": fmt.Sprint(age)})) // also one that is not remembered
		token.AwaitFetches(b.v)
	}
	b.advance(1)
	b.unknown(t, raw)
	b.unknown(t, b.token(t, nil))
	b.issuer.Fault("/.well-known/openid-configuration", nil)
	b.advance(token.FetchEvery)
	b.good(t, raw)
}

// What an issuer may answer is bounded, and a bad answer is no verdict on a token.
func TestAttackAnswers(t *testing.T) {
	t.Parallel()
	b := setup(t)
	other := issuertest.Start(t, "", b.now) // answers with a good key set
	raw := b.token(t, nil)
	to := func(code int, url string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, url, code) }
	}
	text := func(s string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, s) }
	}
	huge := func(w http.ResponseWriter, r *http.Request) { // a good answer that is too long
		fmt.Fprint(w, strings.Repeat(" ", token.MaxDocument))
		b.issuer.Fault("/keys", nil)
		b.issuer.Fault("/.well-known/openid-configuration", nil)
		b.issuer.ServeHTTP(w, r)
	}
	faults := map[string]struct {
		h    http.HandlerFunc
		says string
	}{
		"redirect":           {to(302, other.URL()+"/keys"), "redirect"},
		"lasting redirect":   {to(301, b.issuer.URL()+"/keys2"), "redirect"},
		"redirect inside":    {to(307, "http://169.254.169.254/"), "redirect"},
		"redirect to a file": {to(302, "file:///etc/passwd"), "redirect"},
		"huge":               {huge, ""},
		"huge header":        {func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("X", strings.Repeat("x", 1<<20)) }, ""},
		"no JSON":            {text("<html>"), ""},
		"empty":              {text(""), ""},
		"no object":          {text("[]"), ""},
		"null":               {text("null"), ""},
		"deep":               {text(strings.Repeat(`{"keys":[`, 5000)), ""},
		"error":              {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500) }, ""},
		"no content":         {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(204) }, ""},
		"hang up":            {func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, ""},
	}
	for _, path := range []string{"/.well-known/openid-configuration", "/keys"} {
		for name, fault := range faults {
			t.Run(name+" for "+path, func(t *testing.T) {
				b.issuer.Fault(path, fault.h)
				defer b.issuer.Fault(path, nil)
				defer b.advance(token.FetchEvery)
				e := b.unknown(t, raw)
				assert.True(t, strings.Contains(e.Unwrap().Error(), fault.says))
				assert.False(t, strings.Contains(e.Unwrap().Error(), "html"))
			})
		}
	}
	assert.Equal(t, len(other.Requests()), 0)
	assert.Equal(t, b.issuer.Requests()["/keys2"], 0)
	b.good(t, raw)
}

// An issuer that answers slowly, or not at all, holds nobody longer than a fetch may take.
func TestAttackSlowAnswers(t *testing.T) {
	t.Parallel()
	b := setup(t)
	token.SetFetchTimeout(b.v, 100*time.Millisecond) // it always ends so
	for _, path := range []string{"/.well-known/openid-configuration", "/keys"} {
		for name, h := range map[string]http.HandlerFunc{
			"never": func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() },
			"body": func(w http.ResponseWriter, r *http.Request) {
				fmt.Fprint(w, `{"issuer":`)
				w.(http.Flusher).Flush()
				<-r.Context().Done()
			},
		} {
			t.Run(name+" for "+path, func(t *testing.T) {
				b.issuer.Fault(path, h)
				defer b.issuer.Fault(path, nil)
				defer b.advance(token.FetchEvery)
				e := b.unknown(t, b.token(t, nil))
				assert.ErrorIs(t, e, context.DeadlineExceeded)
			})
		}
	}
}

// A caller that goes away does not wait for the issuer, and does not end the fetch of others.
func TestCallerGoesAway(t *testing.T) {
	t.Parallel()
	b := setup(t)
	arrived, leave := make(chan struct{}), make(chan struct{})
	b.issuer.Fault("/keys", func(w http.ResponseWriter, r *http.Request) {
		b.issuer.Fault("/keys", nil)
		close(arrived)
		<-leave
		b.issuer.ServeHTTP(w, r)
	})
	raw := b.token(t, nil)
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-arrived; cancel() }()
	_, err := b.v.Verify(ctx, raw)
	assert.Equal(t, assert.ErrorAs[*apperr.Error](t, err).Kind, apperr.Canceled)
	close(leave)
	b.good(t, raw)
	assert.Equal(t, b.v.Counts().Fetches, 1)
}

// Close ends a fetch that is under way, and who waits for it is told that nothing is known.
func TestClose(t *testing.T) {
	t.Parallel()
	b := setup(t)
	arrived := make(chan struct{})
	b.issuer.Fault("/keys", func(_ http.ResponseWriter, r *http.Request) { close(arrived); <-r.Context().Done() })
	raw := b.token(t, nil)
	go func() { <-arrived; b.v.Close() }()
	b.unknown(t, raw)
	b.v.Close()
	b.unknown(t, raw)
}

// Over TLS the certificate must be for the issuer, from an authority that is trusted.
func TestTLS(t *testing.T) {
	t.Parallel()
	b := setup(t)
	var i *issuertest.Issuer
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { i.ServeHTTP(w, r) }))
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	server.StartTLS()
	defer server.Close()
	i = must(issuertest.New(server.URL, b.now))(t)
	b.config.URL = server.URL
	b.set(b.config)
	raw := must(i.Token(nil))(t)
	b.unknown(t, raw)
	assert.Equal(t, len(i.Requests()), 0)

	roots := x509.NewCertPool()
	assert.True(t, roots.AppendCertsFromPEM(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})))
	b.v = token.NewVerifier(&b.trust, b.now, token.Options{Internal: local, RootCAs: roots})
	defer b.v.Close()
	b.good(t, raw)
	// An issuer over TLS does not send us to one without.
	i.Fault("/.well-known/openid-configuration", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, `{"issuer":%q,"jwks_uri":%q}`, i.URL(), b.issuer.URL()+"/keys")
	})
	b.advance(token.KeysServeFor)
	b.unknown(t, raw)
	assert.Equal(t, len(b.issuer.Requests()), 0)
}

func TestKeySets(t *testing.T) {
	t.Parallel()
	const ed = `"kty":"OKP","crv":"Ed25519","x":"11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"`
	for set, want := range map[string]int{
		`{"keys":[{` + ed + `}]}`:                                                                  1,
		`{"keys":[{"use":"sig","key_ops":["verify"],` + ed + `}]}`:                                 1,
		`{"keys":[{` + ed + `},{"use":"enc",` + ed + `}]}`:                                         1,
		`{"keys":[{` + ed + `},{"key_ops":["sign"],` + ed + `}]}`:                                  1,
		`{"keys":[{` + ed + `},{"kty":"oct","k":"AAAA"}]}`:                                         1, // a secret
		`{"keys":[{` + ed + `},{"d":"` + strings.Repeat("A", 43) + `",` + ed + `}]}`:               1, // a private key
		`{"keys":[{` + ed + `},{"kty":"RSA","n":"` + strings.Repeat("q", 171) + `","e":"AQAB"}]}`:  1, // 1024 bits
		`{"keys":[{` + ed + `},{"kty":"RSA","n":"` + strings.Repeat("q", 1500) + `","e":"AQAB"}]}`: 1, // 9000 bits
		`{"keys":[{` + ed + `},{"kty":"RSA","n":"` + strings.Repeat("q", 342) + `","e":"AQAB"}]}`:  2,
		`{"keys":[{` + ed + `},{"kty":"EC","crv":"P-256","x":"AAAA","y":"AAAA"}]}`:                 1, // not on the curve
		`{"keys":[{` + ed + `},{"kty":"new"},{}]}`:                                                 1,
		`{"keys":[{"kid":"` + strings.Repeat("k", 256) + `",` + ed + `}]}`:                         0,
		`{"keys":[]}`: 0,
		`{"keys":[` + strings.Repeat(`{`+ed+`},`, 100) + `{` + ed + `}]}`: 0,
		`{"keys":[{` + ed + `}],"keys":[]}`:                               0,
	} {
		n, err := token.ParseKeys([]byte(set))
		if n != want || (err == nil) != (want > 0) {
			t.Errorf("%d keys (%v) instead of %d in %.200s", n, err, want, set)
		}
	}
}

func TestPublicAddresses(t *testing.T) {
	t.Parallel()
	for _, a := range []string{"8.8.8.8", "1.1.1.1", "2606:4700::1111", "100.128.0.1", "172.15.0.1", "172.32.0.1"} {
		assert.True(t, token.Public(netip.MustParseAddr(a)))
	}
	for _, a := range []string{"127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "0.1.2.3", "100.64.0.1", "224.0.0.1",
		"255.255.255.255", "240.0.0.1", "198.18.0.1", "::", "::1", "fe80::1", "fd00::1", "ff02::1", "64:ff9b::a00:1", "2002:a00:1::", "2001::1", "::ffff:10.0.0.1", "::10.0.0.1", "fec0::1"} {
		if token.Public(netip.MustParseAddr(a)) {
			t.Errorf("%s counts as public", a)
		}
	}
}
