package settle_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"bulkhead.dev/audit/receipt"
	"bulkhead.dev/audit/settle"
	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/infra/pgdb"
)

func code(t *testing.T, err error) string {
	t.Helper()
	return assert.ErrorAs[*apperr.Error](t, err).Code
}

func (b *bundle) intent(f settle.Facts) *settle.Ticket {
	return b.Intend(settle.Intent{Request: f.Receipt.Request, Tenant: b.tenant, Project: f.Receipt.Project, Key: f.Receipt.Key, Created: time.Now()})
}

// Requests that end together share commits, and bad ones among them cost
// nobody else anything.
func TestCrowdSharesCommits(t *testing.T) {
	t.Parallel()
	b := setup(t, settle.Options{Linger: 20 * time.Millisecond})
	const n, every = 200, 40
	var wg sync.WaitGroup
	errs := make([]error, n)
	for i := range n {
		wg.Go(func() {
			f := b.facts()
			if i%every == 0 {
				f.Receipt.Model = fmt.Sprintf("a\x00%d", i)
			}
			b.intent(f)
			errs[i] = b.Settle(t.Context(), f)
		})
	}
	wg.Wait()
	for i, err := range errs {
		if i%every == 0 {
			assert.Equal(t, code(t, err), "evidence_rejected")
		} else {
			assert.NoError(t, err)
		}
	}
	c := b.Counts()
	assert.Equal(t, []uint64{c.Committed, c.Rejected, c.Withheld, c.Conflicts}, []uint64{n - n/every, n / every, 0, 0})
	assert.True(t, c.Batches < n/2)
	for _, table := range []string{"receipt", "usage"} {
		assert.Equal(t, b.count(t, "SELECT count(*) FROM "+table), n-n/every)
	}
}

func TestReplayAndConflictWriteNothing(t *testing.T) {
	t.Parallel()
	b := setup(t, settle.Options{})
	f := b.facts()
	assert.NoError(t, b.Settle(t.Context(), f))
	other := f
	other.Receipt.Output++
	state := func() string {
		var s string
		assert.NoError(t, b.Admin(t).QueryRow(t.Context(), `SELECT string_agg(u::text || r::text, ' ') || (SELECT string_agg(xmin::text, ' ') FROM receipt)
			FROM usage u JOIN receipt r USING (request_id)`).Scan(&s))
		return s
	}
	before := state()
	assert.NoError(t, b.Settle(t.Context(), f))
	assert.Equal(t, code(t, b.Settle(t.Context(), other)), "evidence_conflict")
	// Both at once share no batch: one holds, and the other is told.
	g := b.facts()
	h := g
	h.Receipt.Output++
	var wg sync.WaitGroup
	errs := make([]error, 2)
	for i, f := range []settle.Facts{g, h} {
		wg.Go(func() { errs[i] = b.Settle(t.Context(), f) })
	}
	wg.Wait()
	assert.True(t, (errs[0] == nil) != (errs[1] == nil))
	assert.Equal(t, b.count(t, "SELECT count(*) FROM usage"), 2)
	_, err := b.Admin(t).Exec(t.Context(), "DELETE FROM usage WHERE request_id = $1", [16]byte(g.Receipt.Request))
	assert.NoError(t, err)
	assert.Equal(t, b.count(t, "SELECT count(*) FROM receipt"), 2)
	_, err = b.Admin(t).Exec(t.Context(), "DELETE FROM receipt WHERE request_id = $1", [16]byte(g.Receipt.Request))
	assert.NoError(t, err)
	assert.Equal(t, state(), before)
}

func TestFactsThatMakeNoSense(t *testing.T) {
	t.Parallel()
	b := setup(t, settle.Options{})
	for name, change := range map[string]func(*settle.Facts){
		"never ended":           func(f *settle.Facts) { f.Receipt.Finished = 0 },
		"never received":        func(f *settle.Facts) { f.Receipt.Received = 0 },
		"negative cached":       func(f *settle.Facts) { f.Usage.CachedTokens = -1 },
		"negative decoded":      func(f *settle.Facts) { f.Usage.DecodeTokens = -1 },
		"more cached than sent": func(f *settle.Facts) { f.Usage.CachedTokens = 8 },
		"no prompt, but cached": func(f *settle.Facts) { f.Receipt.EdgeTokens, f.Usage.CachedTokens = nil, 1 },
	} {
		t.Run(name, func(t *testing.T) {
			f := b.facts()
			change(&f)
			assert.Equal(t, code(t, b.Settle(t.Context(), f)), "evidence_rejected")
		})
	}
	assert.Equal(t, b.count(t, "SELECT count(*) FROM receipt"), 0)
	assert.Equal(t, b.Counts().Rejected, 6)
}

// What the database said is not in the answer, nor is it lost for the log.
func TestCauseIsHidden(t *testing.T) {
	t.Parallel()
	b := setup(t, settle.Options{})
	f := b.facts()
	f.Receipt.Model = "private\x00name"
	err := b.Settle(t.Context(), f)
	assert.Equal(t, pgdb.State(err), "22021")
	assert.False(t, strings.Contains(fmt.Sprintf("%v %+v", err, err), "private"))
	assert.Equal(t, code(t, err), "evidence_rejected")
}

// lost commits and then says that the connection broke.
type lost struct{ pgx.BatchResults }

func (l lost) Close() error {
	if err := l.BatchResults.Close(); err != nil {
		return err
	}
	return errDown
}

type lossy struct {
	pgdb.DB
	once sync.Once
	wait time.Duration
}

func (l *lossy) SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults {
	out := l.DB.SendBatch(ctx, batch)
	l.once.Do(func() { out = lost{out}; time.Sleep(l.wait) })
	return out
}

// The answer to a commit is lost. Within the hold it is written again, which
// changes nothing; after it the receipt cannot be taken back, and is counted.
func TestLostAcknowledgement(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		wait time.Duration
		late uint64
	}{"within the hold": {0, 0}, "after the hold": {400 * time.Millisecond, 1}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t, settle.Options{})
			s := settle.New(settle.Options{DB: &lossy{DB: b.Pools.Settle, wait: c.wait}, Replica: id.NewEpoch(time.Now()), Now: time.Now, HoldFor: 300 * time.Millisecond})
			s.Start()
			f := b.facts()
			err := s.Settle(t.Context(), f)
			assert.Equal(t, err != nil, c.late == 1)
			assert.NoError(t, s.Stop(context.Background()))
			assert.Equal(t, s.Counts().LateAcks, c.late)
			assert.Equal(t, s.Counts().Conflicts, 0)
			assert.Equal(t, b.stored(t, f.Receipt.Request).Outcome, receipt.Completed)
		})
	}
}

func TestRecoverOwnReplica(t *testing.T) {
	t.Parallel()
	me := id.NewEpoch(time.Now())
	s := settle.New(settle.Options{Replica: me, Now: time.Now})
	_, err := s.Recover(t.Context(), me, ended)
	assert.True(t, errors.Is(err, settle.ErrOwnReplica))
}
