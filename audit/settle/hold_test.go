package settle_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"bulkhead.dev/audit/receipt"
	"bulkhead.dev/audit/settle"
	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/infra/pgdb"
)

// waitFor polls, because what is waited for happens in another goroutine.
func waitFor(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("waited in vain until " + what)
		}
	}
}

// A commit that waits for a lock is cut off when the hold ends, so that the
// caller hears of it in time, and what is written later says withheld.
func TestHoldEndsInFlight(t *testing.T) {
	t.Parallel()
	b := setup(t, settle.Options{HoldFor: 300 * time.Millisecond})
	admin := b.Admin(t)
	_, err := admin.Exec(t.Context(), "BEGIN; LOCK TABLE receipt IN ACCESS EXCLUSIVE MODE")
	assert.NoError(t, err)
	f, began := b.facts(), time.Now()
	assert.Equal(t, code(t, b.Settle(t.Context(), f)), "evidence_unavailable")
	took := time.Since(began)
	assert.True(t, took >= 300*time.Millisecond && took < 2*time.Second)
	_, err = admin.Exec(t.Context(), "ROLLBACK")
	assert.NoError(t, err)
	waitFor(t, "it is written", func() bool { return b.Counts().Committed == 1 })
	got := b.stored(t, f.Receipt.Request)
	assert.True(t, got.Withheld && got.Outcome == receipt.Withheld)
	assert.NoError(t, b.Ready())
	assert.Equal(t, b.Counts().LateAcks, 0)
	assert.Equal(t, b.count(t, "SELECT count(*) FROM usage WHERE withheld AND outcome = 'withheld'"), 1)
}

// Admission stops when memory is full, and facts of what was admitted are still
// taken.
func TestQueueIsBounded(t *testing.T) {
	t.Parallel()
	b := setup(t, settle.Options{MaxQueue: 3, HoldFor: time.Minute})
	b.db.down.Store(true)
	var wg sync.WaitGroup
	for i := range 5 {
		if i < 3 {
			assert.NoError(t, b.Ready())
		} else {
			assert.Equal(t, assert.ErrorAs[*apperr.Error](t, b.Ready()).Kind, apperr.Unavailable)
		}
		wg.Go(func() {
			if err := b.Settle(t.Context(), b.facts()); err != nil {
				t.Error(err)
			}
		})
		waitFor(t, "it is queued", func() bool { return b.Counts().Queued == i+1 })
	}
	b.db.down.Store(false)
	wg.Wait()
	assert.NoError(t, b.Ready())
	assert.Equal(t, b.count(t, "SELECT count(*) FROM receipt"), 5)
	assert.True(t, b.Counts().Retries > 0)
}

// The caller may go away; its facts do not.
func TestCallerGoesAway(t *testing.T) {
	t.Parallel()
	b := setup(t, settle.Options{HoldFor: time.Minute})
	b.db.down.Store(true)
	f := b.facts()
	ticket := b.intent(f)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	assert.True(t, b.Settle(ctx, f) != nil)
	assert.True(t, ticket.Wait(ctx) != nil)
	b.db.down.Store(false)
	assert.NoError(t, ticket.Wait(t.Context()))
	waitFor(t, "it is written", func() bool { return b.Counts().Committed == 1 })
	assert.Equal(t, b.stored(t, f.Receipt.Request).Outcome, receipt.Completed)
	assert.Equal(t, b.count(t, "SELECT count(*) FROM intent"), 0)
}

// An intent at fault is refused by itself.
func TestBadIntent(t *testing.T) {
	t.Parallel()
	b := setup(t, settle.Options{IntendWithin: 50 * time.Millisecond, Linger: 50 * time.Millisecond})
	bad := b.Intend(settle.Intent{Request: id.NewRequest(time.Now()), Tenant: b.tenant, Reserved: -1, Created: time.Now()})
	ticket := b.intent(b.facts())
	assert.NoError(t, b.Settle(t.Context(), b.facts()))
	assert.NoError(t, ticket.Wait(t.Context()))
	assert.Equal(t, code(t, bad.Wait(t.Context())), "evidence_rejected")
	assert.Equal(t, b.count(t, "SELECT count(*) FROM intent"), 1)
}

// Two survivors recover the same dead replica at once; each loss is written once.
func TestRecoverTogether(t *testing.T) {
	t.Parallel()
	b := setup(t, settle.Options{})
	const n = 40
	for range n - 1 {
		b.intent(b.facts())
	}
	assert.NoError(t, b.intent(b.facts()).Wait(t.Context()))
	dead, err := b.Replicas(t.Context())
	assert.NoError(t, err)
	var wg sync.WaitGroup
	var recovered [2]int
	for i := range recovered {
		wg.Go(func() {
			s := settle.New(settle.Options{DB: b.Pools.Settle, Replica: id.NewEpoch(time.Now()), Now: time.Now, MaxBatch: 7})
			n, err := s.Recover(t.Context(), dead[0], ended)
			if err != nil {
				t.Error(err)
			}
			recovered[i] = n
		})
	}
	wg.Wait()
	assert.Equal(t, recovered[0]+recovered[1], n)
	assert.Equal(t, b.count(t, "SELECT count(*) FROM receipt WHERE outcome = 'lost'"), n)
	assert.Equal(t, b.count(t, "SELECT count(*) FROM usage"), n)
	assert.Equal(t, b.count(t, "SELECT count(*) FROM intent"), 0)
}

// Recovery says what is wrong with the database and loses nothing.
func TestRecoverWithoutDatabase(t *testing.T) {
	t.Parallel()
	b := setup(t, settle.Options{})
	assert.NoError(t, b.intent(b.facts()).Wait(t.Context()))
	dead, err := b.Replicas(t.Context())
	assert.NoError(t, err)
	s := settle.New(settle.Options{DB: b.db, Replica: id.NewEpoch(time.Now()), Now: time.Now})
	b.db.down.Store(true)
	_, err = s.Recover(t.Context(), dead[0], ended)
	assert.True(t, pgdb.IsUnavailable(err))
	assert.Equal(t, b.count(t, "SELECT count(*) FROM intent"), 1)
}
