package tenancy_test

import (
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"bulkhead.dev/infra/assert"
	"bulkhead.dev/tenancy"
	"bulkhead.dev/tenancy/token"
)

// oldKeyFile makes a file as releases before tokens did, with something in it that no release
// knows.
func oldKeyFile(t *testing.T, change func(map[string]any)) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "keys.json")
	_, err := tenancy.CreateKeyFile(path)
	assert.NoError(t, err)
	var all map[string]any
	text, err := os.ReadFile(path)
	assert.NoError(t, err)
	assert.NoError(t, json.Unmarshal(text, &all))
	delete(all, "token")
	delete(all, "token_keys")
	all["later"] = "kept"
	change(all)
	text, err = json.Marshal(all)
	assert.NoError(t, err)
	assert.NoError(t, os.WriteFile(path, text, 0o600))
	return path
}

func TestTokenKeys(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "keys.json")
	f, err := tenancy.OpenKeyFile(path)
	assert.NoError(t, err)
	current, seeds := f.TokenKeys()
	assert.True(t, len(seeds) == 1 && seeds[current] != [32]byte{})
	_, err = token.NewMint(current, seeds, time.Now)
	assert.NoError(t, err)
	seeds[current] = [32]byte{} // a copy
	_, again := f.TokenKeys()
	assert.True(t, again[current] != [32]byte{})
}

// Of many processes that open a file of an old release at once, one adds the keys; all get the same, and nothing
// else changes.
func TestTokenKeysAreAddedOnce(t *testing.T) {
	t.Parallel()
	path := oldKeyFile(t, func(map[string]any) {})
	link := filepath.Join(t.TempDir(), "link.json")
	assert.NoError(t, os.Symlink(path, link))
	before, err := tenancy.LoadKeyFile(path)
	assert.NoError(t, err)
	current, none := before.TokenKeys()
	assert.True(t, current == "" && len(none) == 0) // and loading did not change it

	files := make([]tenancy.KeyFile, 16)
	var wg sync.WaitGroup
	for i := range files {
		wg.Go(func() {
			f, err := tenancy.OpenKeyFile([]string{path, link}[i%2])
			if err != nil {
				t.Error(err)
				return
			}
			files[i] = f
		})
	}
	wg.Wait()
	onDisk, err := tenancy.LoadKeyFile(path)
	assert.NoError(t, err)
	_, want := onDisk.TokenKeys()
	for _, f := range files {
		current, seeds := f.TokenKeys()
		assert.True(t, current == "t1" && maps.Equal(seeds, want))
		assert.Equal(t, f.PlatformKey(), before.PlatformKey())
		assert.Equal(t, f.PostgresSecret().Reveal(), before.PostgresSecret().Reveal())
	}
	text, err := os.ReadFile(path)
	assert.NoError(t, err)
	assert.True(t, strings.Contains(string(text), `"later": "kept"`))
	info, err := os.Lstat(link)
	assert.NoError(t, err)
	assert.True(t, info.Mode()&os.ModeSymlink != 0)
	info, err = os.Stat(path)
	assert.NoError(t, err)
	assert.Equal(t, info.Mode().Perm(), 0o600)
	entries, err := os.ReadDir(filepath.Dir(path))
	assert.NoError(t, err)
	assert.Equal(t, len(entries), 1) // no temporary file is left
}

// What names a key that is not there, or has keys and no name, is damaged, and is not repaired.
func TestDamagedTokenKeys(t *testing.T) {
	t.Parallel()
	seed := strings.Repeat("ab", 32)
	for _, change := range []func(map[string]any){
		func(all map[string]any) { all["token"] = "t1" },
		func(all map[string]any) { all["token_keys"] = map[string]string{"t1": seed} },
		func(all map[string]any) { all["token"], all["token_keys"] = "t2", map[string]string{"t1": seed} },
		func(all map[string]any) { all["token"], all["token_keys"] = "t1", map[string]string{"t1": "short"} },
	} {
		path := oldKeyFile(t, change)
		before, err := os.ReadFile(path)
		assert.NoError(t, err)
		_, err = tenancy.OpenKeyFile(path)
		assert.ErrorIs(t, err, tenancy.ErrKeyFile)
		after, err := os.ReadFile(path)
		assert.NoError(t, err)
		assert.Equal(t, string(after), string(before))
	}
}
