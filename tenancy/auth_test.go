package tenancy_test

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/tenancy"
)

// clock is a clock that the test turns.
type clock struct{ offset atomic.Int64 }

func (c *clock) now() time.Time          { return time.Now().Add(time.Duration(c.offset.Load())) }
func (c *clock) advance(d time.Duration) { c.offset.Add(int64(d)) }
func kind(t *testing.T, err error) apperr.Kind {
	t.Helper()
	return assert.ErrorAs[*apperr.Error](t, err).Kind
}

func TestAuthenticate(t *testing.T) {
	t.Parallel()
	b := setup(t)
	a := b.auth(t, time.Now)
	p, err := a.Authenticate(t.Context(), b.first.TenantKey.Reveal())
	assert.NoError(t, err)
	assert.Equal(t, p.Tenant, b.first.Tenant.ID)
	assert.Equal(t, p.Scopes, tenancy.ScopesTenant)
	assert.Equal(t, p.Owner, tenancy.OwnerTag(b.keys.PlatformKey(), p.Tenant, 1))
	op, err := a.Authenticate(t.Context(), b.first.OperatorKey.Reveal())
	assert.NoError(t, err)
	assert.True(t, op.Scopes.Has(tenancy.ScopePlatform))
	assert.True(t, op.Owner != p.Owner)

	key := b.first.TenantKey.Reveal()
	lookups := a.Counts().Lookups
	for _, bad := range []string{"", "x", key[:len(key)-1], key + "0", strings.ToLower(key), key[:20] + "0" + key[21:]} {
		_, err := a.Authenticate(t.Context(), bad)
		assert.Equal(t, kind(t, err), apperr.Unauthenticated)
	}
	assert.Equal(t, a.Counts().Lookups, lookups) // a mistyped key costs no query
	// A whole key of another platform, with the right checksum.
	other := setup(t)
	_, err = a.Authenticate(t.Context(), other.first.TenantKey.Reveal())
	assert.Equal(t, kind(t, err), apperr.Unauthenticated)
	// The same database with another pepper file knows none of its keys.
	keys, err := tenancy.CreateKeyFile(t.TempDir() + "/keys.json")
	assert.NoError(t, err)
	strange := tenancy.NewAuthenticator(b.Pools.Auth, keys, time.Now)
	defer strange.Close()
	_, err = strange.Authenticate(t.Context(), key)
	assert.True(t, err != nil)
}

func TestRevocationWithinASecond(t *testing.T) {
	t.Parallel()
	b := setup(t)
	var c clock
	a := b.auth(t, c.now)
	_, err := a.Authenticate(t.Context(), b.first.TenantKey.Reveal())
	assert.NoError(t, err)
	_, err = b.store.RevokeKey(t.Context(), b.tenant(), b.first.Key.ID)
	assert.NoError(t, err)
	c.advance(time.Second)
	_, err = a.Authenticate(t.Context(), b.first.TenantKey.Reveal())
	assert.Equal(t, kind(t, err), apperr.Unauthenticated)
	_, err = b.store.RevokeKey(t.Context(), b.tenant(), b.first.Key.ID) // again
	assert.NoError(t, err)
}

// An outage is never taken for a bad key.
func TestOutage(t *testing.T) {
	t.Parallel()
	b := setup(t)
	var c clock
	a := b.auth(t, c.now)
	_, err := a.Authenticate(t.Context(), b.first.TenantKey.Reveal())
	assert.NoError(t, err)
	b.Pools.Auth.Close()
	for range 9 {
		c.advance(time.Second)
		_, err = a.Authenticate(t.Context(), b.first.TenantKey.Reveal())
		assert.NoError(t, err)
	}
	_, err = a.Authenticate(t.Context(), b.first.OperatorKey.Reveal()) // never seen
	assert.Equal(t, kind(t, err), apperr.Unavailable)
	assert.True(t, assert.ErrorAs[*apperr.Error](t, err).RetryAfter > 0)
	c.advance(2 * time.Second)
	_, err = a.Authenticate(t.Context(), b.first.TenantKey.Reveal())
	assert.Equal(t, kind(t, err), apperr.Unavailable)
}

// No table holds a key, whole or its secret half.
func TestKeysAreNotStored(t *testing.T) {
	t.Parallel()
	b := setup(t)
	admin := b.Admin(t)
	r, err := admin.Query(t.Context(), `SELECT tablename::text FROM pg_tables WHERE schemaname = 'bulkhead'`)
	assert.NoError(t, err)
	tables, err := pgx.CollectRows(r, pgx.RowTo[string])
	assert.NoError(t, err)
	secret := b.first.TenantKey.Reveal()[22:]
	found := 0
	for _, table := range tables {
		var text string
		assert.NoError(t, admin.QueryRow(t.Context(), fmt.Sprintf(`SELECT coalesce(string_agg(t::text, ' '), '') FROM bulkhead.%s t`, table)).Scan(&text))
		assert.False(t, strings.Contains(text, secret) || strings.Contains(text, secret[:43]))
		if strings.Contains(text, strings.TrimPrefix(b.first.Key.Prefix, tenancy.KeyIntro)) {
			found++
		}
	}
	assert.Equal(t, found, 1)
}
