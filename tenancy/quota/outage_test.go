package quota_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/tenancy/quota"
)

// While the database refuses everybody, a replica admits what fits into its
// slices and answers that it cannot know about the rest, never that a limit is
// reached; when the lease may be over it admits nobody; and afterwards it goes on
// by itself, with nothing lost.
func TestOutage(t *testing.T) {
	t.Parallel()
	b := setup(t)
	limit := b.limit(t, quota.Limit{Meter: quota.Tokens, Period: quota.Day, Amount: 1_000_000})
	n := b.node(t)
	for range 60 { // it is a busy tenant
		r, err := n.Reserve(t.Context(), b.ask)
		assert.NoError(t, err)
		b.spend(t, n, r, 1, 1)
	}
	name := b.Pools.Quota.Config().ConnConfig.Database
	elsewhere, err := pgx.ParseConfig(b.Source.DSN.Reveal())
	assert.NoError(t, err)
	elsewhere.Database = "postgres"
	if elsewhere.Password == "" {
		elsewhere.Password = b.Source.Password.Reveal()
	}
	server, err := pgx.ConnectConfig(t.Context(), elsewhere)
	assert.NoError(t, err)
	defer func() { _ = server.Close(context.Background()) }()
	exec := func(sql string, args ...any) {
		t.Helper()
		_, err := server.Exec(t.Context(), sql, args...)
		assert.NoError(t, err)
	}
	exec("ALTER DATABASE " + name + " ALLOW_CONNECTIONS false")
	exec("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1", name)
	code := func(a quota.Ask) string {
		t.Helper()
		r, err := n.Reserve(t.Context(), a)
		if err != nil {
			e := assert.ErrorAs[*apperr.Error](t, err)
			assert.True(t, e.Kind == apperr.Unavailable && e.RetryAfter > 0)
			return e.Code
		}
		r.Close()
		return ""
	}
	time.Sleep(2500 * time.Millisecond) // longer than what is idle is kept in good times
	assert.Equal(t, code(b.ask), "")
	large := b.ask
	large.Output = 900_000
	assert.Equal(t, code(large), "quota_check_unavailable")
	stranger := b.ask
	stranger.Key[0]++
	assert.Equal(t, code(stranger), "quota_check_unavailable")
	assert.Equal(t, code(b.ask), "") // also after somebody was told that
	b.ahead.Add(int64(10 * time.Second))
	assert.Equal(t, code(b.ask), "quota_check_unavailable")

	exec("ALTER DATABASE " + name + " ALLOW_CONNECTIONS true")
	b.admin = b.Admin(t)
	n.listens(t)
	for end := time.Now().Add(10 * time.Second); code(large) != ""; time.Sleep(10 * time.Millisecond) {
		assert.True(t, time.Now().Before(end))
	}
	n.stop()
	remaining, held := b.left(t, limit)
	assert.Equal(t, []int64{remaining, held}, []int64{1_000_000 - 60*2, 0})
}
