package history_test

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	audit "bulkhead.dev/audit/history"
	"bulkhead.dev/engine/history"
	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/kv/kvtest"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/infra/pgdb/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// record lets a pool live and returns the blocks of its history, and what a
// reader of the events alone knows of each page.
func record(t *testing.T, epoch id.Epoch, seed uint64) (blocks [][]byte, want map[uint32][]audit.Tenure) {
	want = map[uint32][]audit.Tenure{}
	synctest.Test(t, func(t *testing.T) {
		ship := func(_ context.Context, b [][]byte) (uint64, error) {
			blocks = append(blocks, b...)
			return uint64(len(blocks)), nil
		}
		w := history.NewWriter(history.Options{Epoch: epoch, Now: time.Now, Ship: ship, Log: slog.New(slog.DiscardHandler)})
		pool := kvtest.Pool(t, kv.Config{Pages: 12, OnEvent: func(e kv.Event) {
			w.Note(e)
			for page := e.First; page < e.First+e.Count; page++ {
				note(want, page, e, time.Now().UTC())
			}
		}})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- w.Run(ctx) }()
		r := rand.New(rand.NewPCG(seed, 2))
		for range 40 {
			s := kvtest.Sealed(t, pool, kvtest.Owner(1+r.Uint64N(3)), 1+r.IntN(100), 1)
			time.Sleep(time.Duration(r.IntN(300)) * time.Millisecond)
			if r.IntN(3) == 0 { // released while it is read
				ref := kvtest.Refs(s.Extents())[0]
				assert.NoError(t, s.View(ref, func([]byte) error { s.Release(); time.Sleep(time.Millisecond); return nil }))
			}
			s.Release()
		}
		cancel()
		assert.NoError(t, <-done)
	})
	return blocks, want
}

// note is how a reader of the events alone keeps track of a page.
func note(want map[uint32][]audit.Tenure, page uint32, e kv.Event, at time.Time) {
	if n := len(want[page]); n == 0 || want[page][n-1].Generation != e.Generation {
		want[page] = append(want[page], audit.Tenure{Generation: e.Generation, Owner: e.Owner, Lease: e.Lease, FirstSeq: e.Seq})
	}
	t := &want[page][len(want[page])-1]
	t.LastSeq = e.Seq
	switch {
	case e.Kind == kv.EventGrant:
		t.Granted = at
	case e.Kind == kv.EventScrub && e.Method == kv.Ahead:
		t.Ahead = at
	case e.Kind == kv.EventScrub:
		t.AtGrant = at
	case e.Kind == kv.EventSeal:
		t.LastWrite = at
	case e.Kind == kv.EventQuarantine:
		t.Quarantined, t.Reason = at, e.Reason
	case e.Kind == kv.EventFree || e.Kind == kv.EventClear:
		t.Freed = at
	}
}

// What is stored answers who had a page when, exactly as it was.
func TestThePastOfAPage(t *testing.T) {
	t.Parallel()
	s := audit.NewStore(pgtest.New(t).Pools.Settle)
	for seed := range uint64(3) {
		epoch := id.NewEpoch(time.Now())
		blocks, want := record(t, epoch, seed)
		assert.True(t, len(blocks) > 3)
		n, err := s.Append(t.Context(), epoch, blocks)
		assert.NoError(t, err)
		assert.Equal(t, n, uint64(len(blocks)))
		for page := range uint32(12) {
			got, err := s.Of(t.Context(), epoch, page)
			assert.NoError(t, err)
			assert.Equal(t, got.Tenures, want[page])
			for i := 1; i < len(want[page]); i++ {
				before, sure := got.Before(want[page][i].Generation)
				assert.True(t, sure)
				assert.Equal(t, before, want[page][i-1])
			}
		}
	}
	none, err := s.Of(t.Context(), id.NewEpoch(time.Now()), 0)
	assert.NoError(t, err)
	assert.Equal(t, len(none.Tenures), 0)
}

// Delivering again does no harm; delivering something else is refused, and
// leaves what is stored as it is.
func TestAppend(t *testing.T) {
	t.Parallel()
	s := audit.NewStore(pgtest.New(t).Pools.Settle)
	epoch := id.NewEpoch(time.Now())
	blocks, _ := record(t, epoch, 7)
	other, _ := record(t, epoch, 8)
	n, err := s.Append(t.Context(), epoch, blocks[:2])
	assert.NoError(t, err)
	assert.Equal(t, n, uint64(2))
	for name, bs := range map[string][][]byte{
		"left one out":       blocks[3:],
		"another past":       other[:1],
		"another future":     {other[2]},
		"of another worker":  nil,
		"not a block at all": {[]byte("BHKH")},
	} {
		at := epoch
		if bs == nil {
			at, bs = id.NewEpoch(time.Now()), blocks[:1]
		}
		if _, err := s.Append(t.Context(), at, bs); !errors.Is(err, history.ErrBlock) {
			t.Errorf("%s: %v", name, err)
		}
	}
	n, err = s.Append(t.Context(), epoch, blocks)
	assert.NoError(t, err)
	assert.Equal(t, n, uint64(len(blocks)))
	n, err = s.Append(t.Context(), epoch, blocks[1:2])
	assert.NoError(t, err)
	assert.Equal(t, n, uint64(len(blocks)))
}
