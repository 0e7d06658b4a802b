//go:build faulty

package incident

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// alone says in plain words what each wall does on its own.
var alone = map[Wall]string{
	Registration: "The pool holds less than the window and is not let in: no platform, no leak.",
	Edge:         "The edge knows the least that any leg can hold and refuses before a page is touched.",
	Rejection:    "A real prefill worker has no form in which a rejected prompt could go on.",
	Manifest:     "Decode is offered one position in place of the whole prompt, and refuses.",
	Scrub:        "Decode answers out of pages that were wiped: nonsense, but nobody's.",
	Counts:       "The gateway compares its own count with those of the legs, and withholds the answer.",
	Recompute:    "Decode computes the last position again; over wrong pages it differs. A stream has its status 200 by then, but no text.",
}

// Explanation says in plain words what the row shows.
func (row Row) Explanation() string {
	switch {
	case len(row.Up) == 0:
		return "The test sees the leak: HTTP 200, and the text of other tenants in every answer."
	case row.leaky():
		return "Enough room and length checks do not help against a rejection for another reason."
	case row.Remedy:
		return "The operator did what the refusal says (worker.context_window): the edge refuses every one."
	case len(row.Up) == len(Walls):
		return "As released. The platform does not come up with this pool and this window."
	case len(row.Up) == 1:
		return alone[row.Up[0]]
	}
	return "A faulty worker in a real platform. The first wall on the way that can see it stops it."
}

// Header is the head of the table for a cause, which Line continues.
func Header(cause Cause) string {
	about := fmt.Sprintf("Prompts that are too long: window %d tokens, prefill pool %d (in the incident 1,048,576 and 681,280).\n"+
		"The longest prompt that fits has %d tokens, the first that does not has %d.", Window, PoolSize, PoolSize, PoolSize+1)
	if cause == Other {
		about = fmt.Sprintf("Prompts that prefill rejects for another reason: window %d tokens, prefill pool %d, so that every prompt fits.", Window, Window)
	}
	return fmt.Sprintf("%s\n\n"+columns, about, "walls that stand", "rejected", "answered", "refused", "code", "receipts say", "leaks", "bytes",
		"tenants", "found", "normal ok")
}

// columns is the format of a row.
const columns = "%-27v  %8v %8v  %-18v  %-23v  %-18v  %5v %5v %7v %5v  %9v\n"

// Line is a row of the table, with what it shows below.
func (row Row) Line() string {
	explained := "    " + row.Explanation() + "\n"
	if row.PoolRefused != "" {
		return fmt.Sprintf("%-27v  pool refused: %s\n", row.Title(), row.PoolRefused) + explained
	}
	statuses, codes := map[string]int{}, map[string]int{}
	for how, n := range row.Refused {
		status, code, _ := strings.Cut(how, " ")
		statuses[fmt.Sprintf("%d x %s", n, status)]++
		codes[code]++
	}
	return fmt.Sprintf(columns, row.Title(), row.Rejected, row.Answered, list(statuses), list(codes), list(row.Stopped),
		row.Leaks, row.Bytes, len(row.Whose), row.Found, fmt.Sprintf("%d/%d", row.Golden, row.Normal)) + explained
}

// list is the keys of a map.
func list(m map[string]int) string {
	if len(m) == 0 {
		return "-"
	}
	return strings.Join(slices.Sorted(maps.Keys(m)), ", ")
}

// Columns explains the columns.
const Columns = `rejected   prompts that prefill rejects; every second one asks for a stream
answered   of them, with HTTP 200 and text
refused    of them, with which status; code: and which error
receipts   say what stopped them; who is refused at the edge was not admitted and has none
leaks      answers with 8 or more bytes in a row of another tenant
bytes      of other tenants, in all; tenants: how many these are
found      wrong answers that the receipts show: the counts of the legs differ
normal ok  answers to all others that are what they must be, byte by byte
`

// String shows a leak beside the text that it is from.
func (l Leak) String() string {
	return fmt.Sprintf("One of the leaks: tenant %d asked, HTTP 200:\n    %q\nThe text of tenant %d, again and again:\n    %q\n", l.Asker, l.Text, l.Victim, canaries[l.Victim])
}
