package pgdb_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/infra/pgdb"
	"bulkhead.dev/infra/pgdb/pgtest"
)

// goldenGrants is every right that a role has, beyond connecting to the
// database: tables, single columns, functions and the schema, PUBLIC included. A right that a migration adds must be added here, on purpose.
var goldenGrants = map[string][]string{
	"PUBLIC": nil,
	"bulkhead_app": {
		"delete quota_limit",
		"execute bootstrap_platform", "execute current_is_platform", "execute current_tenant",
		"execute quota_advance", "execute quota_defaults", "execute quota_now", "execute quota_window",
		"insert api_key", "insert model", "insert price", "insert project", "insert quota_limit", "insert tenant", "insert worker",
		"schema USAGE",
		"select api_key", "select model", "select price", "select project", "select quota_bucket", "select quota_limit", "select quota_slice", "select quota_spend",
		"select receipt", "select replica", "select tenant", "select usage", "select worker",
		"update api_key(revoked_at)", "update model",
		"update quota_limit(amount)", "update quota_limit(soft)", "update quota_limit(version)", "update worker",
	},
	"bulkhead_auth": {"execute find_api_key", "schema USAGE"},
	"bulkhead_settle": {
		"delete intent", "delete quota_slice", "delete quota_spend",
		"execute quota_advance", "execute quota_exchange", "execute quota_now", "execute quota_recover", "execute quota_window",
		"insert intent", "insert page_history", "insert quota_bucket", "insert quota_slice", "insert quota_spend", "insert receipt", "insert replica", "insert usage",
		"schema USAGE",
		"select intent", "select page_history", "select price", "select quota_bucket", "select quota_limit", "select quota_slice", "select quota_spend",
		"select receipt", "select replica", "select usage",
		"update quota_bucket", "update quota_limit(version)", "update quota_slice", "update quota_spend", "update replica",
	},
	"bulkhead_log": nil,
}

func TestEveryRight(t *testing.T) {
	t.Parallel()
	b := pgtest.New(t)
	rows, err := b.Admin(t).Query(t.Context(), `
		WITH grants AS (
			SELECT a.grantee, lower(a.privilege_type) || ' ' || c.relname AS what
			FROM pg_class c CROSS JOIN aclexplode(c.relacl) a
			WHERE c.relnamespace = 'bulkhead'::regnamespace AND c.relkind IN ('r', 'p', 'v', 'm', 'S', 'f')
			UNION ALL
			SELECT a.grantee, lower(a.privilege_type) || ' ' || c.relname || '(' || t.attname || ')'
			FROM pg_attribute t JOIN pg_class c ON c.oid = t.attrelid CROSS JOIN aclexplode(t.attacl) a
			WHERE c.relnamespace = 'bulkhead'::regnamespace
			UNION ALL
			-- A function without an access list has the default one.
			SELECT a.grantee, 'execute ' || p.proname
			FROM pg_proc p CROSS JOIN aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a
			WHERE p.pronamespace = 'bulkhead'::regnamespace
			UNION ALL
			SELECT a.grantee, 'schema ' || a.privilege_type
			FROM pg_namespace n CROSS JOIN aclexplode(n.nspacl) a WHERE n.nspname = 'bulkhead'
		)
		SELECT CASE WHEN grantee = 0 THEN 'PUBLIC' ELSE grantee::regrole::text END, what
		FROM grants WHERE grantee <> 'bulkhead_owner'::regrole ORDER BY 1, 2`)
	assert.NoError(t, err)
	got := map[string][]string{"PUBLIC": nil, "bulkhead_log": nil}
	var role, what string
	_, err = pgx.ForEachRow(rows, []any{&role, &what}, func() error {
		got[role] = append(got[role], what)
		return nil
	})
	assert.NoError(t, err)
	assert.Equal(t, got, goldenGrants)
}

func TestRoleAttributes(t *testing.T) {
	t.Parallel()
	b := pgtest.New(t)
	rows, err := b.Admin(t).Query(t.Context(), `SELECT rolname || ' ' || concat_ws(' ', CASE WHEN rolcanlogin THEN 'login' END,
		CASE WHEN rolsuper THEN 'SUPER' END, CASE WHEN rolbypassrls THEN 'BYPASSRLS' END, CASE WHEN rolcreaterole THEN 'CREATEROLE' END,
		CASE WHEN rolcreatedb THEN 'CREATEDB' END, CASE WHEN rolreplication THEN 'REPLICATION' END,
		(SELECT 'member of ' || string_agg(roleid::regrole::text, ',') FROM pg_auth_members WHERE member = r.oid))
		FROM pg_roles r WHERE rolname LIKE 'bulkhead\_%' AND rolname <> 'bulkhead_admin' ORDER BY 1`)
	assert.NoError(t, err)
	got, err := pgx.CollectRows(rows, pgx.RowTo[string])
	assert.NoError(t, err)
	assert.Equal(t, got, []string{"bulkhead_app login", "bulkhead_auth login", "bulkhead_log login", "bulkhead_owner ", "bulkhead_settle login"})
}

// unforced lists tables that hold a tenant's rows and are not subject to a
// forced policy. Partitions need no policy of their own: without one nobody but
// a superuser sees anything in them directly.
const unforced = `
	SELECT c.relname FROM pg_class c
	WHERE c.relnamespace = 'bulkhead'::regnamespace AND c.relkind IN ('r', 'p')
	  AND (c.relname = 'tenant' OR EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = c.oid AND NOT a.attisdropped AND a.attname LIKE 'tenant%'))
	  AND NOT (c.relrowsecurity AND c.relforcerowsecurity
	       AND (c.relispartition OR EXISTS (SELECT FROM pg_policy p WHERE p.polrelid = c.oid)))
	ORDER BY 1`

func TestForcedPolicies(t *testing.T) {
	t.Parallel()
	admin := pgtest.New(t).Admin(t)
	list := func() []string {
		rows, err := admin.Query(t.Context(), unforced)
		assert.NoError(t, err)
		got, err := pgx.CollectRows(rows, pgx.RowTo[string])
		assert.NoError(t, err)
		return got
	}
	assert.Equal(t, len(list()), 0)
	// The check itself can fail.
	for _, sql := range []string{"CREATE TABLE forgotten (tenant uuid)", "ALTER TABLE usage NO FORCE ROW LEVEL SECURITY",
		"DROP POLICY settle ON intent", "ALTER TABLE receipt_default DISABLE ROW LEVEL SECURITY"} {
		_, err := admin.Exec(t.Context(), sql)
		assert.NoError(t, err)
	}
	assert.Equal(t, list(), []string{"forgotten", "intent", "receipt_default", "usage"})
}

// plant makes a row of a tenant in every table that tenants have.
func plant(t *testing.T, admin *pgx.Conn, tenant id.Tenant, name string) {
	t.Helper()
	project, key, request, limit := id.NewProject(time.Now()), id.NewKey(time.Now()), id.NewRequest(time.Now()), id.NewLimit(time.Now())
	for _, s := range []struct {
		sql  string
		args []any
	}{
		{"INSERT INTO tenant (id, name, created_at) VALUES ($1, $2, now())", []any{[16]byte(tenant), name}},
		{"INSERT INTO project VALUES ($1, $2, 'p', now())", []any{[16]byte(project), [16]byte(tenant)}},
		{`INSERT INTO api_key (id, tenant, project, name, prefix, hmac, pepper_id, scopes, created_at)
			VALUES ($1, $2, $3, 'k', $4, $5, 'p1', '{}', now())`,
			[]any{[16]byte(key), [16]byte(tenant), [16]byte(project), fmt.Sprintf("%012s", name), make([]byte, 32)}},
		{"INSERT INTO intent VALUES ($1, $2, $3, $4, $5, 0, now())",
			[]any{[16]byte(request), [16]byte(tenant), [16]byte(project), [16]byte(key), [16]byte(request)}},
		{`INSERT INTO usage VALUES ($1, $2, $3, $4, 'm', ''::bytea, 's', false, 'lost', false, '', 0, 0, 0, 0, 0, now(), null, null, now(), $5)`,
			[]any{[16]byte(request), [16]byte(tenant), [16]byte(project), [16]byte(key), make([]byte, 32)}},
		{`INSERT INTO receipt (request_id, tenant, body, digest, model_digest, output_tokens, outcome, withheld)
			VALUES ($1, $2, 'x'::bytea, $3, ''::bytea, 0, 'lost', false)`, []any{[16]byte(request), [16]byte(tenant), make([]byte, 32)}},
		{`INSERT INTO quota_limit (id, tenant, meter, period, amount, platform, created_at) VALUES ($1, $2, 'requests', 'day', 1, false, now())`,
			[]any{[16]byte(limit), [16]byte(tenant)}},
		{`INSERT INTO quota_bucket (limit_id, tenant, window_start, drained_at) VALUES ($1, $2, now(), now())`, []any{[16]byte(limit), [16]byte(tenant)}},
		{`INSERT INTO replica (epoch, address, build, started_at, lease_until) VALUES ($1, '', '', now(), now())`, []any{[16]byte(request)}},
		{`INSERT INTO quota_slice (replica, limit_id, window_start, tenant, held) VALUES ($1, $2, now(), $3, 0)`, []any{[16]byte(request), [16]byte(limit), [16]byte(tenant)}},
		{`INSERT INTO quota_spend (replica, limit_id, window_start, tenant, amount) VALUES ($1, $2, now(), $3, 0)`, []any{[16]byte(request), [16]byte(limit), [16]byte(tenant)}},
	} {
		_, err := admin.Exec(t.Context(), s.sql, s.args...)
		assert.NoError(t, err)
	}
}

// A query that forgets its tenant, or names another one, sees nothing of
// anybody else.
func TestWrongQueryInEveryTable(t *testing.T) {
	t.Parallel()
	b := pgtest.New(t)
	admin := b.Admin(t)
	a, other := id.NewTenant(time.Now()), id.NewTenant(time.Now())
	plant(t, admin, a, "a")
	plant(t, admin, other, "b")

	// Every table with a tenant that the application may read, so that none can
	// be forgotten here.
	rows, err := admin.Query(t.Context(), `SELECT c.relname::text FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = 'tenant'
		WHERE c.relnamespace = 'bulkhead'::regnamespace AND c.relkind IN ('r', 'p') AND NOT c.relispartition AND has_table_privilege('bulkhead_app', c.oid, 'SELECT')`)
	assert.NoError(t, err)
	tables, err := pgx.CollectRows(rows, pgx.RowTo[string])
	assert.NoError(t, err)
	assert.True(t, len(tables) >= 8)
	for _, table := range append(tables, "tenant") {
		column := "tenant"
		if table == "tenant" {
			column = "id"
		}
		t.Run(table, func(t *testing.T) {
			var all, mine, theirs int
			// No tenant is set: nothing, not everything.
			assert.NoError(t, b.Pools.App.QueryRow(t.Context(), "SELECT count(*) FROM "+table).Scan(&all))
			assert.Equal(t, all, 0)
			err := pgdb.WithTenant(t.Context(), b.Pools.App, a, func(tx pgx.Tx) error {
				return tx.QueryRow(t.Context(), "SELECT count(*), count(*) FILTER (WHERE "+column+" = $1), count(*) FILTER (WHERE "+column+" = $2) FROM "+table,
					[16]byte(a), [16]byte(other)).Scan(&all, &mine, &theirs)
			})
			assert.NoError(t, err)
			assert.Equal(t, []int{all, mine, theirs}, []int{1, 1, 0})
			// The binding ends with the transaction: the pool hands out the same connection.
			assert.NoError(t, b.Pools.App.QueryRow(t.Context(), "SELECT count(*) FROM "+table).Scan(&all))
			assert.Equal(t, all, 0)
		})
	}
	t.Run("writing for another tenant", func(t *testing.T) {
		err := pgdb.WithTenant(t.Context(), b.Pools.App, a, func(tx pgx.Tx) error {
			_, err := tx.Exec(t.Context(), "INSERT INTO project VALUES ($1, $2, 'intruder', now())", [16]byte(id.NewProject(time.Now())), [16]byte(other))
			return err
		})
		assert.Equal(t, pgdb.State(err), "42501")
		err = pgdb.WithTenant(t.Context(), b.Pools.App, a, func(tx pgx.Tx) error {
			tag, err := tx.Exec(t.Context(), "UPDATE api_key SET revoked_at = now()")
			assert.Equal(t, tag.RowsAffected(), 1)
			return err
		})
		assert.NoError(t, err)
	})
	t.Run("a tenant cannot make tenants", func(t *testing.T) {
		err := pgdb.WithTenant(t.Context(), b.Pools.App, a, func(tx pgx.Tx) error {
			_, err := tx.Exec(t.Context(), "INSERT INTO tenant (id, name, created_at) VALUES ($1, 'x', now())", [16]byte(id.NewTenant(time.Now())))
			return err
		})
		assert.Equal(t, pgdb.State(err), "42501")
	})
}

// What each role must not be able to do, asked directly.
func TestRolesAreRefused(t *testing.T) {
	t.Parallel()
	b := pgtest.New(t)
	for role, c := range map[string]struct {
		pool *pgxpool.Pool
		sql  []string
	}{
		"app": {b.Pools.App, []string{"SELECT * FROM intent", "INSERT INTO usage DEFAULT VALUES", "INSERT INTO receipt DEFAULT VALUES",
			"UPDATE receipt SET body = ''", "DELETE FROM api_key", "UPDATE api_key SET hmac = ''", "SELECT * FROM receipt_default",
			"SELECT find_api_key('x')", "SET ROLE bulkhead_owner", "CREATE TABLE x (a int)", "ALTER TABLE usage DISABLE ROW LEVEL SECURITY", "SELECT extend_partitions(1)"}},
		"auth": {b.Pools.Auth, []string{"SELECT * FROM api_key", "SELECT * FROM tenant", "SELECT * FROM model", "SELECT bootstrap_platform(null, '', now())", "SELECT current_is_platform()"}},
		"settle": {b.Pools.Settle, []string{"SELECT * FROM api_key", "SELECT * FROM tenant", "UPDATE receipt SET body = ''", "DELETE FROM receipt",
			"DELETE FROM usage", "UPDATE usage SET output_tokens = 0", "SELECT * FROM worker", "SELECT find_api_key('x')"}},
	} {
		for _, sql := range c.sql {
			t.Run(role+" "+sql, func(t *testing.T) {
				_, err := c.pool.Exec(t.Context(), sql)
				assert.Equal(t, pgdb.State(err), "42501")
			})
		}
	}
}

// Rows land in the partition of their month.
func TestPartitions(t *testing.T) {
	t.Parallel()
	b := pgtest.New(t)
	admin := b.Admin(t)
	tenant := id.NewTenant(time.Now())
	plant(t, admin, tenant, "a")
	for _, table := range []string{"usage", "receipt"} {
		var part string
		assert.NoError(t, admin.QueryRow(t.Context(), "SELECT tableoid::regclass::text FROM "+table).Scan(&part))
		assert.Equal(t, part, table+"_"+time.Now().UTC().Format("2006_01"))
	}
	var n int
	assert.NoError(t, admin.QueryRow(t.Context(), "SELECT extend_partitions(5)").Scan(&n))
	assert.Equal(t, n, 4) // three months ahead are there already
	assert.NoError(t, admin.QueryRow(t.Context(), "SELECT extend_partitions(5)").Scan(&n))
	assert.Equal(t, n, 0)
	rows, err := admin.Query(t.Context(), unforced)
	assert.NoError(t, err)
	open, err := pgx.CollectRows(rows, pgx.RowTo[string])
	assert.NoError(t, err)
	assert.Equal(t, len(open), 0)
	// The smallest id of a moment is not above any id of it.
	at := time.UnixMilli(1_790_000_000_123)
	var first [16]byte
	assert.NoError(t, admin.QueryRow(t.Context(), "SELECT first_id_of($1)", at).Scan(&first))
	r := id.NewRequest(at)
	assert.True(t, slices.Equal(first[:6], r[:6]) && strings.Trim(string(first[6:]), "\x00") == "")
}
