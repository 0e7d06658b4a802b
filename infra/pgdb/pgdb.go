// Package pgdb is how the platform talks to PostgreSQL: one pool per role,
// transactions bound to one tenant, migrations, and errors that say whether the database
// refused or could not be asked.
//
// # Roles
//
// Every connection is made as one of a few roles that can do one thing each
// (see the first migration). The role of the application is subject to row-level security on every
// table that holds a tenant's data: without [WithTenant] it sees no row.
//
// # Errors
//
// The text of a PostgreSQL error may quote values of a statement. Errors that
// leave this package or the stores are wrapped by [Wrap], whose text has the
// operation and the SQLSTATE and nothing else.
package pgdb

import (
	"context"
	"encoding/hex"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"bulkhead.dev/infra/id"
)

// DB is a pool of connections of one role, or a single connection. It is safe
// for concurrent use where the pool is.
type DB interface {
	Begin(ctx context.Context) (pgx.Tx, error)
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
	SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
}

// Listener gives out a connection for LISTEN; *pgxpool.Pool.
type Listener interface {
	Acquire(ctx context.Context) (*pgxpool.Conn, error)
}

// Schema is the schema that holds every object of the platform. Connections
// have it as their search path.
const Schema = "bulkhead"

// TenantSetting names the transaction-local setting that the row-level
// security policies compare with.
const TenantSetting = "bulkhead.tenant"

// WithTenant runs fn in a transaction that sees the rows of one tenant. It
// commits if fn returns nil. The error of fn comes back as it is.
func WithTenant(ctx context.Context, db DB, tenant id.Tenant, fn func(pgx.Tx) error) error {
	return InTx(ctx, db, func(tx pgx.Tx) error {
		if err := SetTenant(ctx, tx, tenant); err != nil {
			return err
		}
		return fn(tx)
	})
}

// SetTenant binds the rest of a transaction to a tenant.
func SetTenant(ctx context.Context, tx pgx.Tx, tenant id.Tenant) error {
	_, err := tx.Exec(ctx, "SELECT set_config('"+TenantSetting+"', $1, true)", hex.EncodeToString(tenant[:]))
	return Wrap("bind transaction to tenant", err)
}

// InTx runs fn in a transaction and commits if fn returns nil. If fn panics, the
// transaction is rolled back and the panic goes on.
func InTx(ctx context.Context, db DB, fn func(pgx.Tx) error) error {
	tx, err := db.Begin(ctx)
	if err != nil {
		return Wrap("begin transaction", err)
	}
	ended := false
	defer func() {
		if !ended {
			// What fn returned is what matters; a connection whose rollback
			// fails is closed by the pool.
			_ = tx.Rollback(context.WithoutCancel(ctx))
		}
	}()
	if err := fn(tx); err != nil {
		return err
	}
	ended = true
	return Wrap("commit transaction", tx.Commit(ctx))
}
