package gateway

import (
	"context"
	"errors"
	"io"
	"testing"
	"time"

	"connectrpc.com/connect"

	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/infra/pgdb/pgtest"
	"bulkhead.dev/infra/replica"
	workerv1 "bulkhead.dev/services/gen/bulkhead/worker/v1"
	"bulkhead.dev/tenancy/quota"
)

// Whatever becomes of a request, what it reserved and did not use is free
// again when its receipt is written: one slot is enough for all of them, one
// after the other, and in the end nothing is held.
func TestReservedReturnsToZero(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	p := principal()
	admin := db.Admin(t)
	exec := func(sql string, args ...any) {
		t.Helper()
		_, err := admin.Exec(t.Context(), sql, args...)
		assert.NoError(t, err)
	}
	exec("INSERT INTO tenant (id, name, created_at) VALUES ($1, 't', now())", [16]byte(p.Tenant))
	for _, l := range []quota.Limit{
		{Meter: quota.Concurrent, Period: quota.None, Amount: 1},
		{Meter: quota.Tokens, Period: quota.Day, Amount: 10_000},
	} {
		l.ID, l.Tenant, l.InputWeight, l.OutputWeight, l.Platform, l.Created = id.NewLimit(time.Now()), p.Tenant, 1, 1, true, time.Now()
		tx, err := admin.Begin(t.Context())
		assert.NoError(t, err)
		_, _, err = quota.Set(t.Context(), tx, l)
		assert.NoError(t, err)
		assert.NoError(t, tx.Commit(t.Context()))
	}
	epoch := id.NewEpoch(time.Now())
	m, err := replica.Join(t.Context(), replica.Options{DB: db.Pools.Quota, Epoch: epoch, Now: time.Now})
	assert.NoError(t, err)
	book := quota.New(quota.Options{DB: db.Pools.Quota, Replica: epoch, Fenced: m.Fenced, Now: time.Now})
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = book.Run(ctx) }()
	defer func() { stop(); <-done }()
	assert.NoError(t, book.WaitReady(t.Context()))

	refused := refusal(t, connect.CodeResourceExhausted, "queue_full")
	spent := int64(0)
	for name, s := range map[string]script{
		"well":                   {text: []string{"a", "b"}},
		"no receipt":             {text: []string{"a"}, finish: nil},
		"decode at once":         {reserve: refused},
		"decode at the commit":   {refuse2: refused},
		"prefill":                {refuse: refused},
		"a lie":                  {text: []string{"a"}, commit: func(f *workerv1.LegFacts) { f.Tokens++ }},
		"an end without its end": {text: []string{"a"}, early: true},
		"client leaves":          {text: []string{"a"}, hang: true},
	} {
		b := setup(t, s)
		b.Quota = book
		if name == "no receipt" {
			b.settle = errors.New("the database is away")
		}
		stream, err := b.Generate(t.Context(), p, request())
		if err != nil && !LeftReceipt(err) { // or it ended as its script says
			t.Fatalf("%s: the slot of the one before is not free: %v", name, err)
		}
		if stream != nil {
			_, err := stream.Next(t.Context())
			for err == nil && name != "client leaves" {
				_, err = stream.Next(t.Context())
			}
			if errors.Is(err, io.EOF) {
				_, _ = stream.Finish(t.Context())
			}
			stream.Close()
		}
		b.Wait()
		for _, c := range b.charges {
			spent += c.Amount
		}
	}
	stop()
	<-done
	tx, err := admin.Begin(t.Context())
	assert.NoError(t, err)
	list, err := quota.Usages(t.Context(), tx, p.Tenant)
	assert.NoError(t, err)
	assert.NoError(t, tx.Rollback(t.Context()))
	for _, u := range list {
		// The fake settlement writes no charges, so they are still held.
		want := int64(0)
		if u.Meter == quota.Tokens {
			want = spent
		}
		assert.Equal(t, []int64{u.Held, u.Remaining}, []int64{want, u.Amount - want})
	}
	assert.True(t, spent > 0)
}
