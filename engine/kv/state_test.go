package kv_test

import (
	"fmt"
	"testing"

	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/kv/kvtest"
	"bulkhead.dev/infra/assert"
)

// The pool does exactly the steps of the table, and panics on all others.
func TestTransitionsAreTheCode(t *testing.T) {
	t.Parallel()
	allowed := map[string]kv.State{}
	for _, tr := range kv.Transitions() {
		key := fmt.Sprint(tr.From, tr.Op)
		_, twice := allowed[key]
		assert.False(t, twice)
		allowed[key] = tr.To
	}
	for from := kv.StateClean; from <= kv.StateScrubbing; from++ {
		for op := kv.OpGrant; op <= kv.OpScrubbed; op++ {
			p, err := kv.New(kv.Config{Geometry: kvtest.Geometry(), Pages: 1})
			assert.NoError(t, err)
			p.SetState(0, from)
			to, ok := allowed[fmt.Sprint(from, op)]
			panicked := func() (r any) {
				defer func() { r = recover() }()
				p.Step(0, op)
				return nil
			}()
			if (panicked == nil) != ok {
				t.Fatalf("%v %v: in the table %v, panic %v", from, op, ok, panicked)
			}
			if ok {
				assert.Equal(t, p.Page(0).State, to)
			}
		}
	}
}

// No state is a trap, and none is unreachable.
func TestTransitionsConnect(t *testing.T) {
	t.Parallel()
	reach := func(start kv.State) map[kv.State]bool {
		seen := map[kv.State]bool{start: true}
		for range 10 {
			for _, tr := range kv.Transitions() {
				if seen[tr.From] {
					seen[tr.To] = true
				}
			}
		}
		return seen
	}
	assert.Equal(t, len(reach(kv.StateClean)), 8)
	for s := kv.StateClean; s <= kv.StateScrubbing; s++ {
		assert.True(t, reach(s)[kv.StateDirty])
	}
	// The walls: what is computed by others is read by passes only after a
	// commit, and a free page is touched only after a grant.
	for _, tr := range kv.Transitions() {
		if tr.From == kv.StateReading && (tr.To == kv.StateFilling || tr.To == kv.StateSealed) {
			assert.True(t, tr.Op == kv.OpAdopt || tr.Op == kv.OpCommit)
		}
		if tr.From.Free() {
			assert.True(t, tr.To == kv.StateGranted || tr.To == kv.StateScrubbing)
		}
		if tr.From == kv.StateScrubbing {
			assert.Equal(t, tr.To, kv.StateClean)
		}
	}
}
