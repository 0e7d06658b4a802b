package tenancy_test

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/pgdb"
	"bulkhead.dev/tenancy"
)

// flaky is a database that can be told not to answer, and to hang.
type flaky struct {
	pgdb.DB
	down, hang atomic.Bool
	asked      atomic.Int64
}

type noRow struct{ err error }

func (n noRow) Scan(...any) error { return n.err }

func (f *flaky) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	f.asked.Add(1)
	switch {
	case f.hang.Load():
		<-ctx.Done()
		return noRow{ctx.Err()}
	case f.down.Load():
		return noRow{context.DeadlineExceeded}
	}
	return f.DB.QueryRow(ctx, sql, args...)
}

func TestRefusalsAndOutages(t *testing.T) {
	t.Parallel()
	b, stranger := setup(t), setup(t).first.TenantKey.Reveal()
	db := &flaky{DB: b.Pools.Auth}
	var c clock
	a := tenancy.NewAuthenticator(db, b.keys, c.now)
	defer a.Close()
	code := func(key string) string {
		t.Helper()
		_, err := a.Authenticate(t.Context(), key)
		if err == nil {
			return ""
		}
		return assert.ErrorAs[*apperr.Error](t, err).Code
	}
	mine := b.first.TenantKey.Reveal()
	assert.Equal(t, code(stranger), "invalid_api_key")
	assert.Equal(t, code(mine), "")
	db.down.Store(true)
	c.advance(time.Second)
	// A refusal is not kept: the key may have been made since.
	assert.Equal(t, code(stranger), "key_check_unavailable")
	assert.Equal(t, code(mine), "")
	// During the pause after a failure nobody asks.
	asked := db.asked.Load()
	assert.Equal(t, code(b.first.OperatorKey.Reveal()), "key_check_unavailable")
	assert.Equal(t, db.asked.Load(), asked)
	assert.True(t, a.Counts().Stale > 0 && a.Counts().Unavailable > 0)
	// A malformed key is bad whatever the database does.
	assert.Equal(t, code(mine+"x"), "invalid_api_key")
	// It is back: a revocation that happened meanwhile counts at once.
	_, err := b.store.RevokeKey(t.Context(), b.tenant(), b.first.Key.ID)
	assert.NoError(t, err)
	db.down.Store(false)
	c.advance(time.Second)
	assert.Equal(t, code(mine), "invalid_api_key")
	// And a refused key is not good again in the next outage.
	db.down.Store(true)
	c.advance(time.Second)
	assert.Equal(t, code(mine), "key_check_unavailable")
}

// A database that accepts and never answers delays a key for less than the time
// within which a revocation counts.
func TestDatabaseHangs(t *testing.T) {
	t.Parallel()
	b := setup(t)
	db := &flaky{DB: b.Pools.Auth}
	a := tenancy.NewAuthenticator(db, b.keys, time.Now)
	db.hang.Store(true)
	began := time.Now()
	_, err := a.Authenticate(t.Context(), b.first.TenantKey.Reveal())
	assert.Equal(t, kind(t, err), apperr.Unavailable)
	assert.True(t, time.Since(began) < 2*time.Second)

	// A caller that goes away does not wait, and Close ends the look-up.
	time.Sleep(300 * time.Millisecond) // the pause
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	var wg sync.WaitGroup
	wg.Go(func() { _, err = a.Authenticate(ctx, b.first.TenantKey.Reveal()) })
	wg.Wait()
	assert.True(t, err != nil && kind(t, err) != apperr.Unauthenticated)
	a.Close()
	_, err = a.Authenticate(t.Context(), b.first.TenantKey.Reveal())
	assert.Equal(t, kind(t, err), apperr.Unavailable)
}

// Every call of the store says that the database is away, not that a thing is.
func TestStoreDuringOutage(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.Pools.App.Close()
	c := tenancy.NewCatalog(b.Pools.App)
	for name, call := range map[string]func() error{
		"create tenant":  func() error { _, _, err := b.store.CreateTenant(t.Context(), b.operator(), "x"); return err },
		"list tenants":   func() error { _, _, err := b.store.ListTenants(t.Context(), b.operator(), tenancy.Page{}); return err },
		"create project": func() error { _, err := b.store.CreateProject(t.Context(), b.tenant(), "x"); return err },
		"list projects":  func() error { _, _, err := b.store.ListProjects(t.Context(), b.tenant(), tenancy.Page{}); return err },
		"create key":     func() error { _, _, err := b.store.CreateKey(t.Context(), b.tenant(), tenancy.NewKey{}); return err },
		"list keys":      func() error { _, _, err := b.store.ListKeys(t.Context(), b.tenant(), tenancy.Page{}); return err },
		"revoke key":     func() error { _, err := b.store.RevokeKey(t.Context(), b.tenant(), b.first.Key.ID); return err },
		"models":         func() error { _, err := c.Models(t.Context()); return err },
		"model":          func() error { _, err := c.ModelByName(t.Context(), "tiny"); return err },
		"write model":    func() error { return c.UpsertModel(t.Context(), tenancy.Model{Name: "x"}) },
		"first run":      func() error { _, err := b.store.FirstRun(t.Context(), nil); return err },
	} {
		t.Run(name, func(t *testing.T) {
			assert.Equal(t, assert.ErrorAs[*apperr.Error](t, call()).Code, "database_unavailable")
		})
	}
}
