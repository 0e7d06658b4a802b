package pgdb

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"

	"bulkhead.dev/migrations"
)

const (
	// versionTable is goose's record, in the schema of the platform.
	versionTable = Schema + ".goose_db_version"
	// lockTries and lockEvery bound the wait for another replica that is
	// migrating: five minutes.
	lockTries = 150
	lockEvery = 2 // seconds
	// partitionMonths is how far ahead partitions are made. A replica that
	// runs for longer without a start leaves rows in the default partition.
	partitionMonths = 3
	// oldestServer is server_version_num of PostgreSQL 15.0.
	oldestServer = 150000
)

// Outcomes of Migrate.
var (
	// ErrOldServer: the server is older than the schema needs.
	ErrOldServer = errors.New("the platform needs PostgreSQL 15 or later")
	// ErrNewerSchema: a newer version of the platform has migrated the
	// database.
	ErrNewerSchema = errors.New("the database was migrated by a newer version of the platform; start that version")
)

// Migrate makes the roles and the schema, brings it to the version of this
// program, and makes partitions ahead. It is safe to call from several replicas at once, and
// quick when there is nothing to do. The version before and after comes back.
func Migrate(ctx context.Context, src Source) (from, to int64, err error) {
	config, err := src.adminConfig("bulkhead migrate")
	if err != nil {
		return 0, 0, err
	}
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return 0, 0, Wrap("connect to the database", err)
	}
	err = src.prepare(ctx, conn)
	if errClose := conn.Close(context.WithoutCancel(ctx)); err == nil {
		err = Wrap("disconnect", errClose)
	}
	if err != nil {
		return 0, 0, err
	}
	// From here on as the owner: nothing is created as the administrator.
	config.RuntimeParams["role"] = roleOwner
	db := stdlib.OpenDB(*config)
	defer db.Close()
	locker, err := lock.NewPostgresSessionLocker(lock.WithLockTimeout(lockEvery, lockTries))
	if err != nil {
		return 0, 0, fmt.Errorf("make migration lock: %w", err)
	}
	provider, err := goose.NewProvider(goose.DialectPostgres, db, migrations.FS,
		goose.WithTableName(versionTable), goose.WithSessionLocker(locker), goose.WithDisableGlobalRegistry(true))
	if err != nil {
		return 0, 0, fmt.Errorf("load migrations: %w", err)
	}
	if from, err = provider.GetDBVersion(ctx); err != nil {
		return 0, 0, Wrap("read schema version", err)
	}
	sources := provider.ListSources()
	if to = sources[len(sources)-1].Version; from > to {
		return from, from, fmt.Errorf("%w (database %d, program %d)", ErrNewerSchema, from, to)
	}
	if _, err := provider.Up(ctx); err != nil {
		op := "migrate the database"
		if partial, ok := errors.AsType[*goose.PartialError](err); ok && partial.Failed != nil {
			op = "migrate the database with " + partial.Failed.Source.Path
		}
		return from, from, Wrap(op, err)
	}
	if _, err := db.ExecContext(ctx, "SELECT extend_partitions($1)", partitionMonths); err != nil {
		// Another replica made the same partition at the same moment.
		if state := State(err); state != "42P07" && state != StateUniqueViolation {
			return from, to, Wrap("make partitions", err)
		}
	}
	return from, to, nil
}

// prepare does what needs the administrator: roles and the schema.
func (src Source) prepare(ctx context.Context, conn *pgx.Conn) error {
	var version int
	if err := conn.QueryRow(ctx, "SELECT current_setting('server_version_num')::int").Scan(&version); err != nil {
		return Wrap("ask for the server's version", err)
	}
	if version < oldestServer {
		return fmt.Errorf("%w, and this is %d", ErrOldServer, version/10000)
	}
	if err := src.ensureRoles(ctx, conn); err != nil {
		return err
	}
	err := retryConcurrent(ctx, func() error {
		_, err := conn.Exec(ctx, "CREATE SCHEMA IF NOT EXISTS "+Schema+" AUTHORIZATION "+roleOwner)
		return err
	})
	return rightsError("create schema", err)
}

// WaitReachable returns when the database answers, or when ctx ends. It is for
// start-up, where the database may start at the same time.
func WaitReachable(ctx context.Context, src Source) error {
	config, err := src.adminConfig("bulkhead start")
	if err != nil {
		return err
	}
	for {
		conn, err := pgx.ConnectConfig(ctx, config)
		if err == nil {
			return Wrap("disconnect", conn.Close(ctx))
		}
		if !IsUnavailable(err) {
			return Wrap("connect to the database", err)
		}
		select {
		case <-ctx.Done():
			return Wrap("connect to the database", err)
		case <-time.After(reachEvery):
		}
	}
}

// reachEvery is the pause between attempts of WaitReachable.
const reachEvery = 250 * time.Millisecond
