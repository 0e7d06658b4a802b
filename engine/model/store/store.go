// Package store keeps model files by digest in a folder, and names for them.
//
// A file is stored under the SHA-256 of its bytes and never changed. A name is
// a small JSON file that points at a digest; it is written after the file is
// complete and durable, so that a name never points at half a model, whatever
// dies when.
package store

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"bulkhead.dev/engine/model"
	"bulkhead.dev/engine/model/gguf"
)

// Errors of the store. Each is wrapped with what was being done.
var (
	ErrUnknown   = errors.New("unknown model")
	ErrBadName   = errors.New("bad model name")
	ErrCorrupt   = errors.New("model file is not what it should be")
	ErrDownload  = errors.New("model could not be downloaded")
	ErrUnusable  = errors.New("model cannot be served")
	ErrNameTaken = errors.New("model name is taken")
)

// Entry is a model in the store.
type Entry struct {
	Name    string    `json:"name"`
	Digest  string    `json:"digest"` // "sha256:…"
	Bytes   int64     `json:"bytes"`
	Source  string    `json:"source"`  // where it came from, for people
	Licence string    `json:"licence"` // SPDX identifier, "" when unknown
	Added   time.Time `json:"added"`
}

// Store is a folder of models. It has no state in memory: two processes may use
// one folder.
type Store struct {
	dir string
	now func() time.Time
}

// Open returns the store in dir, which it creates.
func Open(dir string, now func() time.Time) (*Store, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("create model folder: %w", err)
	}
	return &Store{dir: dir, now: now}, nil
}

// Path returns where the file of an entry is.
func (s *Store) Path(e Entry) string {
	return filepath.Join(s.dir, strings.Replace(e.Digest, ":", "-", 1)+".gguf")
}

// name is what a model may be called: it becomes a file name and a model id in
// the API.
var name = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{0,62}$`)

// CheckName refuses names that cannot be used.
func CheckName(n string) error {
	if !name.MatchString(n) || strings.Contains(n, "..") {
		return fmt.Errorf("%w %q: use lower-case letters, digits, dots, dashes and underscores, at most 63", ErrBadName, n)
	}
	return nil
}

// Get returns the entry of a name. The error wraps ErrUnknown.
func (s *Store) Get(n string) (Entry, error) {
	if err := CheckName(n); err != nil {
		return Entry{}, err
	}
	b, err := os.ReadFile(s.nameFile(n))
	if errors.Is(err, fs.ErrNotExist) {
		return Entry{}, fmt.Errorf("%w %q", ErrUnknown, n)
	}
	if err != nil {
		return Entry{}, fmt.Errorf("read model name: %w", err)
	}
	var e Entry
	if err := json.Unmarshal(b, &e); err != nil {
		return Entry{}, fmt.Errorf("%w: %s: %w", ErrCorrupt, s.nameFile(n), err)
	}
	if _, err := model.ParseDigest(e.Digest); err != nil || e.Name != n {
		return Entry{}, fmt.Errorf("%w: %s does not name a model", ErrCorrupt, s.nameFile(n))
	}
	fi, err := os.Stat(s.Path(e))
	if err != nil {
		return Entry{}, fmt.Errorf("%w %q: its file is missing; remove %s and get the model again", ErrUnknown, n, s.nameFile(n))
	}
	if fi.Size() != e.Bytes {
		return Entry{}, fmt.Errorf("%w: %s has %d bytes instead of %d; remove it and get the model again", ErrCorrupt, s.Path(e), fi.Size(), e.Bytes)
	}
	return e, nil
}

// List returns all entries by name.
func (s *Store) List() ([]Entry, error) {
	files, err := filepath.Glob(filepath.Join(s.dir, "*.json"))
	if err != nil {
		return nil, fmt.Errorf("list models: %w", err)
	}
	var out []Entry
	for _, f := range files {
		e, err := s.Get(strings.TrimSuffix(filepath.Base(f), ".json"))
		if err != nil {
			return nil, err
		}
		out = append(out, e)
	}
	slices.SortFunc(out, func(a, b Entry) int { return strings.Compare(a.Name, b.Name) })
	return out, nil
}

// AddFile copies a GGUF file into the store under a name. The file must be one
// that the engine can serve. Adding the same bytes under the same name again
// changes nothing; other bytes under a taken name are refused.
func (s *Store) AddFile(ctx context.Context, path, n, source string) (Entry, error) {
	f, err := os.Open(path)
	if err != nil {
		return Entry{}, fmt.Errorf("add model: %w", err)
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return Entry{}, fmt.Errorf("add model: %w", err)
	}
	if !fi.Mode().IsRegular() {
		return Entry{}, fmt.Errorf("add model: %s is not a file", path)
	}
	return s.add(ctx, f, Entry{Name: n, Source: source}, nil)
}

// add stores the bytes of r. The digest and size of want are checked where they
// are set. progress, if any, sees every byte.
func (s *Store) add(ctx context.Context, r io.Reader, want Entry, progress io.Writer) (Entry, error) {
	if err := CheckName(want.Name); err != nil {
		return Entry{}, err
	}
	tmp, err := os.CreateTemp(s.dir, ".incoming-*")
	if err != nil {
		return Entry{}, fmt.Errorf("store model: %w", err)
	}
	defer os.Remove(tmp.Name()) // after the rename there is nothing to remove
	defer tmp.Close()
	h := sha256.New()
	w := io.MultiWriter(tmp, h)
	if progress != nil {
		w = io.MultiWriter(tmp, h, progress)
	}
	n, err := io.Copy(w, readerFunc(func(p []byte) (int, error) {
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		return r.Read(p)
	}))
	if err != nil {
		return Entry{}, fmt.Errorf("store model: %w", err)
	}
	e := want
	e.Bytes, e.Digest, e.Added = n, model.Digest(h.Sum(nil)).String(), s.now().UTC()
	if want.Digest != "" && want.Digest != e.Digest {
		return Entry{}, fmt.Errorf("%w: want %s with %d bytes, got %s with %d", ErrCorrupt, want.Digest, want.Bytes, e.Digest, e.Bytes)
	}
	if err := tmp.Sync(); err != nil {
		return Entry{}, fmt.Errorf("store model: %w", err)
	}
	if err := check(tmp.Name()); err != nil {
		return Entry{}, err
	}
	if old, err := s.Get(e.Name); err == nil {
		if old.Digest != e.Digest {
			return Entry{}, fmt.Errorf("%w: %q is %s already", ErrNameTaken, e.Name, old.Digest)
		}
		return old, nil
	}
	if err := os.Chmod(tmp.Name(), 0o644); err != nil {
		return Entry{}, fmt.Errorf("store model: %w", err)
	}
	if err := os.Rename(tmp.Name(), s.Path(e)); err != nil {
		return Entry{}, fmt.Errorf("store model: %w", err)
	}
	return e, s.writeName(e)
}

// check opens the file as the engine would.
func check(path string) error {
	f, err := gguf.Open(path)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrUnusable, err)
	}
	defer f.Close()
	if _, err := model.LoadLlama(f); err != nil {
		return fmt.Errorf("%w: %w", ErrUnusable, err)
	}
	return nil
}

func (s *Store) nameFile(n string) string { return filepath.Join(s.dir, n+".json") }

func (s *Store) writeName(e Entry) error {
	b, err := json.MarshalIndent(e, "", "  ")
	if err != nil {
		return fmt.Errorf("name model: %w", err)
	}
	tmp, err := os.CreateTemp(s.dir, ".name-*")
	if err != nil {
		return fmt.Errorf("name model: %w", err)
	}
	defer os.Remove(tmp.Name())
	_, err = tmp.Write(append(b, '\n'))
	err = errors.Join(err, tmp.Chmod(0o644), tmp.Sync(), tmp.Close())
	if err == nil {
		err = os.Rename(tmp.Name(), s.nameFile(e.Name))
	}
	if err != nil {
		return fmt.Errorf("name model: %w", err)
	}
	return syncDir(s.dir)
}

// syncDir makes the names in a folder durable.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("sync model folder: %w", err)
	}
	defer d.Close()
	if err := d.Sync(); err != nil {
		return fmt.Errorf("sync model folder: %w", err)
	}
	return nil
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }
