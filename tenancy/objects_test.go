package tenancy_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/infra/pgdb/pgtest"
	"bulkhead.dev/tenancy"
)

// A first run whose secrets could not be kept leaves nothing; of several at
// once one fills the database.
func TestFirstRunTogether(t *testing.T) {
	t.Parallel()
	b := pgtest.New(t)
	keys, err := tenancy.CreateKeyFile(t.TempDir() + "/keys.json")
	assert.NoError(t, err)
	store := tenancy.NewStore(b.Pools.App, keys, time.Now)
	full := errors.New("disk full")
	made, err := store.FirstRun(t.Context(), func(tenancy.First) error { return full })
	assert.ErrorIs(t, err, full)
	assert.False(t, made)
	for _, table := range []string{"tenant", "project", "api_key"} {
		n := -1
		assert.NoError(t, b.Admin(t).QueryRow(t.Context(), "SELECT count(*) FROM "+table).Scan(&n))
		assert.Equal(t, n, 0)
	}
	var wg sync.WaitGroup
	var saved, fresh atomic.Int64
	for range 6 {
		wg.Go(func() {
			made, err := store.FirstRun(context.Background(), func(tenancy.First) error { saved.Add(1); return nil })
			if err != nil {
				t.Error(err)
			}
			if made {
				fresh.Add(1)
			}
		})
	}
	wg.Wait()
	assert.Equal(t, []int64{saved.Load(), fresh.Load()}, []int64{1, 1})
}

func TestProjects(t *testing.T) {
	t.Parallel()
	b := setup(t)
	p, err := b.store.CreateProject(t.Context(), b.tenant(), "second")
	assert.NoError(t, err)
	_, err = b.store.CreateProject(t.Context(), b.tenant(), "second")
	assert.Equal(t, kind(t, err), apperr.Conflict)
	_, err = b.store.CreateProject(t.Context(), b.operator(), "second") // names are each tenant's own
	assert.NoError(t, err)
	first, next, err := b.store.ListProjects(t.Context(), b.tenant(), tenancy.Page{Size: 1})
	assert.NoError(t, err)
	assert.True(t, len(first) == 1 && next != "")
	rest, next, err := b.store.ListProjects(t.Context(), b.tenant(), tenancy.Page{Size: 1, Token: next})
	assert.NoError(t, err)
	assert.Equal(t, next, "")
	// Projects of one millisecond are listed in any order; what creation returned
	// is what is listed.
	assert.True(t, slices.Contains(append(first, rest...), p) && len(rest) == 1)
	// A key of another project of the same tenant.
	k, _, err := b.store.CreateKey(t.Context(), b.tenant(), tenancy.NewKey{Project: p.ID})
	assert.NoError(t, err)
	assert.Equal(t, k.Project, p.ID)
	for _, name := range []string{"", strings.Repeat("x", 129), "a\nb", "a\x00", "\xff", "\u200b"} {
		_, err := b.store.CreateProject(t.Context(), b.tenant(), name)
		assert.Equal(t, kind(t, err), apperr.Invalid)
		_, _, err = b.store.CreateTenant(t.Context(), b.operator(), name)
		assert.Equal(t, kind(t, err), apperr.Invalid)
	}
	_, err = b.store.CreateProject(t.Context(), b.tenant(), strings.Repeat("é", 128))
	assert.NoError(t, err)
	nobody := b.tenant()
	nobody.Scopes = tenancy.ScopeInference
	_, err = b.store.CreateProject(t.Context(), nobody, "x")
	assert.Equal(t, kind(t, err), apperr.Forbidden)
	_, _, err = b.store.ListProjects(t.Context(), nobody, tenancy.Page{})
	assert.Equal(t, kind(t, err), apperr.Forbidden)
	_, err = b.store.RevokeKey(t.Context(), nobody, b.first.Key.ID)
	assert.Equal(t, kind(t, err), apperr.Forbidden)
}

func TestTenants(t *testing.T) {
	t.Parallel()
	b := setup(t)
	other, _, err := b.store.CreateTenant(t.Context(), b.operator(), "other")
	assert.NoError(t, err)
	_, _, err = b.store.CreateTenant(t.Context(), b.operator(), "other")
	assert.Equal(t, kind(t, err), apperr.Conflict)
	var names []string
	for token := ""; ; {
		list, next, err := b.store.ListTenants(t.Context(), b.operator(), tenancy.Page{Size: 1, Token: token})
		assert.NoError(t, err)
		for _, one := range list {
			names = append(names, one.Name)
		}
		if token = next; token == "" {
			break
		}
	}
	assert.Equal(t, len(names), 3)
	assert.True(t, strings.Contains(strings.Join(names, " "), "platform"))
	// The operator's scope stays in the operator's tenant, and a forged one
	// opens nothing that the database does not.
	_, _, err = b.store.CreateKey(t.Context(), b.operator(), tenancy.NewKey{Tenant: other.ID, Scopes: tenancy.ScopePlatform})
	assert.Equal(t, kind(t, err), apperr.Forbidden)
	forged := b.tenant()
	forged.Scopes |= tenancy.ScopePlatform
	list, _, err := b.store.ListTenants(t.Context(), forged, tenancy.Page{})
	assert.NoError(t, err)
	assert.Equal(t, len(list), 1) // its own
	_, _, err = b.store.CreateTenant(t.Context(), forged, "mine")
	assert.True(t, err != nil)
	// Without a project the key goes to the first one of the other tenant.
	k, _, err := b.store.CreateKey(t.Context(), b.operator(), tenancy.NewKey{Tenant: other.ID})
	assert.NoError(t, err)
	assert.Equal(t, k.Tenant, other.ID)
	_, _, err = b.store.CreateKey(t.Context(), b.operator(), tenancy.NewKey{Tenant: id.NewTenant(time.Now())})
	assert.Equal(t, kind(t, err), apperr.NotFound)
}

func TestKeyFileSecrets(t *testing.T) {
	t.Parallel()
	path := t.TempDir() + "/keys.json"
	files := make([]tenancy.KeyFile, 8)
	var wg sync.WaitGroup
	for i := range files { // processes that start at once share one file
		wg.Go(func() {
			f, err := tenancy.OpenKeyFile(path)
			if err != nil {
				t.Error(err)
			}
			files[i] = f
		})
	}
	wg.Wait()
	f, one, two := files[0], id.Tenant{1}, id.Tenant{2}
	for _, other := range files[1:] {
		assert.Equal(t, other.PostgresSecret().Reveal(), f.PostgresSecret().Reveal())
	}
	name, mine := f.DigestKey(one)
	_, theirs := f.DigestKey(two)
	again, ok := f.DigestKeyByID(name, one)
	assert.True(t, ok && again == mine && mine != theirs)
	_, ok = f.DigestKeyByID("none", one)
	assert.False(t, ok)
	info, err := os.Stat(path)
	assert.NoError(t, err)
	assert.Equal(t, info.Mode().Perm(), 0o600)
	entries, err := os.ReadDir(path[:strings.LastIndex(path, "/")])
	assert.NoError(t, err)
	assert.Equal(t, len(entries), 1) // no temporary file is left

	var log strings.Builder
	slog.New(slog.NewJSONHandler(&log, nil)).Info("x", "keys", f)
	j, err := json.Marshal(map[string]any{"keys": f, "in": []any{f}})
	assert.NoError(t, err)
	all := log.String() + string(j) + fmt.Sprintf("%x %d %q", f, f, f)
	assert.Equal(t, strings.Count(all, "REDACTED"), 6)
	assert.False(t, strings.Contains(all, f.PostgresSecret().Reveal()))
	_, err = tenancy.LoadKeyFile(t.TempDir()) // a folder
	assert.ErrorIs(t, err, tenancy.ErrKeyFile)
}
