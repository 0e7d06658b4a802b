package token

import (
	"context"
	"maps"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/go-json-experiment/json/jsontext"

	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/id"
)

// Issuer is one OpenID Connect issuer that one tenant trusts, or, with the zero tenant,
// the platform. Several tenants may trust the same URL; they are told apart by audience and
// required claims.
type Issuer struct {
	// ID names this configuration; the identity of who came in through it has it too.
	ID     string
	Tenant id.Tenant
	// URL is compared byte by byte with the claim iss, so "https://a.example" and
	// "https://a.example/" are different issuers. Discovery starts there. It is https, or
	// http on a loopback address.
	URL string
	// Audience must be among the values of the claim aud.
	Audience string
	// Algorithms with which it may sign, some of [Algorithms]; none means all of them.
	Algorithms []string
	// ClockSkew is how far its clock may differ from ours, from 0 to MaxClockSkew.
	ClockSkew time.Duration
	Claims    Mapping
}

// Mapping says what the claims of an issuer mean here. A claim is named by its name at the
// top of the token, or, where it lies deeper, by a JSON pointer ("/realm_access/roles").
type Mapping struct {
	// Subject is the claim that says who it is, "sub" if empty. It must be one that the
	// issuer never gives to somebody else; an e-mail address is not.
	Subject string
	// Email is the claim with the e-mail address; none is read if empty. The address is a
	// label: nothing is granted because of it. It is left out where "email_verified" is
	// there and not true.
	Email string
	// Roles is the claim with a string or an array of strings that RoleNames turns
	// into roles. Other values of it mean nothing.
	Roles     string
	RoleNames map[string]string
	// Required claims must be strings with exactly these values ("true" and "false" stand
	// for booleans as well). They tell apart the tenants that share an issuer and an
	// audience: {"org_id": "acme"}.
	Required map[string]string
}

// Issuers says which issuers are trusted now. It is asked on each call of [Verifier.Verify], so
// it must answer from memory that is at most a second old. Its argument is what a token that nobody has
// checked says: it must select among configured issuers by equality and do nothing else
// with it. No issuer is an empty answer; an error means that it is not known.
type Issuers interface {
	IssuersByURL(ctx context.Context, url string) ([]Issuer, error)
}

// Validate returns nil if the configuration can be used, and otherwise an *apperr.Error
// of the kind Invalid that names the field. [Verifier] does not use an issuer that does not
// pass.
func (i Issuer) Validate() error {
	bad := func(field, format string, args ...any) error {
		return apperr.New(apperr.Invalid, "invalid_issuer", format, args...).WithParam(field)
	}
	if i.ID == "" || !printable(i.ID, maxText) {
		return bad("id", "The issuer needs an id of at most %d bytes.", maxText)
	}
	if _, err := issuerURL(i.URL); err != nil {
		return bad("url", "The URL of an issuer is https (http on a loopback address only), of at most %d bytes, without user, query and fragment.", maxURL)
	}
	if i.Audience == "" || !printable(i.Audience, maxName) {
		return bad("audience", "The issuer needs the audience that its tokens are for, of at most %d bytes.", maxName)
	}
	for _, alg := range i.Algorithms {
		if !slices.Contains(pinned, alg) {
			return bad("algorithms", "The algorithms are %s.", strings.Join(pinned, ", "))
		}
	}
	if i.ClockSkew < 0 || i.ClockSkew > MaxClockSkew {
		return bad("clock_skew", "The clock of an issuer may differ by 0 to %s.", MaxClockSkew)
	}
	m := i.Claims
	for field, name := range map[string]string{"subject": m.Subject, "email": m.Email, "roles": m.Roles} {
		if name != "" && !claimName(name) {
			return bad("claims."+field, "A claim is a name or a JSON pointer of at most %d parts and %d bytes.", maxDepth, maxName)
		}
	}
	if len(m.RoleNames) > maxRoles || (len(m.RoleNames) > 0) != (m.Roles != "") {
		return bad("claims.role_names", "A claim for roles goes with a map of its values, of at most %d.", maxRoles)
	}
	for value, role := range m.RoleNames {
		if value == "" || role == "" || !printable(value, maxName) || !printable(role, maxName) {
			return bad("claims.role_names", "Values and roles have 1 to %d bytes.", maxName)
		}
	}
	if len(m.Required) > maxRequired {
		return bad("claims.required", "At most %d claims can be required.", maxRequired)
	}
	for name, value := range m.Required {
		if !claimName(name) || value == "" || !printable(value, maxName) {
			return bad("claims.required", "A required claim has a name and a value of 1 to %d bytes.", maxName)
		}
	}
	return nil
}

// Overlaps reports whether one token could match both: same URL, same audience, and no claim of which
// they require different values. Such a token is refused, so whoever stores issuers
// must not let one tenant configure what overlaps with another's.
func (i Issuer) Overlaps(o Issuer) bool {
	if i.URL != o.URL || i.Audience != o.Audience {
		return false
	}
	for name, value := range i.Claims.Required {
		if other, ok := o.Claims.Required[name]; ok && other != value {
			return false
		}
	}
	return true
}

// allows reports whether the issuer may sign with an algorithm.
func (i *Issuer) allows(alg string) bool {
	return len(i.Algorithms) == 0 || slices.Contains(i.Algorithms, alg)
}

// wants reports whether a token is for this audience and has the required claims.
func (i *Issuer) wants(c *claims) bool {
	if !slices.Contains(c.audience, i.Audience) {
		return false
	}
	for name, value := range i.Claims.Required {
		v := c.find(name)
		if s, ok := text(v, maxName); (!ok || s != value) && (v.Kind() != 't' && v.Kind() != 'f' || string(v) != value) {
			return false
		}
	}
	return true
}

// identity reads what the mapping says of a token that was verified.
func (i *Issuer) identity(c *claims) (Identity, error) {
	out := Identity{Issuer: i.ID, Tenant: i.Tenant, Expires: c.expires.Time, TokenID: c.id}
	m, name := &i.Claims, "sub"
	if m.Subject != "" {
		name = m.Subject
	}
	var ok bool
	if out.Subject, ok = text(c.find(name), maxText); !ok || out.Subject == "" {
		return Identity{}, refuse(ReasonClaims)
	}
	if v := c.find(m.Email); v != nil && v.Kind() != 'n' {
		if out.Email, ok = text(v, maxEmail); !ok {
			return Identity{}, refuse(ReasonClaims)
		}
	}
	// Some issuers send the text "true".
	if v := c.all["email_verified"]; v != nil && string(v) != `true` && string(v) != `"true"` {
		out.Email = ""
	}
	if v := c.find(m.Roles); v != nil && v.Kind() != 'n' {
		values, ok := texts(v)
		if !ok {
			return Identity{}, refuse(ReasonClaims)
		}
		roles := make(map[string]struct{})
		for _, value := range values {
			if role, ok := m.RoleNames[value]; ok {
				roles[role] = struct{}{}
			}
		}
		out.Roles = slices.Sorted(maps.Keys(roles))
	}
	return out, nil
}

// claimName reports whether a name can be looked up.
func claimName(name string) bool {
	if name == "" || !printable(name, maxName) {
		return false
	}
	p := jsontext.Pointer(name)
	return !strings.HasPrefix(name, "/") || p.IsValid() && strings.Count(name, "/") <= maxDepth
}

// issuerURL parses the URL of an issuer, or of its keys.
func issuerURL(text string) (*url.URL, error) {
	u, err := url.Parse(text)
	switch {
	case err != nil:
		return nil, errURL
	case len(text) > maxURL, u.Hostname() == "", u.User != nil, u.RawQuery != "", u.ForceQuery, strings.Contains(text, "#"):
		return nil, errURL
	case u.Scheme == "https", u.Scheme == "http" && loopback(u.Hostname()):
		return u, nil
	}
	return nil, errURL
}
