package kv

import (
	"fmt"

	"bulkhead.dev/infra/id"
)

// EventKind is what happened to pages.
type EventKind uint8

// The kinds.
const (
	EventGrant      EventKind = iota + 1 // Owner and Lease hold the pages from here
	EventScrub                           // the pages were wiped for that grant
	EventSeal                            // no forward pass and no fabric writes them any more
	EventFree                            // given back; nobody has them open
	EventQuarantine                      // given back; Reason says who still has them open
	EventClear                           // out of quarantine, free from here
)

func (k EventKind) String() string {
	switch k {
	case EventGrant:
		return "grant"
	case EventScrub:
		return "scrub"
	case EventSeal:
		return "seal"
	case EventFree:
		return "free"
	case EventQuarantine:
		return "quarantine"
	case EventClear:
		return "clear"
	}
	return fmt.Sprintf("event(%d)", uint8(k))
}

// Event is one entry of the page history: something that happened to a run of
// neighboring pages of one grant. Who had a page before is found by looking
// back, not stored.
type Event struct {
	// Seq counts the events of a pool from 1, without gaps.
	Seq          uint64
	Kind         EventKind
	First, Count uint32
	Generation   uint64
	Owner        id.Owner
	Lease        id.Lease
	Reason       QuarantineReason
}

// history collects neighboring pages into one event. It is used under the lock
// of the pool; flush before the lock is left.
type history struct {
	p   *Pool
	cur Event
}

func (h *history) add(kind EventKind, index uint32) {
	if h.p.onEvent == nil {
		return
	}
	pg := &h.p.pages[index]
	e := Event{Kind: kind, First: index, Count: 1, Generation: pg.generation, Owner: pg.owner, Lease: pg.lease, Reason: pg.reason}
	if c := &h.cur; c.Count > 0 && c.Kind == e.Kind && c.First+c.Count == index && c.Generation == e.Generation &&
		c.Owner == e.Owner && c.Lease == e.Lease && c.Reason == e.Reason {
		c.Count++
		return
	}
	h.flush()
	h.cur = e
}

func (h *history) flush() {
	if h.cur.Count == 0 {
		return
	}
	h.p.seq++
	h.cur.Seq = h.p.seq
	h.p.onEvent(h.cur)
	h.cur = Event{}
}
