package token

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rsa"
	"slices"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
)

// publicKey is a key of an issuer. It is immutable.
type publicKey struct {
	id     string // "" where the issuer gives none
	alg    string // "" where the issuer does not say
	public crypto.PublicKey
}

// fits reports whether the key makes signatures of an algorithm. The kind of key decides,
// so that a key cannot be used as something else than what it is.
func (k *publicKey) fits(alg string) bool {
	if k.alg != "" && k.alg != alg {
		return false
	}
	switch key := k.public.(type) {
	case *rsa.PublicKey:
		return alg == "RS256" || alg == "RS384" || alg == "RS512" || alg == "PS256"
	case *ecdsa.PublicKey:
		return alg == "ES256" && key.Curve == elliptic.P256() || alg == "ES384" && key.Curve == elliptic.P384()
	case ed25519.PublicKey:
		return alg == "EdDSA"
	}
	return false
}

// parseKeys reads a JSON Web Key Set. What is not a public key for signatures of a kind that we
// use is left out, as the standard wants; a set without any is an error, because an issuer
// that lost its keys is not one that has withdrawn them.
func parseKeys(b []byte) ([]*publicKey, error) {
	var set struct {
		Keys []jsontext.Value `json:"keys"`
	}
	if json.Unmarshal(b, &set) != nil || len(set.Keys) > maxKeys {
		return nil, errKeySet
	}
	var out []*publicKey
	for _, text := range set.Keys {
		var about struct {
			Use        string   `json:"use"`
			Operations []string `json:"key_ops"`
		}
		var key jose.JSONWebKey
		if json.Unmarshal(text, &about) != nil || key.UnmarshalJSON(text) != nil || len(key.KeyID) > maxText {
			continue
		}
		if about.Use != "" && about.Use != "sig" || len(about.Operations) > 0 && !slices.Contains(about.Operations, "verify") {
			continue
		}
		switch p := key.Key.(type) {
		case *rsa.PublicKey:
			if bits := p.N.BitLen(); bits < minRSA || bits > maxRSA {
				continue
			}
		case *ecdsa.PublicKey, ed25519.PublicKey:
		default: // symmetric, or private
			continue
		}
		out = append(out, &publicKey{id: key.KeyID, alg: key.Algorithm, public: key.Key})
	}
	if len(out) == 0 {
		return nil, errKeySet
	}
	return out, nil
}

// pick returns the one key that a token with this id and algorithm can be signed with, or nil.
// Where the token names none, and where several are named so, there must be exactly one that
// fits.
func pick(keys []*publicKey, kid, alg string) *publicKey {
	var found *publicKey
	for _, k := range keys {
		if kid != "" && k.id != kid || !k.fits(alg) {
			continue
		}
		if found != nil {
			return nil
		}
		found = k
	}
	return found
}
