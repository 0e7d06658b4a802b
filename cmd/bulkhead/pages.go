package main

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	operationsv1 "bulkhead.dev/services/gen/bulkhead/operations/v1"
	"bulkhead.dev/services/gen/bulkhead/operations/v1/operationsv1connect"
)

type pagesCmd struct {
	remote
	Worker string `help:"Only workers whose role or epoch begins so."`
	State  string `enum:",clean,dirty,scrubbing,granted,filling,reading,sealed,quarantined" default:"" help:"Only pages in this state: clean, dirty, scrubbing, granted, filling, reading, sealed or quarantined."`
	Owner  string `help:"Only pages of the owner whose tag begins so."`
	JSON   bool   `help:"Print JSON."`
}

// Run prints the live page maps.
func (c *pagesCmd) Run(ctx context.Context, e *env) error {
	key, err := c.key(e, true)
	if err != nil {
		return err
	}
	client := operationsv1connect.NewOperationsServiceClient(http.DefaultClient, c.URL, bearer(key))
	res, err := client.ListPages(ctx, &operationsv1.ListPagesRequest{})
	if err != nil {
		return say(c.URL, err)
	}
	res.Workers = slices.DeleteFunc(res.Workers, func(w *operationsv1.WorkerPages) bool {
		return !strings.HasPrefix(w.GetRole(), c.Worker) && !strings.HasPrefix(w.GetEpoch(), c.Worker)
	})
	for _, w := range res.GetWorkers() {
		w.Runs = slices.DeleteFunc(w.Runs, func(r *operationsv1.PageRun) bool {
			return c.State != "" && r.GetState() != c.State || !strings.HasPrefix(r.GetOwner(), c.Owner)
		})
	}
	if c.JSON {
		b, err := protojson.MarshalOptions{Multiline: true, EmitDefaultValues: true}.Marshal(res)
		if err != nil {
			return fmt.Errorf("encode the answer: %w", err)
		}
		fmt.Fprintln(e.stdout, string(b))
		return nil
	}
	for _, w := range res.GetWorkers() {
		fmt.Fprintf(e.stdout, "%s %s: %s\n", w.GetRole(), w.GetEpoch(), total(w))
		c.table(e, w)
	}
	return nil
}

// total is one line about the whole pool.
func total(w *operationsv1.WorkerPages) string {
	if w.GetError() != "" {
		return w.GetError()
	}
	pages := uint32(0)
	for _, n := range w.GetStates() {
		pages += n
	}
	out := fmt.Sprintf("%d pages of %d tokens; %s", pages, w.GetPageTokens(), counts(w.GetStates()))
	if w.GetMaxQuarantine() > 0 {
		out += fmt.Sprintf("; at most %d in quarantine", w.GetMaxQuarantine())
	}
	if len(w.GetOwners()) > 0 {
		out += "; held by " + counts(w.GetOwners())
	}
	return out
}

// counts lists the largest first.
func counts(m map[string]uint32) string {
	names := make([]string, 0, len(m))
	for n := range m {
		names = append(names, n)
	}
	slices.SortFunc(names, func(a, b string) int { return cmp.Or(cmp.Compare(m[b], m[a]), strings.Compare(a, b)) })
	for i, n := range names {
		names[i] = fmt.Sprintf("%d %s", m[n], n)
	}
	return strings.Join(names, ", ")
}

func (c *pagesCmd) table(e *env, w *operationsv1.WorkerPages) {
	if len(w.GetRuns()) == 0 {
		return
	}
	t := tabwriter.NewWriter(e.stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "  PAGES\tSTATE\tOWNER\tLEASE\tGENERATION\tAGE\tREFS\tREADERS\tWRITERS\tSCRUBS\tREASON")
	for _, r := range w.GetRuns() {
		pages := fmt.Sprint(r.GetFirst())
		if r.GetCount() > 1 {
			pages += fmt.Sprintf("-%d", r.GetFirst()+r.GetCount()-1)
		}
		fmt.Fprintf(t, "  %s\t%s\t%s\t%s\t%d\t%v\t%d\t%d\t%d\t%d\t%s\n", pages, r.GetState(), r.GetOwner(), r.GetLease(), r.GetGeneration(),
			time.Since(r.GetSince().AsTime()).Round(time.Millisecond), r.GetReferences(), r.GetReaders(), r.GetWriters(), r.GetScrubs(), r.GetReason())
	}
	_ = t.Flush()
}
