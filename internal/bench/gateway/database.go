package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/jackc/pgx/v5"

	"bulkhead.dev/infra/pgembed"
	"bulkhead.dev/infra/secret"
)

// connections are enough for two platforms.
const connections = 200

// database is a database of the server, with the data folder of the platform that
// uses it.
type database struct {
	name, dsn, data string
	keys            []string
}

// startPostgres runs a server as `bulkhead up` does, with nothing turned off.
func (b *bench) startPostgres(ctx context.Context) error {
	fetched := filepath.Join(b.cache, "postgres")
	bin, err := pgembed.FindBin(os.Getenv("BULKHEAD_PG_BIN"), fetched)
	if errors.Is(err, pgembed.ErrNoBinaries) {
		if err := os.MkdirAll(fetched, 0o755); err != nil {
			return err
		}
		bin, err = pgembed.Fetch(ctx, fetched, pgembed.FetchOptions{Env: os.Environ()})
	}
	if err != nil {
		return err
	}
	b.password = secret.New(rand.Text())
	b.postgres, err = pgembed.Start(ctx, pgembed.Options{Dir: filepath.Join(b.dir, "postgres"), RunDir: filepath.Join(b.dir, "run"),
		Bin: bin, Password: b.password, MaxConnections: connections})
	return err
}

// dsn is how the administrator connects.
func (b *bench) dsn(name string) string {
	return b.postgres.DSN(name) + " password=" + b.password.Reveal()
}

// query runs statements as the administrator.
func (b *bench) query(ctx context.Context, database string, f func(*pgx.Conn) error) error {
	conn, err := pgx.Connect(ctx, b.dsn(database))
	if err != nil {
		return err
	}
	return errors.Join(f(conn), conn.Close(context.WithoutCancel(ctx)))
}

func (b *bench) exec(ctx context.Context, database, sql string) error {
	return b.query(ctx, database, func(c *pgx.Conn) error {
		_, err := c.Exec(ctx, sql)
		return err
	})
}

// makeDatabase makes a database and, by running a platform once, all that is in
// it: schema, tenants, keys. Limits stay in force but are never reached.
func (b *bench) makeDatabase(ctx context.Context, name string) (*database, error) {
	if err := b.exec(ctx, "postgres", "CREATE DATABASE "+name); err != nil {
		return nil, err
	}
	d := &database{name: name, dsn: b.dsn(name), data: filepath.Join(b.dir, name)}
	// The passwords of roles come from the key file, and roles belong to the server.
	if err := b.shareKeyFile(d.data); err != nil {
		return nil, err
	}
	p, err := b.start(ctx, d, 0)
	if err != nil {
		return nil, err
	}
	d.keys, err = p.makeKeys(ctx)
	if err = errors.Join(err, p.stop()); err != nil {
		return nil, err
	}
	return d, b.exec(ctx, name, "UPDATE bulkhead.quota_limit SET amount = 100000000000, soft = NULL")
}

// shareKeyFile puts the key file of the first platform, if there was one, into
// the folder of another.
func (b *bench) shareKeyFile(data string) error {
	const name = "keys.json"
	if b.keyFile == "" {
		b.keyFile = filepath.Join(data, name)
		return nil
	}
	text, err := os.ReadFile(b.keyFile)
	if err != nil {
		return err
	}
	if err := os.Mkdir(data, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return os.WriteFile(filepath.Join(data, name), text, 0o600)
}

// version is what the server calls itself.
func (b *bench) version(ctx context.Context) (v string, err error) {
	err = b.query(ctx, "postgres", func(c *pgx.Conn) error { return c.QueryRow(ctx, "SHOW server_version").Scan(&v) })
	v, _, _ = strings.Cut(v, " ")
	return v, err
}

// fsync times a write of a page that is forced to disk, in the folder of the server.
func (b *bench) fsync() (ms float64, err error) {
	f, err := os.Create(filepath.Join(b.dir, "fsync"))
	if err != nil {
		return 0, err
	}
	defer f.Close()
	const writes = 200
	took := timed(func() {
		for range writes {
			if _, err = f.WriteAt(make([]byte, 8192), 0); err == nil {
				err = f.Sync()
			}
			if err != nil {
				return
			}
		}
	})
	if err != nil {
		return 0, fmt.Errorf("time the disk: %w", err)
	}
	return took.Seconds() * 1e3 / writes, nil
}
