package kv

import (
	"errors"
	"fmt"
)

var (
	// ErrStale means that a handle, or a page it names, is not (or no longer)
	// what it was: released, consumed by a later phase, granted again, or
	// another's. Nothing can be done with it.
	ErrStale = errors.New("stale page handle")
	// ErrOpen means that a pass, a receive or a grant is still open on the
	// handle.
	ErrOpen = errors.New("page handle is in use")
	// ErrRange means that positions or pages lie outside what is proven
	// readable, or outside what was granted.
	ErrRange = errors.New("outside the pages of the handle")
	// ErrNoCredit means that a lease has not enough credits left for a grant.
	ErrNoCredit = errors.New("not enough credits")
	// ErrOwner means that no owner was named.
	ErrOwner = errors.New("no owner")
	// ErrCoverage means that the positions found are not exactly those claimed.
	ErrCoverage = errors.New("coverage is not exact")
	// ErrDigest means that a page does not hold the bytes that were offered.
	ErrDigest = errors.New("page digest differs")
	// ErrBusy means that a pool cannot be closed because pages or credits of
	// it are still held.
	ErrBusy = errors.New("pool is in use")
	// ErrCorrupt means that the pool found its own books wrong before. No page
	// of it can be trusted to belong to whom it says.
	ErrCorrupt = errors.New("page pool is corrupt")
	// ErrConfig means that a pool cannot be made as asked.
	ErrConfig = errors.New("bad pool configuration")
)

// ErrExhausted means that a pool cannot promise the wanted pages now. Free is
// what it could have promised.
type ErrExhausted struct{ Want, Free int }

func (e ErrExhausted) Error() string {
	return fmt.Sprintf("pool exhausted: want %d pages, %d can be promised", e.Want, e.Free)
}

// ErrQuarantine means that a pool promises nothing because more pages than it
// may are in quarantine: given up, but still open to somebody who was not yet
// proven to be done or dead.
type ErrQuarantine struct{ Pages, Max int }

func (e ErrQuarantine) Error() string {
	return fmt.Sprintf("%d pages are in quarantine, at most %d may be", e.Pages, e.Max)
}
