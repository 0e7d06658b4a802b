package pgdb_test

import (
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/infra/pgdb"
	"bulkhead.dev/infra/pgdb/pgtest"
	"bulkhead.dev/infra/secret"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// rows returns the first column of a query.
func rows(t *testing.T, c *pgx.Conn, sql string, args ...any) []string {
	t.Helper()
	r, err := c.Query(t.Context(), sql, args...)
	assert.NoError(t, err)
	out, err := pgx.CollectRows(r, pgx.RowTo[string])
	assert.NoError(t, err)
	return out
}

// Every table that has a tenant's rows has forced row-level security.
func TestEveryTenantTableIsWalled(t *testing.T) {
	t.Parallel()
	b := pgtest.New(t)
	admin := b.Admin(t)
	const tenantTables = `
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = 'bulkhead' AND c.relkind IN ('r', 'p')
  AND (c.relname = 'tenant' OR EXISTS (SELECT 1 FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attname = 'tenant' AND NOT a.attisdropped))`
	all := rows(t, admin, `SELECT c.relname::text `+tenantTables+` ORDER BY 1`)
	assert.True(t, len(all) >= 6)
	assert.Equal(t, len(rows(t, admin, `SELECT c.relname::text `+tenantTables+` AND NOT (c.relrowsecurity AND c.relforcerowsecurity)`)), 0)
	bad := `CREATE TABLE bulkhead.forgotten (tenant uuid NOT NULL)`
	_, err := admin.Exec(t.Context(), bad)
	assert.NoError(t, err)
	assert.Equal(t, rows(t, admin, `SELECT c.relname::text `+tenantTables+` AND NOT (c.relrowsecurity AND c.relforcerowsecurity)`), []string{"forgotten"})
}

// A query that forgets its WHERE sees its own tenant, and nobody without one.
func TestWrongQueriesSeeNothing(t *testing.T) {
	t.Parallel()
	b := pgtest.New(t)
	admin := b.Admin(t)
	one, two := id.NewTenant(time.Now()), id.NewTenant(time.Now())
	for name, tenant := range map[string]id.Tenant{"one": one, "two": two} {
		_, err := admin.Exec(t.Context(), `INSERT INTO bulkhead.tenant (id, name, created_at) VALUES ($1, $2, now())`, [16]byte(tenant), name)
		assert.NoError(t, err)
		_, err = admin.Exec(t.Context(), `INSERT INTO bulkhead.project (id, tenant, name, created_at) VALUES ($1, $2, $3, now())`,
			[16]byte(id.NewProject(time.Now())), [16]byte(tenant), name)
		assert.NoError(t, err)
	}
	see := func(tenant id.Tenant) (names []string) {
		assert.NoError(t, pgdb.WithTenant(t.Context(), b.Pools.App, tenant, func(tx pgx.Tx) error {
			r, err := tx.Query(t.Context(), `SELECT name FROM project`)
			if err == nil {
				names, err = pgx.CollectRows(r, pgx.RowTo[string])
			}
			return err
		}))
		return names
	}
	assert.Equal(t, see(one), []string{"one"})
	assert.Equal(t, see(two), []string{"two"})
	assert.Equal(t, len(see(id.NewTenant(time.Now()))), 0)
	var n int
	assert.NoError(t, b.Pools.App.QueryRow(t.Context(), `SELECT count(*) FROM project`).Scan(&n))
	assert.Equal(t, n, 0)
	// Nor may it write into another tenant.
	err := pgdb.WithTenant(t.Context(), b.Pools.App, one, func(tx pgx.Tx) error {
		_, err := tx.Exec(t.Context(), `INSERT INTO project (id, tenant, name, created_at) VALUES ($1, $2, 'x', now())`,
			[16]byte(id.NewProject(time.Now())), [16]byte(two))
		return err
	})
	assert.True(t, err != nil)
	// The tenant of a transaction does not outlive it on the connection.
	assert.NoError(t, b.Pools.App.QueryRow(t.Context(), `SELECT count(*) FROM project`).Scan(&n))
	assert.Equal(t, n, 0)
	// Authentication sees no table at all.
	assert.True(t, b.Pools.Auth.QueryRow(t.Context(), `SELECT count(*) FROM api_key`).Scan(&n) != nil)
}

func TestMigrateAgainAndTogether(t *testing.T) {
	t.Parallel()
	b := pgtest.New(t)
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			from, to, err := pgdb.Migrate(t.Context(), b.Source)
			if err != nil || from != to || to < 1 {
				t.Errorf("migrated from %d to %d: %v", from, to, err)
			}
		})
	}
	wg.Wait()
}

func TestUnreachable(t *testing.T) {
	t.Parallel()
	src := pgdb.Source{DSN: secret.New("postgres://u:hunter2@127.0.0.1:1/x"), RoleSecret: secret.New("s")}
	_, _, err := pgdb.Migrate(t.Context(), src)
	assert.True(t, pgdb.IsUnavailable(err))
	p, err := pgdb.Open(t.Context(), src, pgdb.DefaultSizes)
	assert.NoError(t, err)
	defer p.Close()
	err = p.App.Ping(t.Context())
	assert.True(t, pgdb.IsUnavailable(err))
}
