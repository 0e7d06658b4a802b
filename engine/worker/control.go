package worker

import (
	"context"

	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/worker/peer"
	workerv1 "bulkhead.dev/services/gen/bulkhead/worker/v1"
)

// control serves ControlService.
type control struct{ w *worker }

// Drain implements workerv1connect.ControlServiceHandler. The worker does not
// take work again.
func (c control) Drain(ctx context.Context, _ *workerv1.DrainRequest) (*workerv1.DrainResponse, error) {
	if _, err := peer.Require(ctx, peer.IsGateway); err != nil {
		return nil, c.w.refused(ctx, "drain", names{}, err, measured{})
	}
	select {
	case <-c.w.startDrain():
		return &workerv1.DrainResponse{}, nil
	case <-ctx.Done():
		return nil, c.w.refused(ctx, "drain", names{}, ctx.Err(), measured{})
	}
}

// Pages implements workerv1connect.ControlServiceHandler.
func (c control) Pages(ctx context.Context, _ *workerv1.PagesRequest) (*workerv1.PagesResponse, error) {
	if _, err := peer.Require(ctx, peer.IsGateway); err != nil {
		return nil, c.w.refused(ctx, "pages", names{}, err, measured{})
	}
	out := &workerv1.PagesResponse{MaxQuarantine: uint32(c.w.set.Quarantine)}
	for _, r := range kv.Runs(c.w.pool.Snapshot(nil)) {
		run := &workerv1.PageRun{
			First: r.First, Count: r.Count, State: r.State.String(), Owner: r.Owner[:], Lease: r.Lease[:], Generation: r.Generation,
			SinceUs: r.Since.UnixMicro(), References: uint32(r.Refs), Readers: uint32(r.Readers), Writers: uint32(r.Writers),
			Scrubs: uint64(r.Scrubs),
		}
		if r.State == kv.StateQuarantined {
			run.Reason = r.Reason.String()
		}
		out.Runs = append(out.Runs, run)
	}
	return out, nil
}

// End implements workerv1connect.ControlServiceHandler.
func (c control) End(ctx context.Context, req *workerv1.EndRequest) (*workerv1.EndResponse, error) {
	var n names
	_, err := peer.Require(ctx, peer.IsGateway)
	if err == nil {
		parse(&err, &n.transfer, req.GetTransferId(), "transfer_id")
	}
	var facts *workerv1.LegFacts
	if err == nil {
		facts, err = c.w.calls.wait(ctx, n.transfer)
	}
	if err != nil {
		return nil, c.w.refused(ctx, "end", n, err, measured{})
	}
	return &workerv1.EndResponse{Facts: facts, Quarantined: c.w.quarantined(facts)}, nil
}

// quarantined counts the pages of a leg's facts that are in quarantine.
func (w *worker) quarantined(f *workerv1.LegFacts) (n uint32) {
	for _, e := range f.GetExtents() {
		for i := range e.GetCount() {
			if g := w.pool.Page(e.GetFirst() + i); g.State == kv.StateQuarantined && g.Generation == e.GetGeneration() {
				n++
			}
		}
	}
	return n
}
