package kv

import "fmt"

// State is where a page is in its life.
type State uint8

// The states; doc.go has the picture.
const (
	// StateClean: free, and wiped since it was held, or never held by any owner.
	StateClean State = iota
	// StateDirty: free, with the bytes of its last owner still in it.
	StateDirty
	// StateGranted: belongs to a lease, not yet scrubbed, out of everybody's reach.
	StateGranted
	// StateFilling: its owner's forward passes write it.
	StateFilling
	// StateReading: the fabric writes it; no forward pass can see it.
	StateReading
	// StateSealed: read only, until nobody refers to it.
	StateSealed
	// StateQuarantined: given up by its owner while somebody still had it open.
	StateQuarantined
	// StateScrubbing: free, and being wiped ahead of its next grant.
	StateScrubbing
	numStates
)

var stateNames = [numStates]string{"clean", "dirty", "granted", "filling", "reading", "sealed", "quarantined", "scrubbing"}

func (s State) String() string {
	if s < numStates {
		return stateNames[s]
	}
	return fmt.Sprintf("state(%d)", uint8(s))
}

// Free reports whether a page in this state can be granted.
func (s State) Free() bool { return s == StateClean || s == StateDirty }

// Op is a step that changes the state of a page.
type Op uint8

// The steps.
const (
	OpGrant      Op = iota // draw against credits
	OpFill                 // scrubbed; its owner may compute into it
	OpLand                 // scrubbed; the fabric may write it
	OpSeal                 // complete; no more writes
	OpCommit               // verified; no more writes
	OpAdopt                // verified; decoding writes on in it
	OpFree                 // given back, nobody has it open
	OpQuarantine           // given back, somebody has it open
	OpClear                // the last hold on a quarantined page closed
	OpScrub                // taken out to be wiped
	OpScrubbed             // wiped
	numOps
)

var opNames = [numOps]string{"grant", "fill", "land", "seal", "commit", "adopt", "free", "quarantine", "clear", "scrub", "scrubbed"}

func (o Op) String() string {
	if o < numOps {
		return opNames[o]
	}
	return fmt.Sprintf("op(%d)", uint8(o))
}

// Transition is one row of the state machine.
type Transition struct {
	From State
	Op   Op
	To   State
}

// Transitions returns the whole state machine of a page. The pool does exactly
// these steps and panics on any other.
func Transitions() []Transition {
	return []Transition{
		{StateClean, OpGrant, StateGranted},
		{StateDirty, OpGrant, StateGranted},

		{StateGranted, OpFill, StateFilling},
		{StateGranted, OpLand, StateReading},
		{StateGranted, OpQuarantine, StateQuarantined}, // a scrub is always in flight here

		{StateFilling, OpSeal, StateSealed},
		{StateFilling, OpFree, StateDirty},
		{StateFilling, OpQuarantine, StateQuarantined},

		{StateReading, OpCommit, StateSealed},
		{StateReading, OpAdopt, StateFilling},
		{StateReading, OpFree, StateDirty},
		{StateReading, OpQuarantine, StateQuarantined},

		{StateSealed, OpFree, StateDirty},
		{StateSealed, OpQuarantine, StateQuarantined},

		{StateQuarantined, OpClear, StateDirty},

		{StateDirty, OpScrub, StateScrubbing},
		{StateScrubbing, OpScrubbed, StateClean},
	}
}

const noState = numStates

// next is Transitions as an array; noState where there is no step.
var next = func() (t [numStates][numOps]State) {
	for s := range t {
		for o := range t[s] {
			t[s][o] = noState
		}
	}
	for _, tr := range Transitions() {
		t[tr.From][tr.Op] = tr.To
	}
	return t
}()

// QuarantineReason says why a page could not be freed when it was given back.
type QuarantineReason uint8

// The reasons.
const (
	NotQuarantined QuarantineReason = iota
	// ReaderOpen: a view, a digest, or a forward pass still reads it.
	ReaderOpen
	// WriterOpen: a scrub, the fabric, or a forward pass still writes it.
	WriterOpen
)

func (r QuarantineReason) String() string {
	switch r {
	case NotQuarantined:
		return "not quarantined"
	case ReaderOpen:
		return "reader open"
	case WriterOpen:
		return "writer open"
	}
	return fmt.Sprintf("reason(%d)", uint8(r))
}
