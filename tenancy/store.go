package tenancy

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"errors"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/infra/pgdb"
	"bulkhead.dev/infra/secret"
	"bulkhead.dev/tenancy/tenancydb"
)

// Tenant is a customer: the unit that isolation separates.
type Tenant struct {
	ID        id.Tenant
	Name      string
	Platform  bool // the operator's own tenant
	Created   time.Time
	Suspended time.Time // zero: active
}

// Project groups the keys and the usage of a tenant.
type Project struct {
	ID      id.Project
	Tenant  id.Tenant
	Name    string
	Created time.Time
}

// Key describes an API key. The secret is not part of it.
type Key struct {
	ID      id.Key
	Tenant  id.Tenant
	Project id.Project
	Name    string
	Prefix  string // the public beginning, for recognising it in a list
	Scopes  Scopes
	Created time.Time
	Revoked time.Time // zero: in force
}

// Store creates and lists tenants, projects and keys. Errors are *apperr.Error.
// It is safe for concurrent use.
type Store struct {
	db   pgdb.DB
	keys KeyFile
	now  func() time.Time
}

// NewStore makes a store over a pool of the role bulkhead_app.
func NewStore(db pgdb.DB, keys KeyFile, now func() time.Time) *Store {
	return &Store{db: db, keys: keys, now: now}
}

// Page asks for a part of a list. Lists are in order of creation.
type Page struct {
	Size  int    // 0 is DefaultPage; more than MaxPage is MaxPage
	Token string // what the page before returned as its next token; "" for the first
}

// Bounds of a page, in entries.
const (
	DefaultPage = 50
	MaxPage     = 200
)

// maxName is the length of a name in characters; the schema has the same.
const maxName = 128

// CreateTenant makes a tenant with a first project named "default". Only the
// operator may.
func (s *Store) CreateTenant(ctx context.Context, p Principal, name string) (Tenant, Project, error) {
	if err := p.Require(ScopePlatform); err != nil {
		return Tenant{}, Project{}, err
	}
	if err := checkName(name); err != nil {
		return Tenant{}, Project{}, err
	}
	var t Tenant
	var pr Project
	err := pgdb.WithTenant(ctx, s.db, p.Tenant, func(tx pgx.Tx) (err error) {
		t, pr, err = s.insertTenant(ctx, tx, name)
		return err
	})
	return t, pr, public("create tenant", err)
}

// insertTenant needs a transaction bound to the operator's tenant and leaves it
// bound to the new one.
func (s *Store) insertTenant(ctx context.Context, tx pgx.Tx, name string) (Tenant, Project, error) {
	now := s.stamp()
	t := Tenant{ID: id.NewTenant(now), Name: name, Created: now}
	if err := tenancydb.New(tx).InsertTenant(ctx, tenancydb.InsertTenantParams{ID: t.ID, Name: name, CreatedAt: now}); err != nil {
		return t, Project{}, err
	}
	// No tenant is without limits.
	if err := tenancydb.New(tx).DefaultLimits(ctx, tenancydb.DefaultLimitsParams{Tenant: t.ID, At: now}); err != nil {
		return t, Project{}, err
	}
	if err := pgdb.SetTenant(ctx, tx, t.ID); err != nil {
		return t, Project{}, err
	}
	pr, err := s.insertProject(ctx, tx, t.ID, firstProject)
	return t, pr, err
}

// firstProject is the name of the project that every tenant starts with.
const firstProject = "default"

// ListTenants lists all tenants. Only the operator may.
func (s *Store) ListTenants(ctx context.Context, p Principal, page Page) (list []Tenant, next string, err error) {
	if err := p.Require(ScopePlatform); err != nil {
		return nil, "", err
	}
	after, err := parseToken(page.Token, id.ParseTenant)
	if err != nil {
		return nil, "", err
	}
	err = pgdb.WithTenant(ctx, s.db, p.Tenant, func(tx pgx.Tx) error {
		rows, err := tenancydb.New(tx).Tenants(ctx, tenancydb.TenantsParams{After: after, Page: page.limit()})
		for _, r := range rows {
			t := Tenant{ID: r.ID, Name: r.Name, Platform: r.Platform, Created: r.CreatedAt.UTC(), Suspended: deref(r.SuspendedAt)}
			list = append(list, t)
		}
		return err
	})
	list, next = cut(list, page, func(t Tenant) string { return t.ID.String() })
	return list, next, public("list tenants", err)
}

// CreateProject makes a project of the caller's tenant.
func (s *Store) CreateProject(ctx context.Context, p Principal, name string) (Project, error) {
	if err := p.Require(ScopeKeysWrite); err != nil {
		return Project{}, err
	}
	if err := checkName(name); err != nil {
		return Project{}, err
	}
	var pr Project
	err := pgdb.WithTenant(ctx, s.db, p.Tenant, func(tx pgx.Tx) (err error) {
		pr, err = s.insertProject(ctx, tx, p.Tenant, name)
		return err
	})
	return pr, public("create project", err)
}

func (s *Store) insertProject(ctx context.Context, tx pgx.Tx, tenant id.Tenant, name string) (Project, error) {
	now := s.stamp()
	pr := Project{ID: id.NewProject(now), Tenant: tenant, Name: name, Created: now}
	return pr, tenancydb.New(tx).InsertProject(ctx, tenancydb.InsertProjectParams{
		ID: pr.ID, Tenant: tenant, Name: name, CreatedAt: now})
}

// ListProjects lists the projects of the caller's tenant.
func (s *Store) ListProjects(ctx context.Context, p Principal, page Page) (list []Project, next string, err error) {
	if err := p.Require(ScopeKeysRead); err != nil {
		return nil, "", err
	}
	after, err := parseToken(page.Token, id.ParseProject)
	if err != nil {
		return nil, "", err
	}
	err = pgdb.WithTenant(ctx, s.db, p.Tenant, func(tx pgx.Tx) error {
		rows, err := tenancydb.New(tx).Projects(ctx, tenancydb.ProjectsParams{After: after, Page: page.limit()})
		for _, r := range rows {
			list = append(list, Project{ID: r.ID, Tenant: r.Tenant, Name: r.Name, Created: r.CreatedAt.UTC()})
		}
		return err
	})
	list, next = cut(list, page, func(p Project) string { return p.ID.String() })
	return list, next, public("list projects", err)
}

// NewKey says what key to make.
type NewKey struct {
	// Tenant is only for the operator, who may make a key for another tenant.
	// Zero is the tenant of the caller.
	Tenant id.Tenant
	// Project is where the key belongs. Zero is the project of the caller's
	// key, or the project "default" of another tenant.
	Project id.Project
	Name    string // a label; may be empty
	Scopes  Scopes // zero is ScopesDefault
}

// CreateKey makes a key and returns it with its secret, which is shown once and
// not stored. Nobody can hand out a scope that they do not have, and a key with
// ScopePlatform exists only in the operator's tenant.
func (s *Store) CreateKey(ctx context.Context, p Principal, n NewKey) (Key, secret.String, error) {
	none := secret.String{}
	if err := p.Require(ScopeKeysWrite); err != nil {
		return Key{}, none, err
	}
	if n.Scopes == 0 {
		n.Scopes = ScopesDefault
	}
	if n.Tenant == (id.Tenant{}) {
		n.Tenant = p.Tenant
	}
	need := n.Scopes
	if n.Tenant != p.Tenant {
		need |= ScopePlatform
		if n.Scopes.Has(ScopePlatform) {
			return Key{}, none, apperr.New(apperr.Forbidden, "operator_scope",
				"The scope platform:admin cannot be given to a key of another tenant.").WithParam("scopes")
		}
	} else if n.Project == (id.Project{}) {
		n.Project = p.Project
	}
	if err := p.Require(need); err != nil {
		return Key{}, none, err
	}
	if n.Name != "" {
		if err := checkName(n.Name); err != nil {
			return Key{}, none, err
		}
	}
	var k Key
	var text secret.String
	err := pgdb.WithTenant(ctx, s.db, n.Tenant, func(tx pgx.Tx) (err error) {
		if n.Project == (id.Project{}) {
			r, err := tenancydb.New(tx).ProjectByName(ctx, firstProject)
			if err != nil {
				return err
			}
			n.Project = r.ID
		}
		k, text, err = s.insertKey(ctx, tx, n)
		return err
	})
	if err != nil {
		return Key{}, none, public("create key", err)
	}
	return k, text, nil
}

func (s *Store) insertKey(ctx context.Context, tx pgx.Tx, n NewKey) (Key, secret.String, error) {
	text, prefix := newKey()
	pepperID, pepper := s.keys.Pepper()
	now := s.stamp()
	k := Key{ID: id.NewKey(now), Tenant: n.Tenant, Project: n.Project, Name: n.Name, Prefix: keyIntro + prefix, Scopes: n.Scopes, Created: now}
	err := tenancydb.New(tx).InsertKey(ctx, tenancydb.InsertKeyParams{
		ID: k.ID, Tenant: k.Tenant, Project: k.Project, Name: k.Name, Prefix: prefix,
		Hmac: hashKey(pepper, text.Reveal()), PepperID: pepperID, Scopes: k.Scopes.Strings(), CreatedAt: now,
	})
	return k, text, err
}

// hashKey is what is stored of a key.
func hashKey(pepper [32]byte, key string) []byte {
	m := hmac.New(sha256.New, pepper[:])
	m.Write([]byte(key))
	return m.Sum(nil)
}

// ListKeys lists the keys of the caller's tenant, the revoked ones too.
func (s *Store) ListKeys(ctx context.Context, p Principal, page Page) (list []Key, next string, err error) {
	if err := p.Require(ScopeKeysRead); err != nil {
		return nil, "", err
	}
	after, err := parseToken(page.Token, id.ParseKey)
	if err != nil {
		return nil, "", err
	}
	err = pgdb.WithTenant(ctx, s.db, p.Tenant, func(tx pgx.Tx) error {
		rows, err := tenancydb.New(tx).Keys(ctx, tenancydb.KeysParams{After: after, Page: page.limit()})
		for _, r := range rows {
			list = append(list, keyOf(tenancydb.RevokeKeyRow(r)))
		}
		return err
	})
	list, next = cut(list, page, func(k Key) string { return k.ID.String() })
	return list, next, public("list keys", err)
}

// RevokeKey ends a key of the caller's tenant. It takes effect within a second
// on every replica that reaches the database. Revoking a revoked key succeeds.
func (s *Store) RevokeKey(ctx context.Context, p Principal, key id.Key) (Key, error) {
	if err := p.Require(ScopeKeysWrite); err != nil {
		return Key{}, err
	}
	var k Key
	err := pgdb.WithTenant(ctx, s.db, p.Tenant, func(tx pgx.Tx) error {
		r, err := tenancydb.New(tx).RevokeKey(ctx, tenancydb.RevokeKeyParams{At: s.stamp(), ID: key})
		k = keyOf(r)
		return err
	})
	if err != nil {
		return Key{}, public("revoke key", err)
	}
	return k, nil
}

func keyOf(r tenancydb.RevokeKeyRow) Key {
	return Key{ID: r.ID, Tenant: r.Tenant, Project: r.Project, Name: r.Name, Prefix: keyIntro + r.Prefix,
		Scopes: storedScopes(r.Scopes), Created: r.CreatedAt.UTC(), Revoked: deref(r.RevokedAt)}
}

// storedScopes drops texts that this version does not know: a scope of a newer
// version gives nothing here.
func storedScopes(texts []string) Scopes {
	var s Scopes
	for _, text := range texts {
		if one, err := ParseScopes([]string{text}); err == nil {
			s |= one
		}
	}
	return s
}

// stamp is the present in the resolution of the database, so that what is
// returned on creation equals what is listed later.
func (s *Store) stamp() time.Time { return s.now().UTC().Truncate(time.Microsecond) }

func (p Page) limit() int32 {
	return int32(p.size() + 1) // one more tells whether there is a next page
}

func (p Page) size() int {
	if p.Size <= 0 {
		return DefaultPage
	}
	return min(p.Size, MaxPage)
}

// cut drops the entry beyond the page and makes the token of the next one.
func cut[T any](list []T, p Page, token func(T) string) ([]T, string) {
	if len(list) <= p.size() {
		return list, ""
	}
	list = list[:p.size()]
	return list, token(list[len(list)-1])
}

func parseToken[T ~[16]byte](token string, parse func(string) (T, error)) (T, error) {
	if token == "" {
		return T{}, nil
	}
	v, err := parse(token)
	if err != nil {
		return T{}, apperr.New(apperr.Invalid, "invalid_page_token", "The page token is not one of this list.").WithParam("page_token")
	}
	return v, nil
}

func checkName(name string) error {
	n := 0
	for _, r := range name {
		if !unicode.IsPrint(r) || r == utf8.RuneError {
			return apperr.New(apperr.Invalid, "invalid_name", "The name has characters that cannot be printed.").WithParam("name")
		}
		n++
	}
	if n == 0 || n > maxName {
		return apperr.New(apperr.Invalid, "invalid_name", "A name has 1 to %d characters.", maxName).WithParam("name")
	}
	return nil
}

func deref(t *time.Time) time.Time {
	if t == nil {
		return time.Time{}
	}
	return t.UTC()
}

// public turns an error of the database into one that a caller may see.
func public(op string, err error) error {
	if err == nil {
		return nil
	}
	if _, ok := errors.AsType[*apperr.Error](err); ok {
		return err
	}
	err = pgdb.Wrap(op, err)
	switch state := pgdb.State(err); {
	case errors.Is(err, pgx.ErrNoRows), state == pgdb.StateForeignKey:
		return apperr.Wrap(err, apperr.NotFound, "not_found", "There is no such object.")
	case state == pgdb.StateUniqueViolation:
		return apperr.Wrap(err, apperr.Conflict, "name_taken", "The name is taken.").WithParam("name")
	case errors.Is(err, context.Canceled):
		return apperr.From(err)
	case pgdb.IsUnavailable(err):
		return apperr.Wrap(err, apperr.Unavailable, "database_unavailable", "The platform cannot reach its database now.").WithRetryAfter(retryAfter)
	}
	return apperr.From(err)
}

// retryAfter is the hint of a 503: most outages of a database are fail-overs
// that take seconds.
const retryAfter = time.Second
