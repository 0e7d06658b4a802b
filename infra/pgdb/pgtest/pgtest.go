// Package pgtest gives each test a real, migrated PostgreSQL database of its
// own in about a tenth of a second.
//
// The first test of a process starts a private server (or takes the one that
// BULKHEAD_TEST_DATABASE_URL names) and migrates a template; every test clones
// it. Test processes share nothing, so any number may run at once. A package
// that uses it calls [Main] from its TestMain.
package pgtest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"go.uber.org/goleak"

	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/pgdb"
	"bulkhead.dev/infra/pgembed"
	"bulkhead.dev/infra/secret"
)

const (
	// EnvURL names a server to use instead of a private one. Its user must be a
	// superuser, since databases are cloned.
	EnvURL = "BULKHEAD_TEST_DATABASE_URL"
	// EnvBin overrides the search for server binaries.
	EnvBin = "BULKHEAD_PG_BIN"

	setupTimeout = 2 * time.Minute // the first start on a busy machine
)

// roleSecret is the same for all tests, because roles belong to a server and
// test processes may share one.
var roleSecret = secret.New("0000000000000000000000000000000000000000000000000000000000000000")

// Bundle is what a test gets.
type Bundle struct {
	Source pgdb.Source // of the test's own database, as administrator
	Pools  *pgdb.Pools // closed when the test ends
	// Log is the file that the server logs to; "" for a server that is not ours.
	Log string
}

// New returns a migrated, empty database. It skips the test where there is no
// server and no binaries for one.
func New(t testing.TB) *Bundle {
	t.Helper()
	s := theServer(t)
	ctx, cancel := context.WithTimeout(context.Background(), setupTimeout)
	defer cancel()
	name := "t_" + strings.ToLower(rand.Text())
	assert.NoError(t, s.exec(ctx, fmt.Sprintf("CREATE DATABASE %s TEMPLATE %s", name, s.template)))
	src := s.source(name)
	pools, err := pgdb.Open(ctx, src, pgdb.DefaultSizes)
	assert.NoError(t, err)
	t.Cleanup(func() {
		pools.Close()
		ctx, cancel := context.WithTimeout(context.Background(), setupTimeout)
		defer cancel()
		assert.NoError(t, s.exec(ctx, "DROP DATABASE IF EXISTS "+name+" WITH (FORCE)"))
	})
	return &Bundle{Source: src, Pools: pools, Log: s.log}
}

// Admin returns a connection of the administrator, whom no policy binds. It is
// closed when the test ends.
func (b *Bundle) Admin(t testing.TB) *pgx.Conn {
	t.Helper()
	c, err := pgx.ParseConfig(b.Source.DSN.Reveal())
	assert.NoError(t, err)
	if c.Password == "" {
		c.Password = b.Source.Password.Reveal()
	}
	c.RuntimeParams["search_path"] = pgdb.Schema
	conn, err := pgx.ConnectConfig(t.Context(), c)
	assert.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

// Bin returns the folder of server binaries, or skips the test.
func Bin(t testing.TB) string {
	t.Helper()
	bin, err := pgembed.FindBin(os.Getenv(EnvBin), os.Getenv("BULKHEAD_TEST_PG_FETCHED"))
	if errors.Is(err, pgembed.ErrNoBinaries) {
		assert.Skip(t, err.Error())
	}
	assert.NoError(t, err)
	return bin
}

// Dir returns a folder for a private server of the test's own. t.TempDir will
// not do: its parents are closed to the user that the server runs as under root.
func Dir(t testing.TB) string {
	t.Helper()
	dir, err := openDir()
	assert.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func openDir() (string, error) {
	dir, err := os.MkdirTemp("", "bulkhead-pgtest-")
	if err != nil {
		return "", err
	}
	return dir, os.Chmod(dir, 0o711)
}

// Password is the superuser's on every private server of a test.
var Password = secret.New("a password of the tests")

// Main runs the tests of a package, stops the server and fails if a goroutine
// is left.
func Main(m *testing.M) {
	code := m.Run()
	if shared.server != nil {
		if err := shared.server.stop(); err != nil && code == 0 {
			fmt.Fprintln(os.Stderr, "stop the database of the tests:", err)
			code = 1
		}
	}
	if err := goleak.Find(); err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// server is the one of this process.
type server struct {
	base     string          // "" for a server that is not ours
	embedded *pgembed.Server // nil for a server that is not ours
	url      string
	log      string
	template string
	mu       sync.Mutex // one CREATE DATABASE at a time: the template may have no other user
}

var shared struct {
	once   sync.Once
	server *server
	err    error
}

func theServer(t testing.TB) *server {
	t.Helper()
	bin := ""
	if os.Getenv(EnvURL) == "" {
		bin = Bin(t)
	}
	shared.once.Do(func() { shared.server, shared.err = start(bin) })
	assert.NoError(t, shared.err)
	return shared.server
}

func start(bin string) (*server, error) {
	ctx, cancel := context.WithTimeout(context.Background(), setupTimeout)
	defer cancel()
	s := &server{url: os.Getenv(EnvURL), template: "tpl_" + strings.ToLower(rand.Text())}
	if s.url == "" {
		base, err := openDir()
		if err != nil {
			return nil, err
		}
		s.base = base
		s.embedded, err = pgembed.Start(ctx, pgembed.Options{Dir: filepath.Join(base, "pg"), RunDir: filepath.Join(base, "run"),
			Bin: bin, Password: Password, Volatile: true, MaxConnections: 300})
		if err != nil {
			_ = os.RemoveAll(base)
			return nil, err
		}
		s.log = s.embedded.Log()
	}
	err := s.exec(ctx, "CREATE DATABASE "+s.template)
	if err == nil {
		_, _, err = pgdb.Migrate(ctx, s.source(s.template))
	}
	if err != nil {
		return nil, errors.Join(err, s.stop())
	}
	return s, nil
}

func (s *server) stop() error {
	if s.embedded != nil {
		return errors.Join(s.embedded.Close(), os.RemoveAll(s.base))
	}
	ctx, cancel := context.WithTimeout(context.Background(), setupTimeout)
	defer cancel()
	return s.exec(ctx, "DROP DATABASE IF EXISTS "+s.template+" WITH (FORCE)")
}

func (s *server) source(database string) pgdb.Source {
	if s.embedded != nil {
		return Source(s.embedded, database)
	}
	dsn := s.url + " dbname=" + database
	if u, err := url.Parse(s.url); err == nil && u.Scheme != "" {
		u.Path = "/" + database
		dsn = u.String()
	}
	return pgdb.Source{DSN: secret.New(dsn), RoleSecret: roleSecret}
}

// Source is where a database of a private server of a test is found.
func Source(s *pgembed.Server, database string) pgdb.Source {
	return pgdb.Source{DSN: secret.New(s.DSN(database)), Password: Password, RoleSecret: roleSecret}
}

func (s *server) exec(ctx context.Context, sql string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	src := s.source("postgres")
	c, err := pgx.ParseConfig(src.DSN.Reveal())
	if err != nil {
		return err
	}
	if c.Password == "" {
		c.Password = src.Password.Reveal()
	}
	conn, err := pgx.ConnectConfig(ctx, c)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	_, err = conn.Exec(ctx, sql)
	return err
}
