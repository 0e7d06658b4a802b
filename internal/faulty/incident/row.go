//go:build faulty

package incident

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Cause is why prefill rejects prompts.
type Cause int

// The causes of the matrix.
const (
	// TooLong is that of the incident: the prompt does not fit the pool.
	TooLong Cause = iota
	// Other is any reason that only prefill knows. The pool is as large as the
	// window, as after the repair of the incident.
	Other
)

// Case is one platform of the matrix.
type Case struct {
	Cause Cause
	Up    []Wall
	// Remedy means that the operator did what the refused registration says:
	// serve no larger window than the pool holds.
	Remedy bool
}

// Row is what happened in a case.
type Row struct {
	Case
	// PoolRefused is why no platform came up, "" if one did.
	PoolRefused string

	Rejected int            // prompts that prefill rejects
	Answered int            // of them, with HTTP 200
	Refused  map[string]int // of them, by status and code
	Stopped  map[string]int // of them, by reason, as receipts say
	Partial  int            // of the refused, with text in front of the error

	Leaks int          // answers with text of another tenant in them
	Bytes int          // of it
	Whose map[int]bool // the tenants whose text it is
	Found int          // answers whose receipts show that the legs had different prompts
	Leak  Leak         // one of the leaks

	Normal int // requests of other tenants before and meanwhile
	Golden int // of them, answered as they must be
}

// Leak is an answer with text of another tenant in it.
type Leak struct {
	Asker, Victim int
	Text          string
}

func (c Case) stands(w Wall) bool { return slices.Contains(c.Up, w) }

// Title says which walls stand.
func (c Case) Title() string {
	var down []Wall
	for _, w := range Walls {
		if !c.stands(w) {
			down = append(down, w)
		}
	}
	switch {
	case len(c.Up) == 0:
		return "none"
	case len(down) == 0 && c.Remedy:
		return "all, smaller window"
	case len(down) == 0:
		return "all"
	case len(down) == 1:
		return "all but " + down[0].numbered()
	}
	out := make([]string, len(c.Up))
	for i, w := range c.Up {
		out[i] = w.numbered()
	}
	return strings.Join(out, " ")
}

// leaky reports whether the walls that stand cannot hold: without any, and
// where only walls about the length stand against another cause.
func (c Case) leaky() bool {
	return !slices.ContainsFunc(c.Up, func(w Wall) bool { return c.Cause == TooLong || w != Registration && w != Edge })
}

// poolRefused reports whether the platform must not come up.
func (c Case) poolRefused() bool { return c.Cause == TooLong && c.stands(Registration) && !c.Remedy }

// refusal is what must have become of every rejected prompt: the status and code
// for an answer in one piece and for a stream, and the reason in the receipt.
// All are "" where prompts are answered.
func (c Case) refusal() (whole, streamed, reason string) {
	same := func(status, reason string) (string, string, string) { return status, status, reason }
	switch {
	case c.leaky() || c.poolRefused():
		return same("", "")
	case c.Cause == TooLong && c.stands(Edge):
		return same("400 context_length_exceeded", "") // not admitted: there is no receipt
	case c.Cause == TooLong && c.stands(Rejection):
		return same("503 server_is_overloaded", "exhausted")
	case c.stands(Rejection):
		return same("400 context_length_exceeded", "context_length")
	case c.stands(Manifest):
		return same("500 response_withheld", "coverage")
	case c.stands(Counts):
		return same("500 response_withheld", "counts_differ")
	case c.stands(Recompute):
		// The status of a stream leaves with the proof of the hand-off; the last
		// position is computed after it, before any text.
		return "500 response_withheld", "200 response_withheld", "recompute_mismatch"
	}
	return same("", "")
}

// Check returns how the row differs from what must be.
func (row Row) Check() error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("walls that stand: %s: %s", row.Title(), fmt.Sprintf(format, args...))
	}
	switch {
	case row.poolRefused():
		if !strings.Contains(row.PoolRefused, fmt.Sprint(PoolSize)) || !strings.Contains(row.PoolRefused, fmt.Sprint(Window)) {
			return bad("the pool was not refused with both numbers: %q", row.PoolRefused)
		}
		return nil
	case row.PoolRefused != "":
		return bad("the pool was refused: %s", row.PoolRefused)
	case row.Normal == 0 || row.Golden != row.Normal:
		return bad("%d of %d normal answers are what they must be", row.Golden, row.Normal)
	case row.Found != row.Answered:
		return bad("receipts show %d of %d wrong answers", row.Found, row.Answered)
	case row.leaky():
		if row.Rejected == 0 || row.Leaks != row.Rejected || len(row.Whose) != min(victims, row.Rejected) {
			return bad("%d of %d responses leaked, of %d tenants: the test does not show what it should", row.Leaks, row.Rejected, len(row.Whose))
		}
		return nil
	case row.Leaks != 0 || row.Bytes != 0:
		return bad("%d responses leaked, for example %q", row.Leaks, row.Leak.Text)
	}
	whole, streamed, reason := row.refusal()
	answered := row.Rejected
	want, why := map[string]int{}, map[string]int{}
	if whole != "" {
		answered = 0
		want[whole] += row.Rejected - row.Rejected/2
		want[streamed] += row.Rejected / 2
	}
	if reason != "" {
		why[reason] = row.Rejected
	}
	if row.Answered != answered || !maps.Equal(row.Refused, want) || !maps.Equal(row.Stopped, why) || row.Partial != 0 {
		return bad("of %d, %d were answered, %v refused, stopped by %v, %d with text; want %d, %v, %v, 0", row.Rejected, row.Answered, row.Refused,
			row.Stopped, row.Partial, answered, want, why)
	}
	return nil
}
