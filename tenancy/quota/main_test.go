package quota_test

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/infra/pgdb/pgtest"
	"bulkhead.dev/infra/replica"
	"bulkhead.dev/tenancy/quota"
)

func TestMain(m *testing.M) {
	if conf := os.Getenv(processEnv); conf != "" {
		var p process
		err := json.Unmarshal([]byte(conf), &p)
		if err == nil {
			err = runProcess(p)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	// Each schedule waits for slices to go back, about a second; the command
	// line may ask for more.
	if err := flag.Set("rapid.checks", "12"); err != nil {
		panic(err)
	}
	pgtest.Main(m)
}

// bundle is a database with one tenant that has no limits yet.
type bundle struct {
	*pgtest.Bundle
	admin *pgx.Conn
	ask   quota.Ask
	ahead atomic.Int64 // of the clock of replicas before the real one
}

func (b *bundle) now() time.Time { return time.Now().Add(time.Duration(b.ahead.Load())) }

func setup(t testing.TB) *bundle {
	t.Helper()
	b := &bundle{Bundle: pgtest.New(t)}
	b.admin = b.Admin(t)
	now := time.Now()
	b.ask = quota.Ask{Tenant: id.NewTenant(now), Project: id.NewProject(now), Key: id.NewKey(now), Model: "m", Input: 10, Output: 90}
	b.exec(t, "INSERT INTO tenant (id, name, created_at) VALUES ($1, 'one', now())", [16]byte(b.ask.Tenant))
	b.exec(t, "INSERT INTO project VALUES ($1, $2, 'p', now())", [16]byte(b.ask.Project), [16]byte(b.ask.Tenant))
	b.exec(t, `INSERT INTO api_key (id, tenant, project, name, prefix, hmac, pepper_id, scopes, created_at)
		VALUES ($1, $2, $3, 'k', 'abcdefghijkl', $4, 'p1', '{}', now())`, [16]byte(b.ask.Key), [16]byte(b.ask.Tenant), [16]byte(b.ask.Project), make([]byte, 32))
	return b
}

func (b *bundle) exec(t testing.TB, sql string, args ...any) {
	t.Helper()
	_, err := b.admin.Exec(context.Background(), sql, args...)
	assert.NoError(t, err)
}

// freeze stops the clock of the database; at sets it, and moves that of replicas
// by as much.
func (b *bundle) freeze(t testing.TB) (at func(time.Time)) {
	t.Helper()
	b.exec(t, "CREATE TABLE bulkhead.test_clock (t timestamptz)")
	b.exec(t, "GRANT SELECT ON bulkhead.test_clock TO PUBLIC")
	last := time.Now()
	b.exec(t, "INSERT INTO bulkhead.test_clock VALUES ($1)", last)
	b.exec(t, "CREATE OR REPLACE FUNCTION bulkhead.quota_now() RETURNS timestamptz LANGUAGE sql VOLATILE AS 'SELECT t FROM bulkhead.test_clock'")
	return func(now time.Time) {
		b.exec(t, "UPDATE bulkhead.test_clock SET t = $1", now)
		b.ahead.Add(int64(now.Sub(last)))
		last = now
	}
}

// limit sets a limit of the tenant.
func (b *bundle) limit(t testing.TB, l quota.Limit) id.Limit {
	t.Helper()
	l.Tenant, l.Platform, l.Created, l.ID = b.ask.Tenant, true, time.Now(), id.NewLimit(time.Now())
	if l.InputWeight == 0 && l.OutputWeight == 0 {
		l.InputWeight, l.OutputWeight = 1, 1
	}
	tx, err := b.admin.Begin(t.Context())
	assert.NoError(t, err)
	_, after, err := quota.Set(t.Context(), tx, l)
	assert.NoError(t, err)
	assert.NoError(t, tx.Commit(t.Context()))
	return after.ID
}

// node is one replica.
type node struct {
	*quota.Book
	member *replica.Member
	epoch  id.Epoch
	stop   func()
}

// node starts a replica; it is stopped in order when the test ends, unless it
// was killed.
func (b *bundle) node(t testing.TB) *node {
	t.Helper()
	n := &node{epoch: id.NewEpoch(time.Now())}
	var err error
	n.member, err = replica.Join(t.Context(), replica.Options{DB: b.Pools.Quota, Epoch: n.epoch, Now: time.Now})
	assert.NoError(t, err)
	n.Book = quota.New(quota.Options{DB: b.Pools.Quota, Replica: n.epoch, Fenced: n.member.Fenced, Now: b.now})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = n.Run(ctx) }()
	n.stop = func() { cancel(); <-done }
	t.Cleanup(n.stop)
	assert.NoError(t, n.WaitReady(t.Context()))
	_, err = n.Reserve(t.Context(), quota.Ask{}) // at once
	assert.NoError(t, err)
	return n
}

// listens waits until the replica knows that it hears of changes.
func (n *node) listens(t testing.TB) {
	t.Helper()
	for range 500 {
		if _, err := n.Reserve(t.Context(), quota.Ask{}); err == nil {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatal("the replica does not listen")
}

func refusal(t testing.TB, err error) (*apperr.Error, *quota.Refusal) {
	t.Helper()
	e := assert.ErrorAs[*apperr.Error](t, err)
	assert.Equal(t, e.Kind, apperr.TooMany)
	return e, assert.ErrorAs[*quota.Refusal](t, err)
}

// left is what can still be reserved by anybody, and what replicas hold and
// have not spent.
func (b *bundle) left(t testing.TB, limit id.Limit) (remaining, held int64) {
	t.Helper()
	tx, err := b.admin.Begin(t.Context())
	assert.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	all, err := quota.Usages(t.Context(), tx, b.ask.Tenant)
	assert.NoError(t, err)
	for _, u := range all {
		if u.ID == limit {
			return u.Remaining, u.Held
		}
	}
	t.Fatal("no such limit")
	return 0, 0
}

// gather runs n calls at once and returns what was reserved.
func gather(n int, reserve func(i int) (*quota.Reservation, error)) (got []*quota.Reservation, refused int64) {
	type result struct {
		r   *quota.Reservation
		err error
	}
	out := make(chan result)
	var other atomic.Int64
	for i := range n {
		go func() {
			r, err := reserve(i)
			out <- result{r, err}
		}()
	}
	for range n {
		if r := <-out; r.err != nil {
			other.Add(1)
		} else {
			got = append(got, r.r)
		}
	}
	return got, other.Load()
}
