package kv_test

import (
	"context"
	"runtime"
	"testing"
	"time"

	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/kv/kvtest"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
)

// unbounded is more than any memory takes in a second.
const unbounded = 1 << 50

// scrubbing runs the scrubber until the test ends.
func scrubbing(t *testing.T, p *kv.Pool, bytesPerSecond int64) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- p.Scrub(ctx, bytesPerSecond) }()
	t.Cleanup(func() {
		cancel()
		assert.NoError(t, <-done)
	})
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); runtime.Gosched() {
		if time.Now().After(end) {
			t.Fatalf("%s: never", what)
		}
	}
}

// Pages that were given back are wiped without anybody asking for them, each
// with a proof, and the next owner need not wait.
func TestScrubAhead(t *testing.T) {
	t.Parallel()
	for _, pattern := range []kv.Pattern{kv.Zero, kv.NaN} {
		var events []kv.Event
		now := time.UnixMilli(1_800_000_000_000)
		p := kvtest.Pool(t, kv.Config{Pages: 70, Pattern: pattern, Now: func() time.Time { return now },
			OnEvent: func(e kv.Event) { events = append(events, e) }})
		scrubbing(t, p, unbounded)
		kept := kvtest.Sealed(t, p, alice, 32, 1)
		kvtest.Sealed(t, p, alice, 68*16, 2).Release()
		eventually(t, "scrubbed", func() bool { return p.Stats().Clean == 68 })
		assert.NoError(t, p.Audit()) // reads every clean page
		st := p.Stats()
		assert.Equal(t, st.ScrubbedAhead, uint64(68))
		assert.Equal(t, st.ScrubbedPages, uint64(68))
		assert.Equal(t, p.Page(2).Scrub, kv.ScrubProof{Generation: 3, At: now, Method: kv.Ahead})
		assert.Equal(t, p.Page(0).Scrub, kv.ScrubProof{}) // in use
		assert.Equal(t, p.Page(0).State, kv.StateSealed)

		// A grant of what was wiped wipes nothing, and the one it scrubs itself
		// says so.
		next := kvtest.Sealed(t, p, bob, 16, 3)
		assert.Equal(t, next.Extents()[0].Scrubbed, uint32(0))
		assert.Equal(t, p.Stats().ScrubbedPages, uint64(68))
		next.Release()
		kept.Release()
		eventually(t, "scrubbed", func() bool { return p.Stats().Clean == 70 })
		for _, e := range events {
			if (e.Kind == kv.EventScrub) != (e.Method == kv.Ahead) {
				t.Fatalf("event %+v", e)
			}
		}
	}
}

// The wipe at a grant remains for what was not wiped ahead, and says so too.
func TestScrubAtGrantHasAProof(t *testing.T) {
	t.Parallel()
	var scrubs []kv.Event
	p := kvtest.Pool(t, kv.Config{Pages: 1, OnEvent: func(e kv.Event) {
		if e.Kind == kv.EventScrub {
			scrubs = append(scrubs, e)
		}
	}})
	kvtest.Sealed(t, p, alice, 16, 1).Release()
	kvtest.Sealed(t, p, bob, 16, 1).Release()
	assert.Equal(t, p.Page(0).Scrub.Generation, uint64(2))
	assert.Equal(t, p.Page(0).Scrub.Method, kv.AtGrant)
	assert.Equal(t, len(scrubs), 1)
	assert.Equal(t, scrubs[0].Method, kv.AtGrant)
	assert.Equal(t, scrubs[0].Owner, bob)
}

// What is promised is not taken away to be wiped, not even for a moment.
func TestScrubLeavesThePromised(t *testing.T) {
	t.Parallel()
	p := kvtest.Pool(t, kv.Config{Pages: 4})
	kvtest.Sealed(t, p, alice, 64, 1).Release()
	every, err := p.Reserve(bob, 4)
	assert.NoError(t, err)
	did, err := p.ScrubOne()
	assert.NoError(t, err)
	assert.False(t, did)
	every.Return()
	c, err := p.Reserve(bob, 3)
	assert.NoError(t, err)
	scrubbing(t, p, unbounded)
	// One after the other is wiped: there is always one to spare.
	eventually(t, "scrubbed", func() bool { return p.Stats().Clean == 4 })
	f, err := c.Fill(id.NewLease())
	assert.NoError(t, err)
	assert.NoError(t, f.Grant(3))
	f.Abort()

	eventually(t, "scrubbed", func() bool { return p.Stats().Clean == 4 })
	all, err := p.Reserve(bob, 4)
	assert.NoError(t, err)
	g, err := all.Fill(id.NewLease())
	assert.NoError(t, err)
	assert.NoError(t, g.Grant(1))
	g2, err := p.Reserve(alice, 1)
	assert.True(t, err != nil && g2 == nil)
	assert.Equal(t, p.Stats().Clean, 3)
	g.Abort()
	eventually(t, "scrubbed after credits came back", func() bool { return p.Stats().Clean == 4 })
}

// The scrubber writes no more than it may.
func TestScrubIsBounded(t *testing.T) {
	t.Parallel()
	p := kvtest.Pool(t, kv.Config{Pages: 16})
	kvtest.Sealed(t, p, alice, 256, 1).Release()
	began := time.Now()
	scrubbing(t, p, int64(p.Geometry().PageBytes())*200) // 5 ms a page
	eventually(t, "scrubbed", func() bool { return p.Stats().Clean == 16 })
	// The first page waits for nothing.
	if took := time.Since(began); took < 15*5*time.Millisecond {
		t.Errorf("16 pages in %v, at 5 ms a page", took)
	}
	assert.ErrorIs(t, p.Scrub(t.Context(), 1), kv.ErrOpen)
	assert.ErrorIs(t, p.Scrub(t.Context(), 0), kv.ErrConfig)
}

// Tenants come and go while the scrubber works; the books stay right and no
// tenant finds anything but wiped pages.
func TestScrubUnderLoad(t *testing.T) {
	t.Parallel()
	p := kvtest.Pool(t, kv.Config{Pages: 24, Pattern: kv.NaN})
	scrubbing(t, p, unbounded)
	loadTenants(t, p, func(b, mark byte) bool { return b == 0xFF || b == 0 || b == mark })
	assert.True(t, p.Stats().ScrubbedAhead > 0)
}

// Too many pages in quarantine close the pool, and say so; it opens again when
// the readers are done.
func TestQuarantineIsCapped(t *testing.T) {
	t.Parallel()
	p := kvtest.Pool(t, kv.Config{Pages: 8, MaxQuarantine: 1})
	a := kvtest.Sealed(t, p, alice, 32, 1)
	refs := kvtest.Refs(a.Extents())
	release := []chan struct{}{make(chan struct{}), make(chan struct{})}
	opened := make(chan struct{})
	done := make(chan error)
	for i, r := range refs {
		go func() {
			done <- a.View(r, func([]byte) error { opened <- struct{}{}; <-release[i]; return nil })
		}()
		<-opened
	}
	a.Release()
	assert.Equal(t, p.Stats().Quarantined, 2)
	_, err := p.Reserve(bob, 1)
	assert.Equal(t, assert.ErrorAs[kv.ErrQuarantine](t, err), kv.ErrQuarantine{Pages: 2, Max: 1})
	close(release[0])
	assert.NoError(t, <-done)
	c, err := p.Reserve(bob, 6) // one page may be in quarantine
	assert.NoError(t, err)
	c.Return()
	close(release[1])
	assert.NoError(t, <-done)
	assert.Equal(t, p.Stats().Free, 8)
}
