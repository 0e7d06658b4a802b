package token

import (
	"errors"
	"math"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
	"github.com/golang-jwt/jwt/v5"
)

// claims is the payload of a token. It is immutable once it is decoded. Names are compared
// exactly, and no object in it, at any depth, has a name twice.
type claims struct {
	all      map[string]jsontext.Value
	issuer   string
	id       string // "" where the token has none
	audience []string
	expires  *jwt.NumericDate // nil where the token has none; so are the next two
	issued   *jwt.NumericDate
	starts   *jwt.NumericDate
}

var errClaims = errors.New("claims of the wrong type")

// UnmarshalJSON decodes strictly; the library calls it.
func (c *claims) UnmarshalJSON(b []byte) error {
	// The errors of the decoder may quote the token.
	if json.Unmarshal(b, &c.all) != nil || c.all == nil || len(c.all) > maxClaims {
		return errClaims
	}
	var ok [6]bool
	c.issuer, ok[0] = text(c.all["iss"], maxURL)
	c.id, ok[1] = text(c.all["jti"], maxText)
	c.audience, ok[2] = texts(c.all["aud"])
	c.expires, ok[3] = date(c.all["exp"])
	c.issued, ok[4] = date(c.all["iat"])
	c.starts, ok[5] = date(c.all["nbf"])
	if ok != [6]bool{true, true, true, true, true, true} || len(c.audience) > maxAudiences {
		return errClaims
	}
	return nil
}

// The methods of jwt.Claims. The checks of types were made when decoding.

func (c *claims) GetExpirationTime() (*jwt.NumericDate, error) { return c.expires, nil }
func (c *claims) GetIssuedAt() (*jwt.NumericDate, error)       { return c.issued, nil }
func (c *claims) GetNotBefore() (*jwt.NumericDate, error)      { return c.starts, nil }
func (c *claims) GetIssuer() (string, error)                   { return c.issuer, nil }
func (c *claims) GetSubject() (string, error)                  { return "", errClaims } // which claim it is depends on the issuer
func (c *claims) GetAudience() (jwt.ClaimStrings, error)       { return c.audience, nil }

// inTime checks everything about time, issuer and audience. A lifetime is bounded because
// iat is: with exp alone a token of a century would be good for its last day.
func (c *claims) inTime(issuer, audience string, skew, lifetime time.Duration, now time.Time) error {
	err := jwt.NewValidator(jwt.WithExpirationRequired(), jwt.WithIssuedAt(), jwt.WithLeeway(skew),
		jwt.WithTimeFunc(func() time.Time { return now }), jwt.WithIssuer(issuer), jwt.WithAudience(audience)).Validate(c)
	switch {
	case errors.Is(err, jwt.ErrTokenExpired):
		return refuse(ReasonExpired)
	case errors.Is(err, jwt.ErrTokenNotValidYet):
		return refuse(ReasonNotYet)
	case errors.Is(err, jwt.ErrTokenUsedBeforeIssued):
		return refuse(ReasonFuture)
	case errors.Is(err, jwt.ErrTokenInvalidIssuer):
		return refuse(ReasonIssuer)
	case errors.Is(err, jwt.ErrTokenInvalidAudience):
		return refuse(ReasonAudience)
	case err != nil || c.issued == nil:
		return refuse(ReasonClaims)
	}
	if d := c.expires.Sub(c.issued.Time); d <= 0 || d > lifetime {
		return refuse(ReasonLifetime)
	}
	return nil
}

// find returns the value of a claim: of that name at the top, or, where the name begins with
// "/", at the end of that JSON pointer. It is nil where there is none.
func (c *claims) find(name string) jsontext.Value {
	if !strings.HasPrefix(name, "/") {
		return c.all[name]
	}
	at := c.all
	var v jsontext.Value
	for part := range jsontext.Pointer(name).Tokens() {
		if v = at[part]; v == nil {
			return nil
		}
		at = nil
		if v.Kind() == '{' && json.Unmarshal(v, &at) != nil {
			return nil
		}
	}
	return v
}

// text decodes a string of at most max bytes without control characters. An absent
// one is "".
func text(v jsontext.Value, max int) (string, bool) {
	if v == nil {
		return "", true
	}
	var s string
	if v.Kind() != '"' || json.Unmarshal(v, &s) != nil {
		return "", false
	}
	return s, printable(s, max)
}

// printable reports whether s may be stored and shown.
func printable(s string, max int) bool {
	return len(s) <= max && utf8.ValidString(s) && !strings.ContainsFunc(s, unicode.IsControl)
}

// texts decodes a string or an array of strings. An absent one is empty.
func texts(v jsontext.Value) ([]string, bool) {
	if v == nil || v.Kind() == '"' {
		s, ok := text(v, MaxSize)
		if !ok || v == nil {
			return nil, ok
		}
		return []string{s}, true
	}
	var parts []jsontext.Value
	if v.Kind() != '[' || json.Unmarshal(v, &parts) != nil {
		return nil, false
	}
	out := make([]string, 0, len(parts))
	for _, part := range parts {
		s, ok := text(part, MaxSize)
		if !ok {
			return nil, false
		}
		out = append(out, s)
	}
	return out, true
}

// date decodes seconds since 1970. Fractions are cut off. An absent one is nil.
func date(v jsontext.Value) (*jwt.NumericDate, bool) {
	if v == nil {
		return nil, true
	}
	if v.Kind() != '0' {
		return nil, false
	}
	f, err := strconv.ParseFloat(string(v), 64)
	if err != nil || f < 0 || f > maxTime {
		return nil, false
	}
	return &jwt.NumericDate{Time: time.Unix(int64(math.Floor(f)), 0)}, true
}
