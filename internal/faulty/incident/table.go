//go:build faulty

package incident

import (
	"fmt"
	"io"
	"slices"
	"strings"
)

// why says in plain words what a row shows.
var why = map[Wall]string{
	Registration: "The pool holds less than the window and is not let in.",
	Edge:         "The edge knows what every leg can hold and refuses the prompt.",
	Rejection:    "What prefill rejects has no form in which it could go on.",
	Manifest:     "Decode is offered one position in place of all, and refuses.",
	Scrub:        "Decode answers out of pages that were wiped: nonsense, but nobody's.",
	Counts:       "The gateway counted the tokens itself, and withholds the answer.",
	Recompute:    "The last position comes out differently over wrong pages.",
}

// Header is the head of the table that Line continues.
func Header() string {
	return fmt.Sprintf("window %d tokens, prefill pool %d (in the incident 1,048,576 and 681,280); the first prompt that does not fit has %d\n\n"+
		"%-32s %9s %9s  %-36s %7s %7s  %s\n", Window, PoolSize, PoolSize+1, "walls that stand", "oversized", "answered", "refused", "leaks", "bytes", "normal as golden")
}

// Line is a row of the table.
func (row Row) Line() string {
	if row.PoolRefused != "" {
		return fmt.Sprintf("%-32s pool refused: %s\n", row.Title(), row.PoolRefused)
	}
	var refused []string
	for what, n := range row.Refused {
		refused = append(refused, fmt.Sprintf("%d x %s", n, what))
	}
	slices.Sort(refused)
	return fmt.Sprintf("%-32s %9d %9d  %-36s %7d %7d  %d of %d\n", row.Title(), row.Oversized, row.Answered, strings.Join(refused, ", "),
		row.Leaks, row.Bytes, row.Golden, row.Normal)
}

// Explain writes what the rows mean.
func Explain(w io.Writer, leak string) {
	fmt.Fprintf(w, "\nAll walls down, a response of tenant %d, HTTP 200:\n    %q\nThe text of tenant %d:\n    %q\n\n", attacker, leak, victim, canary)
	for _, wall := range Walls {
		fmt.Fprintf(w, "(%d) %-16s %s\n", int(wall), wall, why[wall])
	}
}
