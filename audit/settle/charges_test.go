package settle_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"bulkhead.dev/audit/receipt"
	"bulkhead.dev/audit/settle"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/tenancy/quota"
)

// Each request is charged once, in the transaction of its usage, however often
// it is written and with whomever it shares a commit.
func TestChargesOnce(t *testing.T) {
	t.Parallel()
	b := setup(t, settle.Options{Linger: 20 * time.Millisecond, HoldFor: 300 * time.Millisecond})
	window := time.Date(2026, 12, 1, 0, 0, 0, 0, time.UTC)
	day, month := id.NewLimit(time.Now()), id.NewLimit(time.Now())
	charged := func(amount int64) settle.Facts {
		f := b.facts()
		f.Charges = []quota.Charge{{Limit: day, Window: window, Amount: amount}, {Limit: month, Window: window, Amount: 2 * amount}}
		return f
	}
	spent := func(l id.Limit) int {
		return b.count(t, "SELECT coalesce(sum(amount), 0)::int FROM quota_spend WHERE limit_id = $1 AND tenant = $2", [16]byte(l), [16]byte(b.tenant))
	}
	var wg sync.WaitGroup
	for i := range 40 {
		wg.Go(func() {
			f := charged(10)
			if i%10 == 0 {
				f.Receipt.Model = "a\x00" // it cannot be written, nor is it charged
			}
			for range 1 + i%3 {
				_ = b.Settle(context.Background(), f)
			}
		})
	}
	wg.Wait()
	assert.Equal(t, []int{spent(day), spent(month)}, []int{36 * 10, 36 * 20})
	other := charged(10)
	assert.NoError(t, b.Settle(t.Context(), other))
	other.Receipt.Output++
	assert.Equal(t, code(t, b.Settle(t.Context(), other)), "evidence_conflict")
	assert.Equal(t, spent(day), 37*10)
	// What is withheld is charged when it is written.
	b.db.down.Store(true)
	late := charged(10)
	assert.Equal(t, code(t, b.Settle(t.Context(), late)), "evidence_unavailable")
	assert.Equal(t, spent(day), 37*10)
	b.db.down.Store(false)
	waitFor(t, "it is written", func() bool { return spent(day) == 38*10 })
	assert.Equal(t, b.count(t, "SELECT count(DISTINCT (replica, limit_id, window_start)) FROM quota_spend"), 2)
}

// An intent says what its request holds and whom to ask about it; one about
// which nobody answers is left, and the others are settled.
func TestRecoverAsksWorkers(t *testing.T) {
	t.Parallel()
	b := setup(t, settle.Options{})
	limit := id.NewLimit(time.Now())
	var intents []settle.Intent
	for i := range 5 {
		f := b.facts()
		in := settle.Intent{Request: f.Receipt.Request, Tenant: b.tenant, Project: f.Receipt.Project, Key: f.Receipt.Key, Created: time.Now(),
			Transfer: id.NewTransfer(), Prefill: id.NewEpoch(time.Now()), Decode: id.NewEpoch(time.Now())}
		for range i {
			in.Holds = append(in.Holds, quota.Hold{Limit: limit, Amount: 7})
		}
		intents = append(intents, in)
		assert.NoError(t, b.Intend(in).Wait(t.Context()))
	}
	assert.Equal(t, b.count(t, "SELECT sum(h)::int FROM intent, unnest(amounts) h"), 7*(1+2+3+4))
	dead, err := b.Replicas(t.Context())
	assert.NoError(t, err)
	s := settle.New(settle.Options{DB: b.Pools.Settle, Replica: id.NewEpoch(time.Now()), Now: time.Now, MaxBatch: 2})
	silent := errors.New("the worker does not answer")
	n, err := s.Recover(t.Context(), dead[0], func(_ context.Context, in settle.Intent) error {
		for _, want := range intents {
			if want.Request == in.Request {
				assert.Equal(t, []any{in.Transfer, in.Prefill, in.Decode}, []any{want.Transfer, want.Prefill, want.Decode})
			}
		}
		if in.Request == intents[1].Request {
			return silent
		}
		return nil
	})
	assert.ErrorIs(t, err, silent)
	assert.Equal(t, n, 4)
	n, err = s.Recover(t.Context(), dead[0], ended)
	assert.NoError(t, err)
	assert.Equal(t, n, 1)
	assert.Equal(t, b.stored(t, intents[1].Request).Outcome, receipt.Lost)
}

// The intent of a request never becomes durable after its receipt, however many
// intents wait in front of it.
func TestIntentIsNotLeftBehind(t *testing.T) {
	t.Parallel()
	b := setup(t, settle.Options{HoldFor: time.Minute})
	b.db.down.Store(true)
	for range 1100 { // more than one transaction takes
		b.intent(b.facts())
	}
	f := b.facts()
	ticket := b.intent(f)
	settled := make(chan error, 1)
	go func() { settled <- b.Settle(context.Background(), f) }()
	waitFor(t, "it is queued", func() bool { return b.Counts().Queued == 1 })
	b.db.down.Store(false)
	assert.NoError(t, <-settled)
	assert.NoError(t, ticket.Wait(t.Context()))
	waitFor(t, "the others are written", func() bool { return b.Counts().Intents >= 1100 })
	assert.Equal(t, b.count(t, "SELECT count(*) FROM intent WHERE request_id = $1", [16]byte(f.Receipt.Request)), 0)
	assert.Equal(t, b.count(t, "SELECT count(*) FROM intent"), 1100)
}
