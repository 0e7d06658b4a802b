package history_test

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"

	audit "bulkhead.dev/audit/history"
	"bulkhead.dev/engine/history"
	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/kv/kvtest"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/infra/pgdb"
	"bulkhead.dev/infra/pgdb/pgtest"
)

const (
	pages = 40
	// burst is more than a writer keeps; the rest of it is lost.
	burst = 4*history.MaxEvents + 300
)

// world makes up the life of a pool and remembers all of it.
type world struct {
	t      *testing.T
	r      *rand.Rand
	now    time.Time
	w      *history.Writer
	blocks [][]byte
	all    []history.Event
	lost   [][2]uint64
	gen    uint64
	held   map[uint32]kv.Event // by first page
	queue  []kv.Event          // what follows
}

func newWorld(t *testing.T, epoch id.Epoch, seed uint64) *world {
	x := &world{t: t, r: rand.New(rand.NewPCG(seed, 3)), now: time.UnixMicro(1_800_000_000_000_000).UTC(), held: map[uint32]kv.Event{}}
	x.w = history.NewWriter(history.Options{Epoch: epoch, Now: func() time.Time { return x.now }, Log: slog.New(slog.DiscardHandler),
		Ship: func(_ context.Context, b [][]byte) (uint64, error) {
			x.blocks = append(x.blocks, b...)
			return uint64(len(x.blocks)), nil
		}})
	return x
}

// note makes n events and then cuts them into blocks.
func (x *world) note(n int) {
	for i := range n {
		x.now = x.now.Add(time.Duration(x.r.IntN(3000)) * time.Microsecond)
		e := x.next()
		e.Seq = uint64(len(x.all) + 1)
		x.w.Note(e)
		x.all = append(x.all, history.Event{Event: e, At: x.now})
		if i == 4*history.MaxEvents {
			x.lost = append(x.lost, [2]uint64{e.Seq, e.Seq + uint64(n-i-1)})
		}
	}
	ctx, cancel := context.WithCancel(x.t.Context())
	cancel()
	assert.NoError(x.t, x.w.Run(ctx))
}

// next grants a run of four pages, or a part of one, or goes on with one.
func (x *world) next() kv.Event {
	if len(x.queue) > 0 {
		e := x.queue[0]
		x.queue = x.queue[1:]
		return e
	}
	first := 4 * x.r.Uint32N(pages/4)
	if e, ok := x.held[first]; ok {
		delete(x.held, first)
		free := with(e, kv.EventFree)
		if x.r.IntN(4) == 0 {
			q := with(e, kv.EventQuarantine)
			q.Reason = kv.ReaderOpen
			x.queue, free = append(x.queue, with(e, kv.EventClear)), q
		}
		if x.r.IntN(3) == 0 {
			wiped := with(e, kv.EventScrub)
			wiped.Method = kv.Ahead
			x.queue = append(x.queue, wiped)
		}
		return free
	}
	x.gen++
	e := kv.Event{Kind: kv.EventGrant, First: first, Count: 1 + x.r.Uint32N(4), Generation: x.gen, Owner: kvtest.Owner(1 + x.r.Uint64N(5)), Lease: id.NewLease()}
	x.held[first] = e
	wiped := with(e, kv.EventScrub)
	wiped.Method = kv.AtGrant
	x.queue = append(x.queue, wiped, with(e, kv.EventSeal))
	return e
}

func with(e kv.Event, k kv.EventKind) kv.Event { e.Kind = k; return e }

// kept is what of the life of a page is not lost.
func (x *world) kept(page uint32) map[uint32][]audit.Tenure {
	want := map[uint32][]audit.Tenure{}
	for _, e := range x.all {
		gone := slices.ContainsFunc(x.lost, func(g [2]uint64) bool { return e.Seq >= g[0] && e.Seq <= g[1] })
		if page >= e.First && page < e.First+e.Count && !gone {
			note(want, page, e.Event, e.At)
		}
	}
	return want
}

// truth is who was granted a page, lost events included.
func (x *world) truth(page uint32) (out []kv.Event) {
	for _, e := range x.all {
		if e.Kind == kv.EventGrant && page >= e.First && page < e.First+e.Count {
			out = append(out, e.Event)
		}
	}
	return out
}

func (x *world) store(s *audit.Store, epoch id.Epoch) {
	x.t.Helper()
	for b := range slices.Chunk(x.blocks, history.MaxPending) {
		_, err := s.Append(x.t.Context(), epoch, b)
		assert.NoError(x.t, err)
	}
}

// What lies between two grants is found from either side, whatever the blocks,
// and never claimed where something was lost.
func TestLookups(t *testing.T) {
	t.Parallel()
	s := audit.NewStore(pgtest.New(t).Pools.Settle)
	for seed, bursts := range []int{0, 0, 1} {
		epoch := id.NewEpoch(time.Now())
		x := newWorld(t, epoch, uint64(seed))
		for i := range 60 {
			n := 1 + x.r.IntN(40)
			if i == 30 && bursts > 0 {
				n = burst
			}
			x.note(n)
		}
		x.store(s, epoch)
		link, err := s.Verify(t.Context(), epoch)
		assert.NoError(t, err)
		assert.Equal(t, link.LastSeq, uint64(len(x.all)))
		unsure, nobody := 0, 0
		for page := uint32(0); page < pages; page += 3 {
			want, grants := x.kept(page)[page], x.truth(page)
			last := min(len(grants), 8)
			for i, g := range append(slices.Clone(grants[:last]), grants[max(last, len(grants)-8):]...) {
				if i >= last {
					i += max(last, len(grants)-8) - last
				}
				p, err := s.Grant(t.Context(), epoch, page, g.Generation)
				assert.NoError(t, err)
				before, sure := p.Before(g.Generation)
				k := slices.IndexFunc(want, func(t audit.Tenure) bool { return t.Generation == g.Generation })
				if k < 0 { // its beginning, at least, is lost
					assert.False(t, sure)
					continue
				}
				if n := len(p.Tenures); want[k].Granted.IsZero() || n < 1 || p.Tenures[n-1] != want[k] {
					assert.Equal(t, p.Tenures[max(n-1, 0):], want[k:k+1])
				}
				if !sure {
					unsure++
					continue
				}
				if i == 0 {
					nobody++
					assert.Equal(t, before, audit.Tenure{})
					continue
				}
				assert.Equal(t, before, want[k-1])
				assert.Equal(t, before.Generation, grants[i-1].Generation)
				assert.Equal(t, before.Owner, grants[i-1].Owner)
			}
			if bursts == 0 {
				x.between(s, epoch, page, want)
			}
		}
		assert.Equal(t, unsure > 0, bursts > 0)
		assert.True(t, nobody > 0)
	}
	p, err := s.Grant(t.Context(), id.NewEpoch(time.Now()), 0, 1)
	assert.NoError(t, err)
	_, sure := p.Before(1)
	assert.False(t, sure) // not there yet is not "never"
}

// between compares look-ups by time with a plain walk over everything.
func (x *world) between(s *audit.Store, epoch id.Epoch, page uint32, all []audit.Tenure) {
	t := x.t
	first := x.all[0].At
	span := x.now.Sub(first)
	for range 6 {
		from := first.Add(time.Duration(x.r.Int64N(int64(span)*5/4)) - span/8)
		to := from.Add(time.Duration(x.r.Int64N(int64(span / 4))))
		past, err := s.Between(t.Context(), epoch, page, from, to)
		assert.NoError(t, err)
		seen := map[uint32][]audit.Tenure{}
		for _, e := range x.all {
			if page >= e.First && page < e.First+e.Count && !e.At.After(to) {
				note(seen, page, e.Event, e.At)
			}
		}
		var want []audit.Tenure
		for i, one := range seen[page] {
			next := i+1 < len(seen[page]) && seen[page][i+1].Granted.Before(from)
			if !next && (one.Freed.IsZero() || !one.Freed.Before(from)) {
				want = append(want, one)
			}
		}
		if !slices.Equal(past.Tenures, want) {
			assert.Equal(t, past.Tenures, want)
		}
		assert.True(t, len(want) <= len(all))
	}
}

// A look-up opens the blocks that can matter and no others; what it opens it
// compares with the hash, and a whole history is compared with itself.
func TestChangedHistory(t *testing.T) {
	t.Parallel()
	b := pgtest.New(t)
	s, admin := audit.NewStore(b.Pools.Settle), b.Admin(t)
	epoch := id.NewEpoch(time.Now())
	x := newWorld(t, epoch, 9)
	for range 60 {
		x.note(12)
	}
	x.store(s, epoch)
	page := uint32(1)
	grants := x.truth(page)
	g := grants[len(grants)/2]
	want, err := s.Grant(t.Context(), epoch, page, g.Generation)
	assert.NoError(t, err)
	assert.Equal(t, len(want.Tenures), 2)
	change := func(sql string, args ...any) {
		t.Helper()
		_, err := admin.Exec(t.Context(), sql, append([]any{[16]byte(epoch)}, args...)...)
		assert.NoError(t, err)
	}
	restore := func() {
		change("DELETE FROM page_history WHERE epoch = $1")
		x.store(s, epoch)
		_, err := s.Verify(t.Context(), epoch)
		assert.NoError(t, err)
	}
	// Blocks about other pages, or of other times, cannot be read at all.
	change("UPDATE page_history SET body = '' WHERE epoch = $1 AND NOT (first_seq <= $2 AND last_seq >= $3 AND $4 BETWEEN min_page AND max_page)",
		int64(want.Tenures[1].LastSeq)+200, int64(want.Tenures[0].FirstSeq), int64(page))
	got, err := s.Grant(t.Context(), epoch, page, g.Generation)
	assert.NoError(t, err)
	assert.Equal(t, got, want)
	_, err = s.Of(t.Context(), epoch, page)
	assert.True(t, errors.Is(err, history.ErrBlock))

	for name, sql := range map[string]string{
		"another block in its place": "UPDATE page_history SET body = (SELECT body FROM page_history WHERE epoch = $1 AND number = 3) WHERE epoch = $1 AND number <> 3",
		"a block taken away":         "DELETE FROM page_history WHERE epoch = $1 AND number = 5",
		"the first taken away":       "DELETE FROM page_history WHERE epoch = $1 AND number = 1",
		"hidden from its pages":      "UPDATE page_history SET min_page = 1000, max_page = 1000 WHERE epoch = $1 AND number = 4",
		"hidden from its time":       "UPDATE page_history SET first_at = now(), last_at = now() WHERE epoch = $1 AND number = 4",
		"hidden from its grants":     "UPDATE page_history SET granted = 0 WHERE epoch = $1 AND number = 4",
		"another hash":               "UPDATE page_history SET hash = prev WHERE epoch = $1 AND number = 4",
		"a body that is none":        "UPDATE page_history SET body = substr(body, 2) WHERE epoch = $1 AND number = 4",
	} {
		restore()
		change(sql)
		if _, err := s.Verify(t.Context(), epoch); !errors.Is(err, history.ErrBlock) {
			t.Errorf("%s: %v", name, err)
		}
		if name == "another block in its place" {
			_, err := s.Of(t.Context(), epoch, page)
			assert.True(t, errors.Is(err, history.ErrBlock))
		}
	}
	restore()
	// A history that goes on can only grow: the role has no right to change it.
	for _, sql := range []string{"UPDATE page_history SET number = number", "DELETE FROM page_history"} {
		_, err := b.Pools.Settle.Exec(t.Context(), sql)
		assert.True(t, err != nil)
	}
}

// slowDB counts who waits for it, and then fails.
type slowDB struct {
	pgdb.DB
	in  atomic.Int32
	out chan struct{}
}

func (d *slowDB) Begin(context.Context) (pgx.Tx, error) {
	d.in.Add(1)
	defer d.in.Add(-1)
	<-d.out
	return nil, errors.New("down")
}

// However many workers deliver at once, receipts keep a connection.
func TestOneDeliveryAtATime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := &slowDB{out: make(chan struct{})}
		s := audit.NewStore(db)
		done := make(chan error, 3)
		for range 3 {
			go func() {
				_, err := s.Append(t.Context(), id.Epoch{1}, nil)
				done <- err
			}()
		}
		for range 3 {
			synctest.Wait()
			assert.Equal(t, db.in.Load(), 1)
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			_, err := s.Append(ctx, id.Epoch{2}, nil)
			assert.ErrorIs(t, err, context.DeadlineExceeded)
			cancel()
			db.out <- struct{}{}
			assert.True(t, <-done != nil)
		}
	})
}
