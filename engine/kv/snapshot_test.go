package kv_test

import (
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
	}
	var got []run
	for _, r := range kv.Runs(pages) {
		got = append(got, run{r.First, r.Count, r.State, r.Since})
	}
	start := now.Add(-time.Second)
	assert.Equal(t, got, []run{
		{0, 2, kv.StateSealed, start}, {2, 1, kv.StateSealed, start}, {3, 1, kv.StateSealed, now}, {4, 1, kv.StateSealed, now},
		{5, 2, kv.StateDirty, now}, {7, 3, kv.StateClean, start},
	})
}
