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
	EventScrub                           // the pages were wiped; Method says when
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
	// Method says how a scrub came about; NotScrubbed with every other kind.
	Method ScrubMethod
}

// ScrubMethod is how a page came to be wiped.
type ScrubMethod uint8

// The methods.
const (
	NotScrubbed ScrubMethod = iota
	// AtGrant: between the grant to a new owner, whose generation the event has,
	// and the first use.
	AtGrant
	// Ahead: while the page was free, after the grant whose generation the event
	// has and before any other.
	Ahead
)

func (m ScrubMethod) String() string {
	switch m {
	case NotScrubbed:
		return "not scrubbed"
	case AtGrant:
		return "at grant"
	case Ahead:
		return "ahead"
	}
	return fmt.Sprintf("method(%d)", uint8(m))
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
	if kind == EventScrub {
		e.Method = pg.scrub.Method
	}
	if c := &h.cur; c.Count > 0 && c.First+c.Count == index {
		if e.First, e.Count, e.Seq = c.First, c.Count, c.Seq; e == *c { // alike but for the place
			c.Count++
			return
		}
		e.First, e.Count = index, 1
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
