package tenancy_test

import (
	"testing"
	"time"

	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/pgdb/pgtest"
	"bulkhead.dev/tenancy"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// bundle is a platform after its first start.
type bundle struct {
	*pgtest.Bundle
	keys    tenancy.KeyFile
	keyPath string
	store   *tenancy.Store
	first   tenancy.First
}

func setup(t *testing.T) *bundle {
	t.Helper()
	b := &bundle{Bundle: pgtest.New(t), keyPath: t.TempDir() + "/keys.json"}
	var err error
	b.keys, err = tenancy.CreateKeyFile(b.keyPath)
	assert.NoError(t, err)
	b.store = tenancy.NewStore(b.Pools.App, b.keys, time.Now)
	made, err := b.store.FirstRun(t.Context(), func(f tenancy.First) error { b.first = f; return nil })
	assert.NoError(t, err)
	assert.True(t, made)
	return b
}

// tenant is the principal of the first tenant's key.
func (b *bundle) tenant() tenancy.Principal {
	return tenancy.Principal{Tenant: b.first.Tenant.ID, Project: b.first.Project.ID, Key: b.first.Key.ID, Scopes: tenancy.ScopesTenant}
}

func (b *bundle) operator() tenancy.Principal {
	return tenancy.Principal{Tenant: b.first.Platform.ID, Key: b.first.Operator.ID, Project: b.first.Operator.Project, Scopes: tenancy.ScopesTenant | tenancy.ScopePlatform}
}

func (b *bundle) auth(t *testing.T, now func() time.Time) *tenancy.Authenticator {
	t.Helper()
	a := tenancy.NewAuthenticator(b.Pools.Auth, b.keys, now)
	t.Cleanup(a.Close)
	return a
}
