package pgembed_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"go.uber.org/goleak"

	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/pgembed"
	"bulkhead.dev/infra/secret"
)

// helperEnv makes the test binary a parent that starts a server, tells its
// process id and waits to be killed.
const helperEnv = "PGEMBED_TEST_PARENT"

func TestMain(m *testing.M) {
	if spec := os.Getenv(helperEnv); spec != "" {
		bin, dir, _ := strings.Cut(spec, "|")
		s, err := pgembed.Start(context.Background(), pgembed.Options{Dir: dir, RunDir: filepath.Join(dir, "run"), Bin: bin, Password: password, Volatile: true})
		if err != nil {
			fmt.Println("error:", err)
			os.Exit(1)
		}
		fmt.Println(s.PID())
		select {}
	}
	goleak.VerifyTestMain(m)
}

var password = secret.New("correct horse")

func binaries(t *testing.T) string {
	t.Helper()
	bin, err := pgembed.FindBin(os.Getenv("BULKHEAD_PG_BIN"), "")
	if errors.Is(err, pgembed.ErrNoBinaries) {
		assert.Skip(t, err.Error())
	}
	assert.NoError(t, err)
	return bin
}

// scratch is a folder that the server's user can enter, unlike t.TempDir under root.
func scratch(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "bulkhead-pgembed-")
	assert.NoError(t, err)
	assert.NoError(t, os.Chmod(dir, 0o711))
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func connect(t *testing.T, s *pgembed.Server, password string) (*pgx.Conn, error) {
	t.Helper()
	c, err := pgx.ParseConfig(s.DSN("postgres"))
	assert.NoError(t, err)
	c.Password = password
	return pgx.ConnectConfig(t.Context(), c)
}

func TestStartTwice(t *testing.T) {
	t.Parallel()
	o := pgembed.Options{Dir: filepath.Join(scratch(t), "pg"), Bin: binaries(t), Password: password, Volatile: true}
	for run := range 2 { // the second run finds an initialised directory
		s, err := pgembed.Start(t.Context(), o)
		assert.NoError(t, err)
		conn, err := connect(t, s, password.Reveal())
		assert.NoError(t, err)
		if run == 0 {
			_, err = conn.Exec(t.Context(), "CREATE TABLE kept AS SELECT 1")
		} else {
			_, err = conn.Exec(t.Context(), "SELECT * FROM kept")
		}
		assert.NoError(t, err)
		assert.NoError(t, conn.Close(t.Context()))

		_, err = connect(t, s, "wrong")
		assert.True(t, err != nil) // SCRAM, not trust
		info, err := os.Stat(s.Host())
		assert.NoError(t, err)
		assert.Equal(t, info.Mode().Perm(), 0o700)
		assert.NoError(t, s.Err())
		for range 2 { // closing twice is safe
			assert.NoError(t, s.Close())
		}
		assert.NoError(t, s.Err())
		_, err = os.Stat(s.Host())
		assert.ErrorIs(t, err, os.ErrNotExist) // the run folder was ours
	}
	left, err := filepath.Glob(filepath.Join(o.Dir, ".pw-*"))
	assert.NoError(t, err)
	assert.Equal(t, len(left), 0)
}

// Only what we gave the server is in its environment and on its command line.
func TestNothingLeaksIn(t *testing.T) {
	t.Setenv("PGEMBED_CANARY", "canary-value")
	s, err := pgembed.Start(t.Context(), pgembed.Options{Dir: filepath.Join(scratch(t), "pg"), Bin: binaries(t), Password: password, Volatile: true})
	assert.NoError(t, err)
	defer s.Close()
	for _, file := range []string{"environ", "cmdline"} {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", s.PID(), file))
		if err != nil {
			assert.Skip(t, "no /proc: "+err.Error())
		}
		assert.False(t, strings.Contains(string(b), "canary-value"))
		assert.False(t, strings.Contains(string(b), password.Reveal()))
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.PID()))
	assert.NoError(t, err)
	assert.False(t, strings.Contains(string(status), "Uid:\t0\t"))
}

// A nonce that is planted in every way that a statement can fail is not in the
// log.
func TestLogHasNoStatement(t *testing.T) {
	t.Parallel()
	s, err := pgembed.Start(t.Context(), pgembed.Options{Dir: filepath.Join(scratch(t), "pg"), Bin: binaries(t), Password: password, Volatile: true})
	assert.NoError(t, err)
	defer s.Close()
	conn, err := connect(t, s, password.Reveal())
	assert.NoError(t, err)
	const nonce = "nonce7391"
	must := func(sql string, args ...any) {
		t.Helper()
		_, err := conn.Exec(t.Context(), sql, args...)
		assert.NoError(t, err)
	}
	fail := func(sql string, args ...any) {
		t.Helper()
		_, err := conn.Exec(t.Context(), sql, args...)
		assert.True(t, err != nil)
	}
	must("CREATE TABLE x (a text PRIMARY KEY CHECK (a <> 'bad" + nonce + "'))")
	must("INSERT INTO x VALUES ($1)", nonce)
	fail("INSERT INTO x VALUES ($1)", nonce)       // DETAIL has the value
	fail("INSERT INTO x VALUES ($1)", "bad"+nonce) // DETAIL has the row
	fail("SELECT '" + nonce + "'::int")            // the message has the value
	fail("SELECT $1::text::int", nonce)            // CONTEXT has the parameter
	fail("SYNTAX ERROR " + nonce)                  // STATEMENT has the text
	must("DO $$ BEGIN RAISE WARNING '" + nonce + "'; END $$")
	var pid int
	assert.NoError(t, conn.QueryRow(t.Context(), "SELECT pg_backend_pid()").Scan(&pid))
	other, err := connect(t, s, password.Reveal())
	assert.NoError(t, err)
	go func() { // a backend that crashes: the log tells what it was running in a DETAIL line
		time.Sleep(300 * time.Millisecond)
		_ = syscall.Kill(pid, syscall.SIGSEGV)
	}()
	fail("SELECT pg_sleep(60), '" + nonce + "'")
	_ = other.Close(t.Context()) // gone with the crash
	for range 400 {
		b, err := os.ReadFile(s.Log())
		assert.NoError(t, err)
		if strings.Contains(string(b), "terminated by signal 11") {
			assert.False(t, strings.Contains(string(b), nonce))
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatal("the log does not tell of the crash")
}

// The server must not outlive a parent that could do nothing on its way out.
func TestDiesWithParent(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(scratch(t), "pg")
	bin := binaries(t)
	parent := exec.Command(os.Args[0])
	parent.Env = append(os.Environ(), helperEnv+"="+bin+"|"+dir)
	out, err := parent.StdoutPipe()
	assert.NoError(t, err)
	assert.NoError(t, parent.Start())
	buf := make([]byte, 4096)
	n, err := out.Read(buf)
	assert.NoError(t, err)
	pid, err := strconv.Atoi(strings.TrimSpace(string(buf[:n])))
	assert.NoError(t, err)
	assert.NoError(t, parent.Process.Kill())
	_ = parent.Wait() // killed
	// The next start waits for the old server's lock and finds a clean database.
	s, err := pgembed.Start(t.Context(), pgembed.Options{Dir: dir, Bin: bin, Password: password, Volatile: true})
	assert.NoError(t, err)
	assert.True(t, s.PID() != pid)
	assert.NoError(t, s.Close())
	if state, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)); err == nil {
		assert.True(t, strings.Contains(string(state), ") Z ")) // not reaped yet at most
	}
}

func TestUnexpectedEndIsTold(t *testing.T) {
	t.Parallel()
	s, err := pgembed.Start(t.Context(), pgembed.Options{Dir: filepath.Join(scratch(t), "pg"), Bin: binaries(t), Password: password, Volatile: true})
	assert.NoError(t, err)
	assert.NoError(t, syscall.Kill(s.PID(), syscall.SIGQUIT))
	<-s.Done()
	assert.ErrorAs[*pgembed.StartError](t, s.Err())
	assert.NoError(t, s.Close())
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	bin := binaries(t)
	start := func(o pgembed.Options) error {
		o.Bin, o.Password, o.Volatile = bin, password, true
		s, err := pgembed.Start(t.Context(), o)
		if err == nil {
			_ = s.Close()
		}
		return err
	}
	root := os.Geteuid() == 0

	t.Run("no binaries", func(t *testing.T) {
		_, err := pgembed.Start(t.Context(), pgembed.Options{Dir: scratch(t), Bin: t.TempDir(), Password: password})
		assert.ErrorIs(t, err, pgembed.ErrNoBinaries)
		_, err = pgembed.FindBin(t.TempDir(), "")
		assert.ErrorIs(t, err, pgembed.ErrNoBinaries)
	})
	t.Run("closed folder above", func(t *testing.T) {
		if !root {
			assert.Skip(t, "only root drops to another user")
		}
		closed := filepath.Join(scratch(t), "closed")
		assert.NoError(t, os.Mkdir(closed, 0o700))
		e := assert.ErrorAs[*pgembed.UnreachableError](t, start(pgembed.Options{Dir: filepath.Join(closed, "pg")}))
		assert.Equal(t, e.Closed, closed)
		assert.True(t, strings.Contains(e.Error(), "chmod o+x "+closed))
	})
	t.Run("data of somebody else", func(t *testing.T) {
		if !root {
			assert.Skip(t, "only root can make such a folder")
		}
		dir := filepath.Join(scratch(t), "pg")
		assert.NoError(t, os.Mkdir(dir, 0o700)) // root's
		assert.ErrorAs[*pgembed.OwnerError](t, start(pgembed.Options{Dir: dir}))
	})
	t.Run("another version", func(t *testing.T) {
		dir := filepath.Join(scratch(t), "pg")
		assert.NoError(t, start(pgembed.Options{Dir: dir}))
		assert.NoError(t, os.WriteFile(filepath.Join(dir, "data", "PG_VERSION"), []byte("9\n"), 0o600))
		assert.ErrorIs(t, start(pgembed.Options{Dir: dir}), pgembed.ErrVersion)
	})
	t.Run("disk full", func(t *testing.T) {
		if !root {
			assert.Skip(t, "only root can mount a small file system")
		}
		small := filepath.Join(scratch(t), "small")
		assert.NoError(t, os.Mkdir(small, 0o755))
		if err := syscall.Mount("tmpfs", small, "tmpfs", 0, "size=8m,mode=755"); err != nil {
			assert.Skip(t, "cannot mount a small file system: "+err.Error())
		}
		defer syscall.Unmount(small, syscall.MNT_DETACH)
		err := start(pgembed.Options{Dir: filepath.Join(small, "pg")})
		assert.ErrorIs(t, err, pgembed.ErrDiskFull)
		assert.False(t, strings.Contains(err.Error(), password.Reveal()))
	})
	t.Run("no password", func(t *testing.T) {
		_, err := pgembed.Start(t.Context(), pgembed.Options{Dir: scratch(t), Bin: bin})
		assert.True(t, err != nil)
	})
	t.Run("interrupted first start", func(t *testing.T) {
		dir := filepath.Join(scratch(t), "pg")
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		_, err := pgembed.Start(ctx, pgembed.Options{Dir: dir, Bin: bin, Password: password})
		assert.True(t, err != nil)
		assert.NoError(t, start(pgembed.Options{Dir: dir})) // starts over
	})
	t.Run("long run directory falls back", func(t *testing.T) {
		dir := scratch(t)
		assert.NoError(t, start(pgembed.Options{Dir: filepath.Join(dir, "pg"), RunDir: filepath.Join(dir, strings.Repeat("x", 120))}))
	})
}
