package settle_test

import (
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"bulkhead.dev/audit"
	"bulkhead.dev/audit/receipt"
	"bulkhead.dev/audit/settle"
	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/infra/pgdb"
	"bulkhead.dev/infra/pgdb/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// faulty is a database that can be made to fail.
type faulty struct {
	pgdb.DB
	down atomic.Bool
}

var errDown = &net.OpError{Op: "dial", Err: errors.New("connection refused")}

func (f *faulty) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	if f.down.Load() {
		return broken{}
	}
	return f.DB.SendBatch(ctx, b)
}

type broken struct{ pgx.BatchResults }

func (broken) Close() error { return errDown }

type bundle struct {
	*pgtest.Bundle
	*settle.Settler
	db     *faulty
	tenant id.Tenant
}

func setup(t *testing.T, o settle.Options) *bundle {
	t.Helper()
	b := &bundle{Bundle: pgtest.New(t), tenant: id.NewTenant(time.Now())}
	b.db = &faulty{DB: b.Pools.Settle}
	o.DB, o.Replica, o.Now = b.db, id.NewEpoch(time.Now()), time.Now
	b.Settler = settle.New(o)
	b.Start()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_ = b.Stop(ctx)
	})
	return b
}

// facts are of a completed answer.
func (b *bundle) facts() settle.Facts {
	n, now := uint32(7), receipt.At(time.Now())
	leg := func() *receipt.Leg {
		return &receipt.Leg{Worker: id.NewEpoch(time.Now()), Tokens: &n, ManifestRoot: receipt.Digest{1}}
	}
	return settle.Facts{Receipt: receipt.Receipt{
		Request: id.NewRequest(time.Now()), Tenant: b.tenant, Project: id.Project{1}, Key: id.Key{1}, Model: "tiny", ModelDigest: receipt.Digest{2},
		Surface: "openai.chat", Received: now, Admitted: now, Finished: now, EdgeTokens: &n, Prefill: leg(), Decode: leg(), Output: 3,
		Outcome: receipt.Completed, Finish: "stop", Isolation: receipt.Shared,
	}}
}

func (b *bundle) count(t *testing.T, sql string, args ...any) int {
	t.Helper()
	var n int
	assert.NoError(t, b.Admin(t).QueryRow(t.Context(), sql, args...).Scan(&n))
	return n
}

// stored returns the receipt of a request, which must exist once in both tables.
func (b *bundle) stored(t *testing.T, r id.Request) receipt.Receipt {
	t.Helper()
	for _, table := range []string{"usage", "receipt"} {
		assert.Equal(t, b.count(t, `SELECT count(*) FROM bulkhead.`+table+` WHERE request_id = $1`, [16]byte(r)), 1)
	}
	s, err := audit.NewReader(b.Pools.App).Get(t.Context(), b.tenant, r)
	assert.NoError(t, err)
	got, err := receipt.Decode(s.Body)
	assert.NoError(t, err)
	return got
}

func TestSettleOnceAndAgain(t *testing.T) {
	t.Parallel()
	b := setup(t, settle.Options{})
	f := b.facts()
	for range 3 {
		assert.NoError(t, b.Settle(t.Context(), f))
	}
	assert.Equal(t, b.stored(t, f.Receipt.Request).Outcome, receipt.Completed)
	// Another receipt for the same request is a conflict, and the first holds.
	other := f
	other.Receipt.Output = 4
	assert.True(t, b.Settle(t.Context(), other) != nil)
	assert.Equal(t, b.stored(t, f.Receipt.Request).Output, uint32(3))
	// Somebody else's receipt is as good as none.
	_, err := audit.NewReader(b.Pools.App).Get(t.Context(), id.NewTenant(time.Now()), f.Receipt.Request)
	assert.Equal(t, assert.ErrorAs[*apperr.Error](t, err).Kind, apperr.NotFound)
}

func TestManyAtOnce(t *testing.T) {
	t.Parallel()
	b := setup(t, settle.Options{})
	var wg sync.WaitGroup
	for range 200 {
		wg.Go(func() {
			if err := b.Settle(t.Context(), b.facts()); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	assert.Equal(t, b.count(t, `SELECT count(*) FROM bulkhead.receipt`), 200)
	assert.Equal(t, b.count(t, `SELECT count(*) FROM bulkhead.usage`), 200)
}

// Facts that can never be written do not hold up their neighbours.
func TestOneBadRow(t *testing.T) {
	t.Parallel()
	b := setup(t, settle.Options{Linger: 50 * time.Millisecond})
	bad := b.facts()
	bad.Receipt.Model = "a\x00b" // the database cannot hold it
	good := b.facts()
	var wg sync.WaitGroup
	var errBad, errGood error
	wg.Go(func() { errBad = b.Settle(t.Context(), bad) })
	wg.Go(func() { errGood = b.Settle(t.Context(), good) })
	wg.Wait()
	assert.True(t, errBad != nil)
	assert.NoError(t, errGood)
	b.stored(t, good.Receipt.Request)
}

func TestWithheld(t *testing.T) {
	t.Parallel()
	b := setup(t, settle.Options{HoldFor: 200 * time.Millisecond})
	b.db.down.Store(true)
	f := b.facts()
	err := b.Settle(t.Context(), f)
	assert.Equal(t, assert.ErrorAs[*apperr.Error](t, err).Code, "evidence_unavailable")
	b.db.down.Store(false)
	for range 100 {
		if b.count(t, `SELECT count(*) FROM bulkhead.receipt`) == 1 {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	got := b.stored(t, f.Receipt.Request)
	assert.True(t, got.Withheld && got.Outcome == receipt.Withheld)
}

func TestLostRequests(t *testing.T) {
	t.Parallel()
	b := setup(t, settle.Options{})
	done, lost := b.facts(), b.facts()
	for _, f := range []settle.Facts{done, lost} {
		ticket := b.Intend(settle.Intent{Request: f.Receipt.Request, Tenant: b.tenant, Project: id.Project{1}, Key: id.Key{1}, Reserved: 9, Created: time.Now()})
		assert.NoError(t, ticket.Wait(t.Context()))
	}
	assert.Equal(t, b.count(t, `SELECT count(*) FROM bulkhead.intent`), 2)
	assert.NoError(t, b.Settle(t.Context(), done))
	assert.Equal(t, b.count(t, `SELECT count(*) FROM bulkhead.intent`), 1)
	dead, err := b.Replicas(t.Context())
	assert.NoError(t, err)
	assert.Equal(t, len(dead), 1)
	next := settle.New(settle.Options{DB: b.Pools.Settle, Replica: id.NewEpoch(time.Now()), Now: time.Now})
	next.Start()
	n, err := next.Recover(t.Context(), dead[0], ended)
	assert.NoError(t, err)
	assert.Equal(t, n, 1)
	assert.NoError(t, next.Stop(t.Context()))
	got := b.stored(t, lost.Receipt.Request)
	assert.Equal(t, got.Outcome, receipt.Lost)
	assert.Equal(t, b.count(t, `SELECT sum(input_tokens + output_tokens)::int FROM bulkhead.usage WHERE request_id = $1`, [16]byte(lost.Receipt.Request)), 0)
	assert.Equal(t, b.count(t, `SELECT count(*) FROM bulkhead.intent`), 0)
}

// ended says that no worker runs a request any more.
func ended(context.Context, settle.Intent) error { return nil }
