package pgembed

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"bulkhead.dev/infra/secret"
)

const (
	// Superuser is the role that initdb makes.
	Superuser = "bulkhead_admin"
	// Port is part of the name of the socket. Nothing listens on TCP.
	Port = 5432

	// maxSocketPath is sun_path of unix(7), less the zero byte at its end.
	maxSocketPath = 107

	// readyTimeout bounds the wait for a started server; crash recovery is the
	// slowest case.
	readyTimeout = 60 * time.Second
	// readyPoll is how often the status file is read during that wait.
	readyPoll = 5 * time.Millisecond
	// lockTimeout bounds the wait for a server of a process that has just been
	// killed to end.
	lockTimeout = 15 * time.Second
	// stopTimeout bounds a fast shutdown before the server is killed.
	stopTimeout = 20 * time.Second
	// logTail is how much of the log is read to recognise a failure, in bytes.
	logTail = 4 << 10
)

// Options of a server.
type Options struct {
	// Dir holds the database and its log. It is made if absent; the folder
	// above it must exist.
	Dir string
	// RunDir holds the socket. Empty, or too long a path for a socket: a short
	// folder below the system's temporary one, removed by Close.
	RunDir string
	// Bin is the folder of the binaries; see [FindBin].
	Bin string
	// Password of [Superuser], set on the first start. It is required.
	Password secret.String
	// MaxConnections; 0 is 100.
	MaxConnections int
	// Volatile turns off fsync, for tests: a crash of the machine, not of the
	// server, may damage the data.
	Volatile bool
}

// Server is a running server. Its fields do not change after Start.
type Server struct {
	dir, run, bin string
	removeRun     bool
	logPath       string
	process       *os.Process
	done          chan struct{} // closed after exit is set
	exit          error         // of the server process; read after done
	asked         atomic.Bool   // Close was called
}

// Start initialises the directory on first use and runs a server in it until
// Close. The error wraps one of the errors of this package where the cause is
// known.
func Start(ctx context.Context, o Options) (*Server, error) {
	if o.Password.IsZero() {
		return nil, errors.New("start database server: no password")
	}
	dir, err := filepath.Abs(o.Dir)
	if err != nil {
		return nil, fmt.Errorf("resolve data directory: %w", err)
	}
	if !complete(o.Bin) {
		return nil, ErrNoBinaries
	}
	who, err := findAccount()
	if err != nil {
		return nil, err
	}
	if err := who.canReach(dir); err != nil {
		return nil, err
	}
	if err := who.ownDir(dir); err != nil {
		return nil, err
	}
	s := &Server{dir: dir, bin: o.Bin, logPath: filepath.Join(dir, "postgres.log"), done: make(chan struct{})}
	if err := s.checkData(who); err != nil {
		return nil, err
	}
	if _, err := os.Stat(s.data()); errors.Is(err, fs.ErrNotExist) {
		if err := s.initdb(ctx, who, o.Password); err != nil {
			return nil, err
		}
	}
	if err := s.makeRunDir(who, o.RunDir); err != nil {
		return nil, err
	}
	if err := s.launch(ctx, who, o); err != nil {
		s.cleanRunDir()
		return nil, err
	}
	if err := s.waitReady(ctx); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// Bin returns the folder of the binaries in use.
func (s *Server) Bin() string { return s.bin }

// Host returns the folder of the socket, which libpq and pgx take as a host.
func (s *Server) Host() string { return s.run }

// PID returns the process id of the server.
func (s *Server) PID() int { return s.process.Pid }

// Log returns the path of the server's log.
func (s *Server) Log() string { return s.logPath }

// DSN returns a keyword/value connection string of the superuser without the
// password.
func (s *Server) DSN(database string) string {
	return fmt.Sprintf("host='%s' port=%d user=%s dbname='%s' sslmode=disable", quote(s.run), Port, Superuser, quote(database))
}

func quote(s string) string { return strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(s) }

// Done is closed when the server process has been reaped.
func (s *Server) Done() <-chan struct{} { return s.done }

// Err returns nil while the server runs and after Close, and otherwise what is
// known about its end.
func (s *Server) Err() error {
	select {
	case <-s.done:
	default:
		return nil
	}
	if s.asked.Load() {
		return nil
	}
	return &StartError{Step: "postgres", Log: s.logPath, cause: errors.Join(errors.New("ended unasked"), s.exit)}
}

// Close asks for a fast shutdown, which rolls back what is open, and waits for
// it. It kills the server if that takes too long. Closing twice is safe.
func (s *Server) Close() error {
	s.asked.Store(true)
	defer s.cleanRunDir()
	// An error only means that the process has ended already.
	_ = s.process.Signal(syscall.SIGINT)
	timeout := time.NewTimer(stopTimeout)
	defer timeout.Stop()
	select {
	case <-s.done:
		return nil
	case <-timeout.C:
		// SIGQUIT makes the postmaster kill its children; SIGKILL would orphan them.
		_ = s.process.Signal(syscall.SIGQUIT)
		<-s.done
		return errors.New("the database server did not shut down in time and was stopped hard; it recovers at the next start")
	}
}

func (s *Server) data() string { return filepath.Join(s.dir, "data") }

// checkData refuses a database that the server would refuse, with a better
// explanation.
func (s *Server) checkData(who account) error {
	info, err := os.Stat(s.data())
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("look at the database: %w", err)
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok && st.Uid != who.uid {
		return &OwnerError{Dir: s.data(), User: who.name, UID: st.Uid}
	}
	return nil
}

// environment is all that the server and initdb get.
var environment = []string{"PATH=/usr/bin:/bin", "LC_ALL=C", "TZ=UTC"}

func (s *Server) initdb(ctx context.Context, who account, password secret.String) error {
	fresh := s.data() + ".new"
	if err := os.RemoveAll(fresh); err != nil { // left by an interrupted start
		return fmt.Errorf("remove unfinished database: %w", err)
	}
	pw, err := os.CreateTemp(s.dir, ".pw-*") // mode 0600
	if err != nil {
		return wrapDisk("create password file", err)
	}
	defer os.Remove(pw.Name())
	if who.drop {
		err = pw.Chown(int(who.uid), int(who.gid))
	}
	_, errWrite := pw.WriteString(password.Reveal() + "\n")
	if err := errors.Join(err, errWrite, pw.Close()); err != nil {
		return wrapDisk("write password file", err)
	}
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, filepath.Join(s.bin, "initdb"),
		"-D", fresh, "-U", Superuser, "-E", "UTF8",
		// The same order of texts on every machine.
		"--locale=C",
		"--auth-local=scram-sha-256", "--auth-host=reject", "--pwfile="+pw.Name())
	cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr = s.dir, environment, &out, &out
	cmd.SysProcAttr = sysProcAttr(who.credential(), syscall.SIGKILL)
	if err := onThread(cmd); err != nil {
		return s.failed("initdb", out.String(), err)
	}
	if err := os.Rename(fresh, s.data()); err != nil {
		return wrapDisk("keep new database", err)
	}
	return nil
}

// onThread runs a command to its end on one thread, because the thread's end
// would kill it.
func onThread(cmd *exec.Cmd) error {
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		result <- cmd.Run()
	}()
	return <-result
}

func (s *Server) makeRunDir(who account, want string) error {
	if want == "" {
		return s.tempRunDir(who)
	}
	run, err := filepath.Abs(want)
	if err != nil {
		return fmt.Errorf("resolve run directory: %w", err)
	}
	if len(socketPath(run)) > maxSocketPath {
		return s.tempRunDir(who)
	}
	s.run = run
	if err := who.ownDir(run); err != nil {
		return err
	}
	return who.canReach(run)
}

func (s *Server) tempRunDir(who account) error {
	run, err := os.MkdirTemp("", "bulkhead-pg-") // mode 0700
	if err != nil {
		return wrapDisk("create run directory", err)
	}
	s.run, s.removeRun = run, true
	if who.drop {
		err = os.Chown(run, int(who.uid), int(who.gid))
	}
	if p := socketPath(run); err == nil && len(p) > maxSocketPath {
		err = &SocketPathError{Path: p}
	}
	if err == nil {
		err = who.canReach(run)
	}
	if err != nil {
		s.cleanRunDir()
	}
	return err
}

func (s *Server) cleanRunDir() {
	if s.removeRun {
		_ = os.RemoveAll(s.run) // a left-over empty folder harms nobody
	}
}

func socketPath(run string) string {
	return filepath.Join(run, ".s.PGSQL."+strconv.Itoa(Port))
}

// launch starts the server. If the lock of another one is in the way, it waits
// for it to go: the server of a parent that was killed is on its way out.
func (s *Server) launch(ctx context.Context, who account, o Options) error {
	timeout := time.NewTimer(lockTimeout)
	defer timeout.Stop()
	for {
		pid, alive := s.lockHolder()
		if !alive {
			break
		}
		select {
		case <-timeout.C:
			return fmt.Errorf("%w (process %d)", ErrRunning, pid)
		case <-ctx.Done():
			return fmt.Errorf("wait for another server to end: %w", ctx.Err())
		case <-time.After(readyPoll):
		}
	}
	log, err := os.OpenFile(s.logPath, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return wrapDisk("create server log", err)
	}
	defer log.Close() // the child keeps its own descriptor
	args := []string{"-D", s.data()}
	for _, setting := range s.settings(o) {
		args = append(args, "-c", setting)
	}
	cmd := exec.Command(filepath.Join(s.bin, "postgres"), args...)
	cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr = s.dir, environment, log, log
	cmd.SysProcAttr = sysProcAttr(who.credential(), syscall.SIGINT)
	started := make(chan error, 1)
	go func() {
		// Never unlocked: the thread ends with the goroutine, after the server.
		runtime.LockOSThread()
		err := cmd.Start()
		s.process = cmd.Process
		started <- err
		if err == nil {
			s.exit = cmd.Wait()
			close(s.done)
		}
	}()
	if err := <-started; err != nil {
		return &StartError{Step: "postgres", Log: s.logPath, cause: err}
	}
	return nil
}

// settings are given on the command line, so that no file in the data
// directory can weaken them.
func (s *Server) settings(o Options) []string {
	connections := o.MaxConnections
	if connections == 0 {
		connections = 100
	}
	set := []string{
		"listen_addresses=",
		"port=" + strconv.Itoa(Port),
		`unix_socket_directories="` + s.run + `"`,
		"unix_socket_permissions=0700",
		"max_connections=" + strconv.Itoa(connections),
		"password_encryption=scram-sha-256",
		"synchronous_commit=on",
		// Nothing that a client sent reaches the log; see the package comment.
		"log_error_verbosity=terse",
		"log_statement=none",
		"log_min_messages=log",
		"log_min_error_statement=panic",
		"log_min_duration_statement=-1",
		"log_min_duration_sample=-1",
		"log_duration=off",
		"log_parameter_max_length=0",
		"log_parameter_max_length_on_error=0",
		"log_connections=off",
		"log_disconnections=off",
		"log_lock_waits=off",
		"log_temp_files=-1",
		"logging_collector=off",
		"log_destination=stderr",
		"debug_print_parse=off",
		"debug_print_rewritten=off",
		"debug_print_plan=off",
	}
	if o.Volatile {
		set = append(set, "fsync=off", "full_page_writes=off", "shared_buffers=16MB", "max_wal_size=256MB", "autovacuum_naptime=1h")
	}
	return set
}

// lockHolder reads who holds the lock of the database. A server that has ended
// hard leaves the file behind; the server itself judges it then.
func (s *Server) lockHolder() (pid int, alive bool) {
	b, err := os.ReadFile(filepath.Join(s.data(), "postmaster.pid"))
	if err != nil {
		return 0, false
	}
	first, _, _ := strings.Cut(string(b), "\n")
	pid, err = strconv.Atoi(strings.TrimSpace(first))
	if err != nil || pid <= 1 {
		return 0, false
	}
	if err := syscall.Kill(pid, 0); err != nil && !errors.Is(err, syscall.EPERM) {
		return pid, false
	}
	// The id may belong to something else by now.
	name, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
	if err == nil && filepath.Base(strings.TrimSuffix(name, " (deleted)")) != "postgres" {
		return pid, false
	}
	return pid, true
}

// waitReady polls postmaster.pid, whose eighth line turns to "ready" when the
// server accepts queries; the socket alone exists earlier than that.
func (s *Server) waitReady(ctx context.Context) error {
	timeout := time.NewTimer(readyTimeout)
	defer timeout.Stop()
	tick := time.NewTicker(readyPoll)
	defer tick.Stop()
	pid := strconv.Itoa(s.process.Pid)
	for {
		b, err := os.ReadFile(filepath.Join(s.data(), "postmaster.pid"))
		if err == nil {
			l := strings.Split(string(b), "\n")
			if len(l) > 7 && strings.TrimSpace(l[0]) == pid && strings.TrimSpace(l[7]) == "ready" {
				return nil
			}
		}
		select {
		case <-s.done:
			return s.failed("postgres", tail(s.logPath), s.exit)
		case <-ctx.Done():
			return fmt.Errorf("wait for the database server: %w", ctx.Err())
		case <-timeout.C:
			return fmt.Errorf("%w; see %s", ErrNotReady, s.logPath)
		case <-tick.C:
		}
	}
}

// failed recognises what initdb or the server said at their end.
func (s *Server) failed(step, said string, exit error) error {
	e := &StartError{Step: step, Log: s.logPath, cause: exit}
	if exit == nil {
		e.cause = errors.New("ended early")
	}
	if step == "initdb" {
		e.Log = strings.TrimSpace(said[max(0, len(said)-logTail):]) // nothing of a client exists yet
	}
	for text, known := range map[string]error{
		"No space left on device":  ErrDiskFull,
		"Disk quota exceeded":      ErrDiskFull,
		"incompatible with server": ErrVersion,
		"is another postmaster":    ErrRunning,
	} {
		if strings.Contains(said, text) {
			e.cause = errors.Join(known, exit)
			return e
		}
	}
	return e
}

func tail(path string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	if info, err := f.Stat(); err == nil && info.Size() > logTail {
		_, _ = f.Seek(-logTail, io.SeekEnd) // on failure the beginning is read
	}
	b, _ := io.ReadAll(io.LimitReader(f, logTail)) // what was read is better than nothing
	return string(b)
}
