package worker

import (
	"fmt"

	"bulkhead.dev/engine/worker/peer"
)

// CapacityError means that the KV pool of a leg cannot hold one request that
// fills the context window. Such a worker would have to refuse requests that the
// platform accepts, so it is not let in.
type CapacityError struct {
	Role       peer.Role
	Pages      int // usable pages of the pool
	PageTokens int // token positions of a page
	Window     int // context window of the model, tokens
}

// Need returns the pages that the window takes.
func (e *CapacityError) Need() int { return pagesFor(e.Window, e.PageTokens) }

func (e *CapacityError) Error() string {
	return fmt.Sprintf("the %s pool holds %d token positions (%d pages of %d), less than the context window of %d tokens: "+
		"give the worker at least %d pages (%d tokens), or serve a smaller window",
		e.Role, e.Pages*e.PageTokens, e.Pages, e.PageTokens, e.Window, e.Need(), e.Need()*e.PageTokens)
}

// CheckCapacity is the one capacity rule of the platform, for every leg, at
// registration and at every start: usable pages times page tokens must be at
// least the context window, rounded up to pages. The pool has no null page and
// keeps no page back; a quarantined page is on loan until its last reader ends.
// The error is a *CapacityError.
func CheckCapacity(role peer.Role, pages, pageTokens, window int) error {
	if pages < 1 || pageTokens < 1 || window < 1 || pages < pagesFor(window, pageTokens) {
		return &CapacityError{Role: role, Pages: pages, PageTokens: pageTokens, Window: window}
	}
	return nil
}

// pagesFor rounds up without overflow for any window.
func pagesFor(window, pageTokens int) int {
	if pageTokens < 1 || window < 1 {
		return 0
	}
	return (window-1)/pageTokens + 1
}
