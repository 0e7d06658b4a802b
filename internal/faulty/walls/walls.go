//go:build faulty

// Package walls takes walls between tenants down, one by one, to show that each
// holds alone and that without any of them data leaks. It exists only with the
// build tag faulty, as do the files that ask it; releases have neither.
package walls

import (
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
)

// Wall is something that keeps data of one tenant from another.
type Wall string

// The walls that this package can take down. Whoever wires the front takes down
// its part of Registration, and the length check at the edge.
const (
	// Registration: a pool that cannot hold the window is not let in.
	Registration Wall = "registration"
	// Manifest: decode commits only what a manifest names and digests prove.
	Manifest Wall = "manifest"
	// Scrub: a page that changes its owner is wiped.
	Scrub Wall = "scrub"
	// Counts: the gateway compares the counts and manifests of both legs.
	Counts Wall = "counts"
	// Recompute: decode recomputes the last position of the prompt.
	Recompute Wall = "recompute"
)

var all = []Wall{Registration, Manifest, Scrub, Counts, Recompute}

var down atomic.Pointer[[]Wall]

// Down reports whether a wall is down. All stand until TakeDown is called.
func Down(w Wall) bool {
	d := down.Load()
	return d != nil && slices.Contains(*d, w)
}

// TakeDown takes down the walls of a comma separated list, and puts up all
// others.
func TakeDown(list string) error {
	var d []Wall
	for name := range strings.SplitSeq(list, ",") {
		if name == "" {
			continue
		}
		if !slices.Contains(all, Wall(name)) {
			return fmt.Errorf("there is no wall %q", name)
		}
		d = append(d, Wall(name))
	}
	down.Store(&d)
	return nil
}
