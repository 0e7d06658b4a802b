package pgdb_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"golang.org/x/sync/errgroup"

	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/pgdb"
	"bulkhead.dev/infra/pgdb/pgtest"
	"bulkhead.dev/infra/pgembed"
	"bulkhead.dev/infra/secret"
)

func TestClassify(t *testing.T) {
	t.Parallel()
	state := func(s string) error { return fmt.Errorf("x: %w", &pgconn.PgError{Code: s, Message: "m", Detail: "d"}) }
	for name, c := range map[string]struct {
		err               error
		unavailable, data bool
	}{
		"nil":                  {nil, false, false},
		"no row":               {pgx.ErrNoRows, false, false},
		"admin shutdown":       {state("57P01"), true, false},
		"starting up":          {state("57P03"), true, false},
		"too many connections": {state("53300"), true, false},
		"disk full":            {state("53100"), true, false},
		"read only":            {state("25006"), true, false},
		"statement timeout":    {state("57014"), true, false},
		"wrong password":       {state("28P01"), false, false},
		"no right":             {state("42501"), false, false},
		"no table":             {state("42P01"), false, false},
		"unique":               {state("23505"), false, true},
		"bad text":             {state("22021"), false, true},
		"deadline":             {context.DeadlineExceeded, true, false},
		"cut":                  {io.ErrUnexpectedEOF, true, false},
		"closed":               {net.ErrClosed, true, false},
		"closed pool":          {errors.New("closed pool"), true, false},
		"network":              {&net.OpError{Op: "dial", Err: errors.New("refused")}, true, false},
		"encoding":             {errors.New("unable to encode 1"), false, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			assert.Equal(t, pgdb.IsUnavailable(c.err), c.unavailable)
			assert.Equal(t, pgdb.IsData(c.err), c.data)
			wrapped := pgdb.Wrap("op", c.err)
			assert.Equal(t, pgdb.IsUnavailable(wrapped), c.unavailable)
			assert.Equal(t, pgdb.IsData(wrapped), c.data)
			assert.True(t, errors.Is(wrapped, c.err))
		})
	}
}

func TestWrapHidesTheServersWords(t *testing.T) {
	t.Parallel()
	b := pgtest.New(t)
	_, err := b.Pools.App.Exec(t.Context(), "SELECT $1::text::int", "nonce")
	err = fmt.Errorf("outer: %w", pgdb.Wrap("read number", err))
	assert.False(t, strings.Contains(fmt.Sprintf("%v %+v %s %q", err, err, err, err), "nonce"))
	assert.Equal(t, err.Error(), "outer: read number: SQLSTATE 22P02")
}

// Several replicas start at once, on an empty server.
func TestMigrateEmptyServerTogether(t *testing.T) {
	t.Parallel()
	_, src := ownServer(t)
	var g errgroup.Group
	for range 4 {
		g.Go(func() error {
			_, to, err := pgdb.Migrate(context.Background(), src)
			if err == nil && to < 1 {
				err = errors.New("no version")
			}
			return err
		})
	}
	assert.NoError(t, g.Wait())
	from, to, err := pgdb.Migrate(t.Context(), src)
	assert.NoError(t, err)
	assert.Equal(t, from, to)

	pools, err := pgdb.Open(t.Context(), src, pgdb.DefaultSizes)
	assert.NoError(t, err)
	defer pools.Close()
	assert.NoError(t, pools.App.Ping(t.Context()))
	assert.NoError(t, pools.Auth.Ping(t.Context()))
	assert.NoError(t, pools.Settle.Ping(t.Context()))
	stats := pools.Stats()
	assert.Equal(t, len(stats), 5)
	assert.Equal(t, stats[0].Max, pgdb.DefaultSizes.App)

	// A database of a newer version is left alone.
	admin := adminOf(t, src)
	_, err = admin.Exec(t.Context(), "INSERT INTO goose_db_version (version_id, is_applied) VALUES (999, true)")
	assert.NoError(t, err)
	_, _, err = pgdb.Migrate(t.Context(), src)
	assert.ErrorIs(t, err, pgdb.ErrNewerSchema)
}

// An external database: its user has CREATEROLE and CREATE, and nothing more.
func TestMigrateWithoutSuperuser(t *testing.T) {
	t.Parallel()
	_, src := ownServer(t)
	admin := adminOf(t, src)
	for _, sql := range []string{
		"CREATE ROLE plain LOGIN PASSWORD 'x'", "CREATE ROLE maker LOGIN CREATEROLE PASSWORD 'x'",
		"CREATE DATABASE external", "GRANT CREATE ON DATABASE external TO maker",
	} {
		_, err := admin.Exec(t.Context(), sql)
		assert.NoError(t, err)
	}
	as := func(user string) pgdb.Source {
		return pgdb.Source{DSN: secret.New(src.DSN.Reveal() + " user=" + user + " password=x dbname=external"), RoleSecret: src.RoleSecret}
	}
	_, _, err := pgdb.Migrate(t.Context(), as("plain"))
	assert.ErrorIs(t, err, pgdb.ErrRights)
	for range 2 {
		_, _, err = pgdb.Migrate(t.Context(), as("maker"))
		assert.NoError(t, err)
	}
	pools, err := pgdb.Open(t.Context(), as("maker"), pgdb.DefaultSizes)
	assert.NoError(t, err)
	defer pools.Close()
	assert.NoError(t, pools.App.Ping(t.Context()))

	_, err = admin.Exec(t.Context(), "ALTER ROLE bulkhead_app BYPASSRLS")
	assert.NoError(t, err)
	_, _, err = pgdb.Migrate(t.Context(), as("maker"))
	assert.ErrorIs(t, err, pgdb.ErrRoleAttributes)
}

func TestDSNIsNotRepeated(t *testing.T) {
	t.Parallel()
	src := pgdb.Source{DSN: secret.New("postgres://user:hunter2@host:notaport/db"), RoleSecret: secret.New("x")}
	_, _, err := pgdb.Migrate(t.Context(), src)
	assert.ErrorIs(t, err, pgdb.ErrDSN)
	assert.False(t, strings.Contains(err.Error(), "hunter2"))
	_, err = pgdb.Open(t.Context(), src, pgdb.DefaultSizes)
	assert.ErrorIs(t, err, pgdb.ErrDSN)
}

func TestWaitReachable(t *testing.T) {
	t.Parallel()
	s, src := ownServer(t)
	assert.NoError(t, pgdb.WaitReachable(t.Context(), src))
	assert.NoError(t, s.Close())
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	err := pgdb.WaitReachable(ctx, src)
	assert.True(t, pgdb.IsUnavailable(err))
}

func ownServer(t *testing.T) (*pgembed.Server, pgdb.Source) {
	t.Helper()
	dir := pgtest.Dir(t)
	s, err := pgembed.Start(t.Context(), pgembed.Options{Dir: filepath.Join(dir, "pg"), RunDir: filepath.Join(dir, "run"),
		Bin: pgtest.Bin(t), Password: pgtest.Password, Volatile: true})
	assert.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, s.Close()) })
	return s, pgtest.Source(s, "postgres")
}

func adminOf(t *testing.T, src pgdb.Source) *pgx.Conn {
	t.Helper()
	b := pgtest.Bundle{Source: src}
	return b.Admin(t)
}
