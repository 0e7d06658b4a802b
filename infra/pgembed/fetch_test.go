package pgembed

import (
	"archive/zip"
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"bulkhead.dev/infra/assert"
)

// Downloads 14 MB, so only where it is asked for.
func TestFetch(t *testing.T) {
	if os.Getenv("BULKHEAD_TEST_FETCH") == "" {
		assert.Skip(t, "BULKHEAD_TEST_FETCH is not set")
	}
	dir := t.TempDir()
	var stages []Stage
	bin, err := Fetch(t.Context(), dir, FetchOptions{Env: os.Environ(), Progress: func(s Stage) { stages = append(stages, s) }})
	assert.NoError(t, err)
	assert.Equal(t, stages, []Stage{Downloading, Unpacking})
	again, err := Fetch(t.Context(), dir, FetchOptions{}) // no pip is needed now
	assert.NoError(t, err)
	assert.Equal(t, again, bin)
	left, err := os.ReadDir(dir)
	assert.NoError(t, err)
	assert.Equal(t, len(left), 1)
}

func TestFetchWithoutPip(t *testing.T) {
	empty := t.TempDir()
	t.Setenv("PATH", empty)
	dir := t.TempDir()
	_, err := Fetch(t.Context(), dir, FetchOptions{})
	assert.ErrorIs(t, err, ErrNoPip)
	// A python3 that has no pip.
	assert.NoError(t, os.WriteFile(filepath.Join(empty, "python3"), []byte("#!/bin/sh\necho /usr/bin/python3: No module named pip >&2; exit 1\n"), 0o755))
	_, err = Fetch(t.Context(), dir, FetchOptions{})
	assert.ErrorIs(t, err, ErrNoPip)
	// An index that does not answer; its credentials are not repeated.
	assert.NoError(t, os.WriteFile(filepath.Join(empty, "python3"), []byte("#!/bin/sh\necho 'ERROR: no https://user:pass@index/simple' >&2; exit 1\n"), 0o755))
	_, err = Fetch(t.Context(), dir, FetchOptions{})
	assert.Equal(t, assert.ErrorAs[*FetchError](t, err).Said, "ERROR: no https://index/simple")
	left, err := os.ReadDir(dir)
	assert.NoError(t, err)
	assert.Equal(t, len(left), 0)
}

// A wheel that is not the pinned one is never unpacked.
func TestFetchRefusesAnotherWheel(t *testing.T) {
	path := t.TempDir()
	t.Setenv("PATH", path+":/usr/bin:/bin")
	script := "#!/bin/sh\nwhile [ \"$1\" != -d ]; do shift; done\necho evil > \"$2/x.whl\"\n"
	assert.NoError(t, os.WriteFile(filepath.Join(path, "python3"), []byte(script), 0o755))
	dir := t.TempDir()
	_, err := Fetch(context.Background(), dir, FetchOptions{Env: []string{"PATH=/usr/bin:/bin"}})
	assert.ErrorIs(t, err, ErrIncomplete)
	left, err := os.ReadDir(dir)
	assert.NoError(t, err)
	assert.Equal(t, len(left), 0)
}

func TestUnpackStaysInside(t *testing.T) {
	t.Parallel()
	for name, ok := range map[string]bool{
		"bin/postgres": true, "share/a/b": true, "bin/../../../evil": false, "lib//etc/../../../x": false,
	} {
		dir := t.TempDir()
		wheel := filepath.Join(dir, "w.whl")
		f, err := os.Create(wheel)
		assert.NoError(t, err)
		z := zip.NewWriter(f)
		w, err := z.Create(wheelRoot + name)
		assert.NoError(t, err)
		_, err = w.Write([]byte("x"))
		assert.NoError(t, errors.Join(err, z.Close(), f.Close()))
		err = unpack(wheel, filepath.Join(dir, "root", "deep"))
		assert.Equal(t, err == nil, ok)
		if !ok {
			assert.ErrorIs(t, err, ErrIncomplete)
		}
	}
}
