package pgdb_test

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/infra/pgdb"
	"bulkhead.dev/infra/pgdb/pgtest"
	"bulkhead.dev/infra/pgembed"
)

// However fn ends, its transaction ends with it and the connection goes back.
func TestTransactionEndsWithItsFunction(t *testing.T) {
	t.Parallel()
	b := pgtest.New(t)
	tenant := id.NewTenant(time.Now())
	plant(t, b.Admin(t), tenant, "a")
	mine := errors.New("mine")
	insert := func(tx pgx.Tx, name string) error {
		_, err := tx.Exec(t.Context(), "INSERT INTO project VALUES ($1, $2, $3, now())", [16]byte(id.NewProject(time.Now())), [16]byte(tenant), name)
		return err
	}
	for name, c := range map[string]struct {
		end  func() error
		kept int
	}{
		"commit": {func() error { return nil }, 1},
		"error":  {func() error { return mine }, 0},
		"panic":  {func() error { panic(mine) }, 0},
	} {
		t.Run(name, func(t *testing.T) {
			func() {
				defer func() {
					if p := recover(); p != nil {
						assert.True(t, name == "panic" && p == any(mine))
					}
				}()
				err := pgdb.WithTenant(t.Context(), b.Pools.App, tenant, func(tx pgx.Tx) error {
					assert.NoError(t, insert(tx, name))
					return c.end()
				})
				if name == "error" {
					assert.True(t, err == mine) //nolint:errorlint // as it is, not wrapped
				} else {
					assert.NoError(t, err)
				}
			}()
			assert.Equal(t, b.Pools.App.Stat().AcquiredConns(), 0)
			kept := -1
			assert.NoError(t, b.Admin(t).QueryRow(t.Context(), "SELECT count(*) FROM project WHERE name = $1", name).Scan(&kept))
			assert.Equal(t, kept, c.kept)
		})
	}
}

// A server that stops breaks connections in use; that is an outage, not an
// answer, and the same pool works again when the server is back.
func TestServerStopsUnderOpenConnections(t *testing.T) {
	t.Parallel()
	dir := pgtest.Dir(t)
	o := pgembed.Options{Dir: filepath.Join(dir, "pg"), RunDir: filepath.Join(dir, "run"), Bin: pgtest.Bin(t),
		Password: pgtest.Password, Volatile: true}
	s, err := pgembed.Start(t.Context(), o)
	assert.NoError(t, err)
	src := pgtest.Source(s, "postgres")
	_, _, err = pgdb.Migrate(t.Context(), src)
	assert.NoError(t, err)
	pools, err := pgdb.Open(t.Context(), src, pgdb.DefaultSizes)
	assert.NoError(t, err)
	defer pools.Close()
	assert.NoError(t, pools.App.Ping(t.Context()))
	tx, err := pools.App.Begin(t.Context())
	assert.NoError(t, err)
	assert.NoError(t, s.Close())

	_, err = tx.Exec(t.Context(), "SELECT 1")
	check := func(err error) {
		t.Helper()
		if !pgdb.IsUnavailable(err) || !pgdb.IsUnavailable(pgdb.Wrap("ask", err)) {
			t.Fatalf("%v is not taken for an outage", err)
		}
		assert.False(t, pgdb.IsData(err))
	}
	check(err)
	_ = tx.Rollback(t.Context())
	for _, pool := range []*pgxpool.Pool{pools.App, pools.Auth, pools.Settle} {
		check(pool.Ping(t.Context()))
	}
	check(pgdb.WithTenant(t.Context(), pools.App, id.NewTenant(time.Now()), func(pgx.Tx) error { return nil }))

	again, err := pgembed.Start(t.Context(), o)
	assert.NoError(t, err)
	defer again.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	assert.NoError(t, pgdb.WaitReachable(ctx, src))
	assert.NoError(t, pools.App.Ping(ctx))
	pools.App.Close()
	check(pools.App.Ping(ctx)) // a closed pool is no answer either
}
