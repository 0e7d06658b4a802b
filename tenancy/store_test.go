package tenancy_test

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/tenancy"
)

func TestFirstRunHappensOnce(t *testing.T) {
	t.Parallel()
	b := setup(t)
	made, err := b.store.FirstRun(t.Context(), func(tenancy.First) error { return errors.New("must not be called") })
	assert.NoError(t, err)
	assert.False(t, made)
}

func TestKeysAndScopes(t *testing.T) {
	t.Parallel()
	b := setup(t)
	k, secret, err := b.store.CreateKey(t.Context(), b.tenant(), tenancy.NewKey{Name: "second"})
	assert.NoError(t, err)
	assert.Equal(t, k.Scopes, tenancy.ScopesDefault)
	assert.True(t, strings.HasPrefix(secret.Reveal(), k.Prefix) || strings.Contains(secret.Reveal(), k.Prefix))
	weak := b.tenant()
	weak.Scopes = tenancy.ScopeKeysWrite
	_, _, err = b.store.CreateKey(t.Context(), weak, tenancy.NewKey{Scopes: tenancy.ScopeInference})
	assert.Equal(t, kind(t, err), apperr.Forbidden)
	_, _, err = b.store.CreateKey(t.Context(), b.tenant(), tenancy.NewKey{Scopes: tenancy.ScopePlatform})
	assert.Equal(t, kind(t, err), apperr.Forbidden)
	_, err = tenancy.ParseScopes([]string{"inference", "root"})
	assert.Equal(t, kind(t, err), apperr.Invalid)
}

func TestTenantsDoNotReachEachOther(t *testing.T) {
	t.Parallel()
	b := setup(t)
	other, project, err := b.store.CreateTenant(t.Context(), b.operator(), "other")
	assert.NoError(t, err)
	_, _, err = b.store.CreateTenant(t.Context(), b.tenant(), "mine")
	assert.Equal(t, kind(t, err), apperr.Forbidden)
	k, _, err := b.store.CreateKey(t.Context(), b.operator(), tenancy.NewKey{Tenant: other.ID, Project: project.ID, Name: "theirs"})
	assert.NoError(t, err)
	_, err = b.store.RevokeKey(t.Context(), b.tenant(), k.ID)
	assert.Equal(t, kind(t, err), apperr.NotFound)
	_, _, err = b.store.CreateKey(t.Context(), b.tenant(), tenancy.NewKey{Project: project.ID})
	assert.Equal(t, kind(t, err), apperr.NotFound)
	_, _, err = b.store.CreateKey(t.Context(), b.tenant(), tenancy.NewKey{Tenant: other.ID})
	assert.True(t, err != nil)
	list, _, err := b.store.ListKeys(t.Context(), b.tenant(), tenancy.Page{})
	assert.NoError(t, err)
	for _, k := range list {
		assert.Equal(t, k.Tenant, b.first.Tenant.ID)
	}
	_, _, err = b.store.ListTenants(t.Context(), b.tenant(), tenancy.Page{})
	assert.Equal(t, kind(t, err), apperr.Forbidden)
}

func TestPages(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for i := range 5 {
		_, _, err := b.store.CreateKey(t.Context(), b.tenant(), tenancy.NewKey{Name: fmt.Sprint("k", i)})
		assert.NoError(t, err)
	}
	seen, token := map[string]bool{}, ""
	for pages := 0; ; pages++ {
		list, next, err := b.store.ListKeys(t.Context(), b.tenant(), tenancy.Page{Size: 2, Token: token})
		assert.NoError(t, err)
		assert.True(t, len(list) <= 2 && pages < 5)
		for _, k := range list {
			assert.False(t, seen[k.ID.String()])
			seen[k.ID.String()] = true
		}
		if token = next; token == "" {
			break
		}
	}
	assert.Equal(t, len(seen), 6)
	_, _, err := b.store.ListKeys(t.Context(), b.tenant(), tenancy.Page{Token: "nonsense"})
	assert.Equal(t, kind(t, err), apperr.Invalid)
}

func TestCatalog(t *testing.T) {
	t.Parallel()
	b := setup(t)
	c := tenancy.NewCatalog(b.Pools.App)
	m := tenancy.Model{Name: "tiny", Digest: [32]byte{1}, Bytes: 5, Architecture: "llama", ContextWindow: 64, DefaultOutputTokens: 8, Chat: true, Created: time.Now()}
	assert.NoError(t, c.UpsertModel(t.Context(), m))
	got, err := c.ModelByName(t.Context(), "tiny")
	assert.NoError(t, err)
	assert.Equal(t, got.Digest, m.Digest)
	for _, name := range []string{"", "none", "a\x00b", "\xff"} {
		_, err = c.ModelByName(t.Context(), name)
		assert.Equal(t, kind(t, err), apperr.NotFound)
	}
	list, err := c.Models(t.Context())
	assert.NoError(t, err)
	assert.Equal(t, len(list), 1)
}

func TestKeyFile(t *testing.T) {
	t.Parallel()
	path := t.TempDir() + "/keys.json"
	f, err := tenancy.OpenKeyFile(path)
	assert.NoError(t, err)
	again, err := tenancy.OpenKeyFile(path)
	assert.NoError(t, err)
	assert.Equal(t, f.PlatformKey(), again.PlatformKey())
	text, err := os.ReadFile(path)
	assert.NoError(t, err)
	printed := fmt.Sprintf("%v %+v %#v %s", f, &f, f, f)
	for field := range strings.FieldsSeq(string(text)) {
		if len(field) > 40 {
			assert.False(t, strings.Contains(printed, strings.Trim(field, `",`)))
		}
	}
	assert.NoError(t, os.Chmod(path, 0o640))
	_, err = tenancy.LoadKeyFile(path)
	assert.ErrorIs(t, err, tenancy.ErrKeyFile)
	assert.NoError(t, os.Chmod(path, 0o600))
	assert.NoError(t, os.WriteFile(path, []byte("{}"), 0o600))
	_, err = tenancy.LoadKeyFile(path)
	assert.ErrorIs(t, err, tenancy.ErrKeyFile)
}
