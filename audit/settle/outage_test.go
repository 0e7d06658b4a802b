package settle_test

import (
	"context"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"bulkhead.dev/audit"
	"bulkhead.dev/audit/receipt"
	"bulkhead.dev/audit/settle"
	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/infra/pgdb"
	"bulkhead.dev/infra/pgdb/pgtest"
	"bulkhead.dev/infra/pgembed"
)

// Requests settle while the server goes away and comes back. Afterwards each is
// there exactly once, and the receipt says what its caller was told: completed
// where Settle returned nil, withheld where the hold ended first.
func TestServerGoesAwayAndComesBack(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*pgembed.Server) error{
		"fast shutdown": (*pgembed.Server).Close,
		"crash": func(s *pgembed.Server) error {
			// SIGQUIT ends every process of the server at once, without a
			// checkpoint; the next start recovers from the log.
			if err := syscall.Kill(s.PID(), syscall.SIGQUIT); err != nil {
				return err
			}
			<-s.Done()
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := pgtest.Dir(t)
			o := pgembed.Options{Dir: filepath.Join(dir, "pg"), RunDir: filepath.Join(dir, "run"), Bin: pgtest.Bin(t),
				Password: pgtest.Password, Volatile: true}
			server, err := pgembed.Start(t.Context(), o)
			assert.NoError(t, err)
			src := pgtest.Source(server, "postgres")
			_, _, err = pgdb.Migrate(t.Context(), src)
			assert.NoError(t, err)
			pools, err := pgdb.Open(t.Context(), src, pgdb.DefaultSizes)
			assert.NoError(t, err)
			defer pools.Close()
			b := &bundle{Bundle: &pgtest.Bundle{Source: src, Pools: pools}, tenant: id.NewTenant(time.Now())}
			const hold = 400 * time.Millisecond
			b.Settler = settle.New(settle.Options{DB: pools.Settle, Replica: id.NewEpoch(time.Now()), Now: time.Now, HoldFor: hold})
			b.Start()

			// Ten callers settle one request after another until told to stop.
			var (
				mu   sync.Mutex
				told = map[id.Request]error{} // under mu
				wg   sync.WaitGroup
				quit = make(chan struct{})
			)
			for range 10 {
				wg.Go(func() {
					for {
						select {
						case <-quit:
							return
						default:
						}
						f := b.facts()
						b.Intend(settle.Intent{Request: f.Receipt.Request, Tenant: b.tenant, Project: f.Receipt.Project, Key: f.Receipt.Key, Created: time.Now()})
						err := b.Settle(context.Background(), f)
						mu.Lock()
						told[f.Receipt.Request] = err
						mu.Unlock()
					}
				})
			}
			time.Sleep(100 * time.Millisecond)
			assert.NoError(t, end(server))
			time.Sleep(3 * hold)
			assert.True(t, b.Ready() != nil) // behind for more than a hold: nothing new is admitted
			server, err = pgembed.Start(t.Context(), o)
			assert.NoError(t, err)
			defer server.Close()
			for b.Counts().Queued > 10 { // what was kept is written before we stop
				time.Sleep(10 * time.Millisecond)
			}
			time.Sleep(100 * time.Millisecond)
			close(quit)
			wg.Wait()
			ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
			defer cancel()
			assert.NoError(t, b.Stop(ctx)) // nothing is left

			counts, withheld := b.Counts(), 0
			reader := audit.NewReader(pools.App)
			for request, err := range told {
				s, errGet := reader.Get(t.Context(), b.tenant, request)
				assert.NoError(t, errGet)
				r, errDecode := receipt.Decode(s.Body)
				assert.NoError(t, errDecode)
				if err == nil {
					assert.Equal(t, r.Outcome, receipt.Completed)
					continue
				}
				withheld++
				assert.Equal(t, assert.ErrorAs[*apperr.Error](t, err).Code, "evidence_unavailable")
				if counts.LateAcks == 0 { // see the package comment for the one exception
					assert.True(t, r.Withheld && r.Outcome == receipt.Withheld)
				}
			}
			assert.True(t, withheld > 0 && withheld < len(told)) // both sides of the outage took part
			assert.Equal(t, counts.Withheld, uint64(withheld))
			assert.Equal(t, counts.Conflicts, 0)
			assert.Equal(t, counts.Rejected, 0)
			// Exactly once, and no intent is left behind.
			for _, sql := range []string{"SELECT count(*) FROM receipt", "SELECT count(*) FROM usage", "SELECT count(DISTINCT request_id) FROM receipt"} {
				assert.Equal(t, b.count(t, sql), len(told))
			}
			assert.Equal(t, b.count(t, "SELECT count(*) FROM intent"), 0)
		})
	}
}

// Stop writes what is queued, and says so when it cannot.
func TestStop(t *testing.T) {
	t.Parallel()
	b := setup(t, settle.Options{HoldFor: time.Minute, Linger: time.Minute})
	f := b.facts()
	var err error
	var wg sync.WaitGroup
	wg.Go(func() { err = b.Settle(t.Context(), f) })
	for b.Counts().Queued == 0 {
		time.Sleep(time.Millisecond)
	}
	soon, stop := context.WithTimeout(t.Context(), 20*time.Second)
	defer stop()
	assert.NoError(t, b.Stop(soon)) // does not wait for the minute
	wg.Wait()
	assert.NoError(t, err)
	b.stored(t, f.Receipt.Request)
	assert.Equal(t, assert.ErrorAs[*apperr.Error](t, b.Settle(t.Context(), b.facts())).Code, "evidence_unavailable")
	assert.True(t, b.Ready() != nil)

	down := setup(t, settle.Options{HoldFor: time.Minute})
	down.db.down.Store(true)
	wg.Go(func() { err = down.Settle(t.Context(), down.facts()) })
	for down.Counts().Queued == 0 {
		time.Sleep(time.Millisecond)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	assert.True(t, down.Stop(ctx) != nil) // one request is left
	wg.Wait()
	assert.Equal(t, assert.ErrorAs[*apperr.Error](t, err).Code, "evidence_unavailable")
}
