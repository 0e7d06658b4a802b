package token

import (
	"crypto/ed25519"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/golang-jwt/jwt/v5"

	"bulkhead.dev/infra/id"
	"bulkhead.dev/infra/secret"
)

const (
	// PlatformIssuer is the claim iss of tokens of the platform. It is no URL, so no
	// external issuer can have it.
	PlatformIssuer = "urn:bulkhead:platform"
	// PlatformAudience is their claim aud.
	PlatformAudience = "bulkhead"
	// MaxPlatformLifetime is how long they are good at most. Nothing revokes one.
	MaxPlatformLifetime = 15 * time.Minute

	platformType = "bulkhead+jwt"
	// platformSkew is how far the clocks of replicas may differ.
	platformSkew = 5 * time.Second
	maxGrants    = 64 // roles, and scopes, of a token
)

var (
	platformTypes  = []string{platformType}
	platformClaims = []string{"iss", "aud", "sub", "jti", "iat", "nbf", "exp", "roles", "scope", "tenant", "act"}
)

// Grant is what a token of the platform grants to its bearer.
type Grant struct {
	Subject string    // id of the user
	Tenant  id.Tenant // zero for the platform itself
	Roles   []string
	// Scopes restrict what the roles allow; nil is no restriction, and an empty one cannot be minted.
	Scopes []string
	// Actor is the id of the operator who acts for the subject, "" where nobody does.
	Actor string
	// ID and Expires are set by Mint.
	ID      string
	Expires time.Time
}

// Mint makes and checks tokens of the platform: EdDSA over Ed25519 with keys out of the key
// file. It signs with the current key and checks with all of them. It is immutable, and prints
// as REDACTED.
type Mint struct {
	now     func() time.Time
	current string
	signer  ed25519.PrivateKey
	public  map[string]ed25519.PublicKey // by key id
}

// NewMint makes a mint out of named seeds, of which current names the one that signs. A name has
// 1 to 64 characters of a-z, 0-9, "-", "_".
func NewMint(current string, seeds map[string][32]byte, now func() time.Time) (*Mint, error) {
	m := &Mint{now: now, current: current, public: make(map[string]ed25519.PublicKey, len(seeds))}
	for name, seed := range seeds {
		if !keyName(name) {
			return nil, errors.New("token keys: a name is not 1 to 64 characters of a-z, 0-9, - and _")
		}
		key := ed25519.NewKeyFromSeed(seed[:])
		m.public[name] = key.Public().(ed25519.PublicKey)
		if name == current {
			m.signer = key
		}
	}
	if m.signer == nil {
		return nil, fmt.Errorf("token keys: the current key is not among the %d there are", len(seeds))
	}
	return m, nil
}

// Mint makes a token that is good for a lifetime, cut off to seconds, from now. It returns what
// the token grants, with its id and end. The error says what cannot be granted; it is a bug of
// the caller.
func (m *Mint) Mint(g Grant, lifetime time.Duration) (secret.String, Grant, error) {
	if lifetime < time.Second || lifetime > MaxPlatformLifetime {
		return secret.String{}, Grant{}, fmt.Errorf("mint token: a lifetime of %s is not between a second and %s", lifetime, MaxPlatformLifetime)
	}
	if err := g.validate(); err != nil {
		return secret.String{}, Grant{}, fmt.Errorf("mint token: %w", err)
	}
	var random [16]byte
	rand.Read(random[:])
	now := m.now()
	g.ID, g.Expires = base64.RawURLEncoding.EncodeToString(random[:]), time.Unix(now.Add(lifetime).Unix(), 0)
	c := jwt.MapClaims{
		"iss": PlatformIssuer, "aud": PlatformAudience, "sub": g.Subject, "jti": g.ID,
		"iat": now.Unix(), "nbf": now.Unix(), "exp": g.Expires.Unix(),
	}
	if len(g.Roles) > 0 {
		c["roles"] = g.Roles
	}
	if g.Scopes != nil {
		c["scope"] = strings.Join(g.Scopes, " ") // as in RFC 9068
	}
	if g.Tenant != (id.Tenant{}) {
		c["tenant"] = g.Tenant.String()
	}
	if g.Actor != "" {
		c["act"] = map[string]string{"sub": g.Actor} // as in RFC 8693
	}
	t := jwt.NewWithClaims(jwt.SigningMethodEdDSA, c)
	t.Header["kid"], t.Header["typ"] = m.current, platformType
	raw, err := t.SignedString(m.signer)
	if err == nil && len(raw) > MaxSize {
		err = refuse(ReasonSize)
	}
	if err != nil {
		return secret.String{}, Grant{}, fmt.Errorf("mint token: %w", err)
	}
	return secret.New(raw), g, nil
}

// Verify returns what a token of the platform grants. The error is an *apperr.Error of the kind
// Unauthenticated with the code invalid_token and a [Reason] as its cause.
func (m *Mint) Verify(raw string) (Grant, error) {
	t, err := open(raw, ownOnly, platformTypes)
	if err != nil {
		return Grant{}, err
	}
	key, ok := m.public[t.kid]
	if !ok {
		return Grant{}, refuse(ReasonKey)
	}
	if err := t.verify(key); err != nil {
		return Grant{}, err
	}
	if err := t.inTime(PlatformIssuer, PlatformAudience, platformSkew, MaxPlatformLifetime, m.now()); err != nil {
		return Grant{}, err
	}
	g, ok := t.grant()
	if !ok {
		return Grant{}, refuse(ReasonClaims)
	}
	return g, nil
}

// FromPlatform reports whether a text says of itself that it is a token of the platform. It
// decides who checks it, and nothing else.
func FromPlatform(raw string) bool {
	segment, _, ok := strings.Cut(raw, ".")
	if !ok || len(raw) > MaxSize {
		return false
	}
	h, err := head(segment)
	return err == nil && h.typ == platformType
}

// grant reads the claims of a token whose signature is ours. A claim that is not known could be a
// restriction, so it is not ignored.
func (c *claims) grant() (Grant, bool) {
	for name := range c.all {
		if !slices.Contains(platformClaims, name) {
			return Grant{}, false
		}
	}
	g := Grant{ID: c.id, Expires: c.expires.Time}
	var tenant, scope string
	ok := [5]bool{}
	g.Subject, ok[0] = text(c.all["sub"], maxText)
	g.Roles, ok[1] = texts(c.all["roles"])
	tenant, ok[2] = text(c.all["tenant"], maxText)
	scope, ok[3] = text(c.all["scope"], MaxSize)
	g.Actor, ok[4] = text(c.find("/act/sub"), maxText)
	if ok != [5]bool{true, true, true, true, true} || g.ID == "" || c.starts == nil || len(c.audience) != 1 {
		return Grant{}, false
	}
	if c.all["scope"] != nil {
		g.Scopes = strings.Split(scope, " ")
	}
	if c.all["act"] != nil && g.Actor == "" {
		return Grant{}, false
	}
	if c.all["tenant"] != nil {
		var err error
		if g.Tenant, err = id.ParseTenant(tenant); err != nil || g.Tenant == (id.Tenant{}) {
			return Grant{}, false
		}
	}
	return g, g.validate() == nil
}

// validate says why something cannot be granted.
func (g *Grant) validate() error {
	switch {
	case g.Subject == "" || !printable(g.Subject, maxText) || !printable(g.Actor, maxText):
		return fmt.Errorf("a subject or actor is not 1 to %d printable bytes", maxText)
	case g.Actor != "" && g.Actor == g.Subject:
		return errors.New("somebody acts for themselves")
	case len(g.Roles) == 0 && len(g.Scopes) == 0:
		return errors.New("neither a role nor a scope is granted")
	case g.Scopes != nil && len(g.Scopes) == 0:
		return errors.New("the restriction to scopes leaves none")
	case len(g.Roles) > maxGrants || len(g.Scopes) > maxGrants:
		return fmt.Errorf("more than %d roles or scopes", maxGrants)
	case slices.ContainsFunc(g.Roles, notGrant) || slices.ContainsFunc(g.Scopes, notGrant):
		return fmt.Errorf("a role or scope is not 1 to %d printable bytes without spaces", maxName)
	}
	return nil
}

func notGrant(s string) bool { return s == "" || strings.Contains(s, " ") || !printable(s, maxName) }

func keyName(s string) bool {
	return s != "" && len(s) <= 64 && !strings.ContainsFunc(s, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < '0' || r > '9') && r != '-' && r != '_'
	})
}

// Format prints REDACTED for every verb: the mint holds private keys.
func (Mint) Format(s fmt.State, _ rune) { _, _ = s.Write([]byte(secret.Redacted)) }

// LogValue implements slog.LogValuer.
func (Mint) LogValue() slog.Value { return slog.StringValue(secret.Redacted) }
