package sim

import (
	"bytes"
	"sync"

	"bulkhead.dev/engine/kv"
	"bulkhead.dev/infra/id"
)

// track is the ledger of one pool: who has which page by the events, and what
// the simulation has open itself. It knows nothing of the pool's own books.
type track struct {
	w *world

	mu   sync.Mutex
	held map[uint32]kv.Event    // under mu; the grant of each page that is not free
	past map[uint32][2]id.Owner // under mu; the last owner of each page and the one before
	open map[kv.PageRef]int     // under mu; holds of the simulation
	live map[id.Lease]*sequence // under mu; committed sequences
}

func newTrack(w *world) *track {
	return &track{w: w, held: map[uint32]kv.Event{}, past: map[uint32][2]id.Owner{}, open: map[kv.PageRef]int{}, live: map[id.Lease]*sequence{}}
}

// event is called under the lock of the pool.
func (t *track) event(e kv.Event) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := e.First; i < e.First+e.Count; i++ {
		grant, held := t.held[i]
		busy := held && t.open[kv.PageRef{Index: i, Generation: grant.Generation}] > 0
		switch e.Kind {
		case kv.EventGrant:
			if held || busy {
				t.w.fail("page %d is granted to %x while %x has it", i, e.Owner, grant.Owner)
			}
			t.held[i] = e
			t.past[i] = [2]id.Owner{e.Owner, t.past[i][0]}
		case kv.EventFree, kv.EventClear:
			if !held || busy || grant.Generation != e.Generation {
				t.w.fail("page %d generation %d is freed: held %v, open %v", i, e.Generation, held, busy)
			}
			delete(t.held, i)
		case kv.EventSeal, kv.EventQuarantine:
			if !held || grant.Generation != e.Generation || grant.Owner != e.Owner {
				t.w.fail("%v of page %d generation %d, which %x holds", e.Kind, i, e.Generation, grant.Owner)
			}
		}
	}
}

// hold notes that the simulation has pages open until the function returned is
// called. Call both while the pages are open.
func (t *track) hold(refs []kv.PageRef) func() {
	count := func(n int) {
		t.mu.Lock()
		defer t.mu.Unlock()
		for _, r := range refs {
			if t.open[r] += n; t.open[r] == 0 {
				delete(t.open, r)
			}
		}
	}
	count(1)
	return func() { count(-1) }
}

// fresh checks that a page which was just granted, and not written yet, holds
// nothing of another owner.
func (t *track) fresh(r kv.PageRef, page []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	owners := t.past[r.Index]
	if owners[0] != owners[1] && bytes.Count(page, page[:1]) != len(page) {
		t.w.fail("page %d generation %d comes to %x as %x left it", r.Index, r.Generation, owners[0], owners[1])
	}
}

// check compares the ledger with what the pool says.
func (t *track) check(p *kv.Pool) {
	s := p.Stats()
	if s.Clean+s.Dirty+s.Scrubbing+s.Granted+s.Filling+s.Reading+s.Sealed+s.Quarantined != s.Pages || s.Credits < 0 || s.Free < 0 || s.Corrupt {
		t.w.fail("the books of a pool are wrong: %+v", s)
	}
	t.mu.Lock()
	open := make([]kv.PageRef, 0, len(t.open))
	for r := range t.open {
		open = append(open, r)
	}
	t.mu.Unlock()
	for _, r := range open {
		info := p.Page(r.Index)
		if info.Generation == r.Generation && info.Readers+info.Writers > 0 && !info.State.Free() {
			continue
		}
		t.mu.Lock()
		if t.open[r] > 0 { // else it was closed meanwhile
			t.w.fail("page %d generation %d is open, the pool says %+v", r.Index, r.Generation, info)
		}
		t.mu.Unlock()
	}
}

// idle checks that nothing is left.
func (t *track) idle(p *kv.Pool) {
	if s := p.Stats(); s.Free != s.Pages || s.Quarantined != 0 || s.Credits != 0 {
		t.w.fail("pages are held in the end: %+v", s)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.held)+len(t.open)+len(t.live) > 0 {
		t.w.fail("the ledger holds %d pages, %d open, %d sequences in the end", len(t.held), len(t.open), len(t.live))
	}
}
