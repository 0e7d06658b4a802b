package pgdb

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"bulkhead.dev/infra/secret"
)

// Role is a login role of the database.
type Role string

// The roles that processes log in as.
const (
	RoleApp    Role = "bulkhead_app"
	RoleAuth   Role = "bulkhead_auth"
	RoleSettle Role = "bulkhead_settle"
	RoleLog    Role = "bulkhead_log"
)

// roleOwner owns every object. It cannot log in; migrations assume it.
const roleOwner = "bulkhead_owner"

// loginRoles in the order in which they are made.
var loginRoles = []Role{RoleApp, RoleAuth, RoleSettle, RoleLog}

// Source says where the database is.
type Source struct {
	// DSN is a connection string or URL of a user who may create roles and
	// schemas: the superuser of the private server, or DATABASE_URL.
	DSN secret.String
	// Password of that user, if the DSN has none.
	Password secret.String
	// RoleSecret is what the passwords of the roles are derived from
	// (tenancy.KeyFile.PostgresSecret). All replicas share it.
	RoleSecret secret.String
}

// ErrDSN means that a connection string cannot be read. Its text does not quote
// it.
var ErrDSN = errors.New("the database connection string cannot be read")

// Sizes are the connections of each pool.
type Sizes struct {
	App, Auth, Settle, Quota, Background int32
}

// DefaultSizes are for one replica. Together they stay well below the 100
// connections that PostgreSQL allows by default. Authentication and settlement have their
// own, so that a flood of either, or a slow list, cannot starve the other.
var DefaultSizes = Sizes{App: 8, Auth: 6, Settle: 2, Quota: 4, Background: 4}

// Pools are the connections of one process.
type Pools struct {
	App        *pgxpool.Pool // RoleApp: what requests of the administrative API read and write
	Auth       *pgxpool.Pool // RoleAuth: API key look-ups
	Settle     *pgxpool.Pool // RoleSettle: usage and receipts
	Quota      *pgxpool.Pool // RoleSettle: limits, and the lease of the replica
	Background *pgxpool.Pool // RoleApp: work that no request waits for
}

const (
	connectTimeout = 3 * time.Second
	// Statements that take longer than these are canceled by the server. They
	// are far above what the indexed statements of each role need.
	statementApp        = 5 * time.Second
	statementAuth       = 2 * time.Second
	statementSettle     = 5 * time.Second
	statementQuota      = 2 * time.Second
	statementBackground = 60 * time.Second
	// idleInTransaction ends the session of a process that hangs inside a
	// transaction, so that it holds no locks.
	idleInTransaction = 10 * time.Second
	// maxLifetime lets connections move to another server after a fail-over.
	maxLifetime = 30 * time.Minute
	// healthPeriod is how soon a broken idle connection is noticed.
	healthPeriod = 10 * time.Second
)

// Open makes the pools. It connects lazily: a database that is down makes the
// first use fail, not Open.
func Open(ctx context.Context, src Source, sizes Sizes) (*Pools, error) {
	p := &Pools{}
	for _, one := range []struct {
		dst       **pgxpool.Pool
		role      Role
		name      string
		size      int32
		statement time.Duration
	}{
		{&p.App, RoleApp, "bulkhead app", sizes.App, statementApp},
		{&p.Auth, RoleAuth, "bulkhead auth", sizes.Auth, statementAuth},
		{&p.Settle, RoleSettle, "bulkhead settle", sizes.Settle, statementSettle},
		{&p.Quota, RoleSettle, "bulkhead quota", sizes.Quota, statementQuota},
		{&p.Background, RoleApp, "bulkhead background", sizes.Background, statementBackground},
	} {
		c, err := src.poolConfig(one.role, one.name, one.size, one.statement)
		if err == nil {
			*one.dst, err = pgxpool.NewWithConfig(ctx, c)
		}
		if err != nil {
			p.Close()
			return nil, err
		}
	}
	return p, nil
}

// Close closes all connections and waits for those in use.
func (p *Pools) Close() {
	for _, pool := range p.all() {
		if pool != nil {
			pool.Close()
		}
	}
}

func (p *Pools) all() map[string]*pgxpool.Pool {
	return map[string]*pgxpool.Pool{"app": p.App, "auth": p.Auth, "settle": p.Settle, "quota": p.Quota, "background": p.Background}
}

// PoolStats is the state of one pool, for metrics.
type PoolStats struct {
	Name         string
	Max          int32         // connections allowed
	Total        int32         // connections open
	Idle         int32         // of these, not in use
	Acquired     int64         // acquisitions since the start
	EmptyAcquire int64         // of these, that had to wait
	Canceled     int64         // acquisitions given up
	WaitTotal    time.Duration // time spent waiting since the start
}

// Stats returns the state of the pools, by name.
func (p *Pools) Stats() []PoolStats {
	var out []PoolStats
	for _, name := range []string{"app", "auth", "settle", "quota", "background"} {
		s := p.all()[name].Stat()
		out = append(out, PoolStats{Name: name, Max: s.MaxConns(), Total: s.TotalConns(), Idle: s.IdleConns(),
			Acquired: s.AcquireCount(), EmptyAcquire: s.EmptyAcquireCount(), Canceled: s.CanceledAcquireCount(), WaitTotal: s.EmptyAcquireWaitTime()})
	}
	return out
}

func (src Source) poolConfig(role Role, name string, size int32, statement time.Duration) (*pgxpool.Config, error) {
	c, err := pgxpool.ParseConfig(src.DSN.Reveal())
	if err != nil {
		return nil, ErrDSN // the error of pgx quotes the string
	}
	password, err := src.rolePassword(role)
	if err != nil {
		return nil, err
	}
	c.ConnConfig.User, c.ConnConfig.Password = string(role), password
	setParams(c.ConnConfig, name, statement)
	c.MaxConns, c.MinConns = max(size, 1), 0
	c.MaxConnLifetime, c.MaxConnLifetimeJitter = maxLifetime, maxLifetime/10
	c.HealthCheckPeriod = healthPeriod
	return c, nil
}

func setParams(c *pgx.ConnConfig, name string, statement time.Duration) {
	c.ConnectTimeout = connectTimeout
	c.RuntimeParams["application_name"] = name
	c.RuntimeParams["search_path"] = Schema
	c.RuntimeParams["timezone"] = "UTC"
	c.RuntimeParams["synchronous_commit"] = "on"
	c.RuntimeParams["idle_in_transaction_session_timeout"] = fmt.Sprint(idleInTransaction.Milliseconds())
	if statement > 0 {
		c.RuntimeParams["statement_timeout"] = fmt.Sprint(statement.Milliseconds())
	}
}

// adminConfig is for the user of the DSN itself.
func (src Source) adminConfig(name string) (*pgx.ConnConfig, error) {
	c, err := pgx.ParseConfig(src.DSN.Reveal())
	if err != nil {
		return nil, ErrDSN
	}
	if c.Password == "" {
		c.Password = src.Password.Reveal()
	}
	setParams(c, name, 0)
	return c, nil
}
