package tenancy_test

import (
	"context"
	"encoding/json"
	"hash/crc32"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/tenancy"
)

// sign puts the right checksum on the body of a key, as anybody can.
func sign(body string) string {
	const digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
	v, out := crc32.ChecksumIEEE([]byte(body)), [6]byte{}
	for i := len(out) - 1; i >= 0; i-- {
		out[i], v = digits[v%62], v/62
	}
	return body + string(out[:])
}

// Who knows the public part of a key, which lists show, does not have the key.
func TestForgedSecret(t *testing.T) {
	t.Parallel()
	b := setup(t)
	a := b.auth(t, time.Now)
	key := b.first.TenantKey.Reveal()
	body := key[:len(key)-6]
	assert.Equal(t, sign(body), key)
	for range 2 { // the second is answered from memory
		for _, forged := range []string{sign(body[:22] + strings.Repeat("0", 43)), sign(body[:len(body)-1] + "_")} {
			_, err := a.Authenticate(t.Context(), forged)
			assert.Equal(t, assert.ErrorAs[*apperr.Error](t, err).Code, "invalid_api_key")
		}
	}
	_, err := a.Authenticate(t.Context(), key) // the forgery does not harm the real one
	assert.NoError(t, err)
}

// A key file that lacks the pepper of a key is our fault, so the key is not
// called bad.
func TestPepperIsMissing(t *testing.T) {
	t.Parallel()
	b := setup(t)
	path := t.TempDir() + "/keys.json"
	_, err := tenancy.CreateKeyFile(path)
	assert.NoError(t, err)
	text, err := os.ReadFile(path)
	assert.NoError(t, err)
	assert.NoError(t, os.WriteFile(path, []byte(strings.ReplaceAll(string(text), `"p1"`, `"p2"`)), 0o600))
	keys, err := tenancy.LoadKeyFile(path)
	assert.NoError(t, err)
	a := tenancy.NewAuthenticator(b.Pools.Auth, keys, time.Now)
	defer a.Close()
	_, err = a.Authenticate(t.Context(), b.first.TenantKey.Reveal())
	assert.Equal(t, assert.ErrorAs[*apperr.Error](t, err).Code, "key_check_unavailable")
	// With both peppers in the file the old keys keep working.
	var both, old map[string]any
	assert.NoError(t, json.Unmarshal(text, &both))
	oldText, err := os.ReadFile(b.keyPath)
	assert.NoError(t, err)
	assert.NoError(t, json.Unmarshal(oldText, &old))
	both["peppers"] = map[string]any{"p1": old["peppers"].(map[string]any)["p1"], "p2": both["peppers"].(map[string]any)["p1"]}
	both["pepper"] = "p2"
	text, err = json.Marshal(both)
	assert.NoError(t, err)
	assert.NoError(t, os.WriteFile(path, text, 0o600))
	keys, err = tenancy.LoadKeyFile(path)
	assert.NoError(t, err)
	rotated := tenancy.NewAuthenticator(b.Pools.Auth, keys, time.Now)
	defer rotated.Close()
	_, err = rotated.Authenticate(t.Context(), b.first.TenantKey.Reveal())
	assert.NoError(t, err)
}

func TestSuspensionAndIsolationEpoch(t *testing.T) {
	t.Parallel()
	b := setup(t)
	var c clock
	a := b.auth(t, c.now)
	before, err := a.Authenticate(t.Context(), b.first.TenantKey.Reveal())
	assert.NoError(t, err)
	set := func(sql string) {
		_, err := b.Admin(t).Exec(t.Context(), "UPDATE tenant SET "+sql+" WHERE id = $1", [16]byte(b.first.Tenant.ID))
		assert.NoError(t, err)
		c.advance(time.Second)
	}
	set("isolation_epoch = 2")
	after, err := a.Authenticate(t.Context(), b.first.TenantKey.Reveal())
	assert.NoError(t, err)
	assert.True(t, after.Owner != before.Owner && after.Tenant == before.Tenant)
	set("suspended_at = now()")
	_, err = a.Authenticate(t.Context(), b.first.TenantKey.Reveal())
	assert.Equal(t, assert.ErrorAs[*apperr.Error](t, err).Code, "tenant_suspended")
	_, err = a.Authenticate(t.Context(), b.first.OperatorKey.Reveal()) // others go on
	assert.NoError(t, err)
	set("suspended_at = NULL")
	_, err = a.Authenticate(t.Context(), b.first.TenantKey.Reveal())
	assert.NoError(t, err)
}

// A crowd with one key costs one query, and fresh knowledge costs none.
func TestCrowdAsksOnce(t *testing.T) {
	t.Parallel()
	b := setup(t)
	var c clock
	frozen := time.Now()
	a := b.auth(t, func() time.Time { return frozen.Add(time.Duration(c.offset.Load())) })
	crowd := func() {
		var wg sync.WaitGroup
		for range 100 {
			wg.Go(func() {
				if _, err := a.Authenticate(context.Background(), b.first.TenantKey.Reveal()); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
	}
	crowd()
	assert.Equal(t, a.Counts().Lookups, 1)
	c.advance(499 * time.Millisecond)
	crowd()
	assert.Equal(t, a.Counts().Lookups, 1)
	c.advance(600 * time.Millisecond)
	crowd()
	assert.Equal(t, a.Counts().Lookups, 2)
}
