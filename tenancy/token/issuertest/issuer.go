// Package issuertest is an OpenID Connect issuer for tests and for trying things out: discovery,
// a key set that can be rotated, tokens with any claims, and faults. It gives a token to
// whoever asks, so it is nothing to use in earnest.
package issuertest

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-json-experiment/json"
	"github.com/golang-jwt/jwt/v5"
)

const (
	discoveryPath = "/.well-known/openid-configuration"
	keysPath      = "/keys"
	tokenPath     = "/token"

	lifetime   = 5 * time.Minute // of tokens that say nothing about it
	maxRequest = 64 << 10        // bytes
)

// Issuer is an issuer. It is an http.Handler; see [Start], [Serve] and [Main] for servers. It is
// safe for concurrent use.
type Issuer struct {
	url  string
	base string // the path of the URL, without a slash at the end
	now  func() time.Time

	mu       sync.Mutex
	keys     []Key                       // under mu; the last one signs
	requests map[string]int              // under mu; by path below the URL
	faults   map[string]http.HandlerFunc // under mu; by path below the URL
}

// Key is a key pair of an issuer.
type Key struct {
	ID      string
	Alg     string // of its signatures
	Private crypto.Signer
}

// New makes an issuer with the given URL and a key "k1" for ES256.
func New(issuer string, now func() time.Time) (*Issuer, error) {
	u, err := url.Parse(issuer)
	if err != nil {
		return nil, fmt.Errorf("parse URL of issuer: %w", err)
	}
	i := &Issuer{url: issuer, base: strings.TrimSuffix(u.Path, "/"), now: now,
		requests: make(map[string]int), faults: make(map[string]http.HandlerFunc)}
	key, err := NewKey("k1", "ES256")
	if err != nil {
		return nil, err
	}
	i.AddKey(key)
	return i, nil
}

// NewKey makes a key pair for one of RS256, RS384, RS512, PS256, ES256, ES384 and EdDSA.
func NewKey(id, alg string) (Key, error) {
	k := Key{ID: id, Alg: alg}
	var err error
	switch alg {
	case "RS256", "RS384", "RS512", "PS256":
		k.Private, err = rsa.GenerateKey(rand.Reader, 2048)
	case "ES256":
		k.Private, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	case "ES384":
		k.Private, err = ecdsa.GenerateKey(elliptic.P384(), rand.Reader)
	case "EdDSA":
		_, k.Private, err = ed25519.GenerateKey(rand.Reader)
	default:
		err = fmt.Errorf("no such algorithm: %s", alg)
	}
	if err != nil {
		return Key{}, fmt.Errorf("make key: %w", err)
	}
	return k, nil
}

// Sign makes a token out of any header and claims: alg and kid are the key's unless the header says otherwise.
func (k Key) Sign(header, claims map[string]any) (string, error) {
	t := jwt.NewWithClaims(jwt.GetSigningMethod(k.Alg), jwt.MapClaims(claims))
	if k.ID != "" {
		t.Header["kid"] = k.ID
	}
	maps.Copy(t.Header, header)
	raw, err := t.SignedString(k.Private)
	if err != nil {
		return "", fmt.Errorf("sign token: %w", err)
	}
	return raw, nil
}

// URL returns the issuer's URL, as it is in the claim iss.
func (i *Issuer) URL() string { return i.url }

// AddKey publishes a key, which signs from now on.
func (i *Issuer) AddKey(k Key) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.keys = append(i.keys, k)
}

// RemoveKey withdraws a key.
func (i *Issuer) RemoveKey(id string) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.keys = slices.DeleteFunc(i.keys, func(k Key) bool { return k.ID == id })
}

// Key returns the key that signs now. There must be one.
func (i *Issuer) Key() Key {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.keys[len(i.keys)-1]
}

// Claims returns the claims of a common token, with the given ones on top. A nil takes a claim
// away.
func (i *Issuer) Claims(with map[string]any) map[string]any {
	now := i.now()
	c := map[string]any{"iss": i.url, "sub": "alice", "aud": "bulkhead",
		"iat": now.Unix(), "exp": now.Add(lifetime).Unix()}
	maps.Copy(c, with)
	maps.DeleteFunc(c, func(_ string, v any) bool { return v == nil })
	return c
}

// Token makes a token with [Issuer.Claims], signed with the latest key.
func (i *Issuer) Token(with map[string]any) (string, error) {
	return i.Key().Sign(nil, i.Claims(with))
}

// Fault answers requests for a path below the URL ("/keys") in another way; nil ends that.
func (i *Issuer) Fault(path string, h http.HandlerFunc) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.faults[path] = h
}

// Requests returns how many requests there were for each path below the URL.
func (i *Issuer) Requests() map[string]int {
	i.mu.Lock()
	defer i.mu.Unlock()
	return maps.Clone(i.requests)
}

// ServeHTTP implements http.Handler: GET /.well-known/openid-configuration, GET /keys, and
// POST /token, whose body are the claims of the token that is wanted.
func (i *Issuer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path := strings.TrimPrefix(r.URL.Path, i.base)
	i.mu.Lock()
	i.requests[path]++
	fault := i.faults[path]
	i.mu.Unlock()
	switch {
	case fault != nil:
		fault(w, r)
	case r.Method == http.MethodGet && path == discoveryPath:
		root := strings.TrimSuffix(i.url, "/")
		answer(w, map[string]any{"issuer": i.url, "jwks_uri": root + keysPath, "token_endpoint": root + tokenPath,
			"authorization_endpoint": root + "/authorize", "subject_types_supported": []string{"public"},
			"response_types_supported":              []string{"id_token"},
			"id_token_signing_alg_values_supported": []string{i.Key().Alg}})
	case r.Method == http.MethodGet && path == keysPath:
		answer(w, i.keySet())
	case r.Method == http.MethodPost && path == tokenPath:
		var with map[string]any
		b, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxRequest))
		if err != nil || json.Unmarshal(b, &with) != nil {
			http.Error(w, "the body must be a JSON object with the claims", http.StatusBadRequest)
			return
		}
		raw, err := i.Token(with)
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		answer(w, map[string]any{"id_token": raw, "token_type": "Bearer"})
	default:
		http.NotFound(w, r)
	}
}

func (i *Issuer) keySet() jose.JSONWebKeySet {
	i.mu.Lock()
	defer i.mu.Unlock()
	var set jose.JSONWebKeySet
	for _, k := range i.keys {
		set.Keys = append(set.Keys, jose.JSONWebKey{Key: k.Private.Public(), KeyID: k.ID, Algorithm: k.Alg, Use: "sig"})
	}
	return set
}

func answer(w http.ResponseWriter, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(b)
}
