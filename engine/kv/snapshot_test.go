package kv_test

import (
	"slices"
	"testing"
	"time"

	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/kv/kvtest"
	"bulkhead.dev/infra/assert"
)

// The map of a pool is what is asked of each page, joined where it is alike.
func TestSnapshot(t *testing.T) {
	t.Parallel()
	now := time.UnixMilli(1_800_000_000_000)
	p := kvtest.Pool(t, kv.Config{Pages: 10, Now: func() time.Time { return now }})
	a := kvtest.Sealed(t, p, alice, 48, 1) // two grants: 0-1 and 2
	now = now.Add(time.Second)
	b := kvtest.Sealed(t, p, bob, 32, 1)
	kvtest.Sealed(t, p, bob, 32, 1).Release()
	defer a.Release()
	defer b.Release()
	pages := p.Snapshot(make([]kv.PageInfo, 3))
	assert.Equal(t, len(pages), 10)
	for i, g := range pages {
		assert.Equal(t, g, p.Page(uint32(i)))
	}
	type run struct {
		First, Count uint32
		State        kv.State
		Since        time.Time
		Scrubs       int
	}
	var got []run
	for _, r := range kv.Runs(pages) {
		got = append(got, run{r.First, r.Count, r.State, r.Since, r.Scrubs})
	}
	start := now.Add(-time.Second)
	assert.Equal(t, got, []run{
		{0, 2, kv.StateSealed, start, 0}, {2, 1, kv.StateSealed, start, 0}, {3, 1, kv.StateSealed, now, 0}, {4, 1, kv.StateSealed, now, 0},
		{5, 2, kv.StateDirty, now, 0}, {7, 3, kv.StateClean, start, 0},
	})

	// What bob left is wiped for the next owner; a page that is read when it goes is
	// in quarantine, alone.
	c := kvtest.Sealed(t, p, kvtest.Owner(3), 80, 1)
	scrubs := 0
	for _, r := range kv.Runs(p.Snapshot(nil)) {
		scrubs += r.Scrubs
	}
	assert.Equal(t, scrubs, 2)
	assert.NoError(t, c.View(kvtest.Refs(c.Extents())[0], func([]byte) error {
		c.Release()
		i := slices.IndexFunc(kv.Runs(p.Snapshot(nil)), func(r kv.Run) bool { return r.State == kv.StateQuarantined })
		r := kv.Runs(p.Snapshot(nil))[i]
		assert.Equal(t, r.Count, 1)
		assert.Equal(t, r.Reason, kv.ReaderOpen)
		assert.Equal(t, r.Readers, 1)
		assert.Equal(t, r.Refs, 0)
		return nil
	}))
}
