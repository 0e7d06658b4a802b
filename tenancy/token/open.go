package token

import (
	"slices"
	"strings"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
	"github.com/golang-jwt/jwt/v5"
)

// Algorithms are those with which an external issuer may sign. All are asymmetric: with a
// symmetric one, whoever can check a token can make one, and the public key of an issuer
// could be taken for its secret.
func Algorithms() []string {
	return []string{"RS256", "RS384", "RS512", "PS256", "ES256", "ES384", "EdDSA"}
}

var (
	pinned   = Algorithms()
	ownOnly  = []string{"EdDSA"}                                                        // of tokens of the platform
	foreign  = []string{"", "jwt", "at+jwt"}                                            // typ of tokens of issuers, in lower case: an ID token or an access token
	refused  = []string{"crit", "jku", "jwk", "x5u", "x5c", "b64", "zip", "enc", "cty"} // see head
	segments = jwt.NewParser(jwt.WithStrictDecoding())
)

// opened is a token whose form is good. Nothing in it is verified.
type opened struct {
	*claims
	alg, kid string
	method   jwt.SigningMethod
	signed   string // what the signature is over
	sig      []byte
}

// open checks the form of a token: size, segments, header, and that both of its JSON texts
// mean one thing only. algs and types say what is accepted; types are in lower case.
func open(raw string, algs, types []string) (*opened, error) {
	if len(raw) > MaxSize {
		return nil, refuse(ReasonSize)
	}
	// The decoder of base64 skips line feeds, so that one token had many texts.
	if strings.Count(raw, ".") != 2 || strings.ContainsFunc(raw, notSegment) {
		return nil, refuse(ReasonMalformed)
	}
	h, err := head(raw[:strings.IndexByte(raw, '.')])
	if err != nil {
		return nil, err
	}
	if !slices.Contains(algs, h.alg) {
		return nil, refuse(ReasonAlgorithm)
	}
	if !slices.Contains(types, h.typ) {
		return nil, refuse(ReasonType)
	}
	c := new(claims)
	t, parts, err := segments.ParseUnverified(raw, c)
	if err != nil || c.all == nil { // for null the library does not decode
		return nil, refuse(ReasonMalformed)
	}
	return &opened{claims: c, alg: h.alg, kid: h.kid, method: t.Method, signed: parts[0] + "." + parts[1], sig: t.Signature}, nil
}

// verify checks the signature with a key that fits the algorithm.
func (o *opened) verify(key any) error {
	if o.method.Verify(o.signed, o.sig, key) != nil {
		return refuse(ReasonSignature)
	}
	return nil
}

func notSegment(r rune) bool {
	return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '-' && r != '_' && r != '.'
}

// header is what is read of the header of a token.
type header struct{ alg, kid, typ string }

// head decodes the header. Fields that bring a key along, point to one, or change what the
// rest means are refused, even where they would only be ignored: a token that has them was made
// for a verifier that falls for them. Others are ignored, as the standard wants.
func head(segment string) (header, error) {
	b, err := segments.DecodeSegment(segment)
	if err != nil || len(b) > maxHeader {
		return header{}, refuse(ReasonMalformed)
	}
	var fields map[string]jsontext.Value
	if json.Unmarshal(b, &fields) != nil || fields == nil || len(fields) > maxHeaderFields {
		return header{}, refuse(ReasonMalformed)
	}
	for _, name := range refused {
		if _, ok := fields[name]; ok {
			return header{}, refuse(ReasonHeader)
		}
	}
	alg, okAlg := text(fields["alg"], maxText)
	kid, okKid := text(fields["kid"], maxText)
	typ, okTyp := text(fields["typ"], maxText)
	if !okAlg || !okKid || !okTyp {
		return header{}, refuse(ReasonHeader)
	}
	return header{alg: alg, kid: kid, typ: strings.TrimPrefix(strings.ToLower(typ), "application/")}, nil
}
