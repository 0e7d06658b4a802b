package rpc

import (
	"context"
	"encoding/hex"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"bulkhead.dev/engine/kv"
	operationsv1 "bulkhead.dev/services/gen/bulkhead/operations/v1"
)

type operations struct{ Options }

// ListPages implements the operations service.
func (s *operations) ListPages(ctx context.Context, _ *operationsv1.ListPagesRequest) (*operationsv1.ListPagesResponse, error) {
	out := &operationsv1.ListPagesResponse{}
	for _, m := range s.Workers.PageMaps(ctx) {
		w := &operationsv1.WorkerPages{Epoch: m.Worker.Epoch.String(), Role: string(m.Worker.Role), PageTokens: kv.PageTokens}
		out.Workers = append(out.Workers, w)
		if m.Err != nil {
			w.Error = "the worker did not answer"
			continue
		}
		w.MaxQuarantine = m.Pages.GetMaxQuarantine()
		w.States, w.Owners = map[string]uint32{}, map[string]uint32{}
		for _, r := range m.Pages.GetRuns() {
			w.States[r.GetState()] += r.GetCount()
			if r.GetReferences() > 0 || r.GetState() == kv.StateQuarantined.String() {
				w.Owners[short(r.GetOwner())] += r.GetCount()
			}
			w.Runs = append(w.Runs, &operationsv1.PageRun{
				First: r.GetFirst(), Count: r.GetCount(), State: r.GetState(), Reason: r.GetReason(),
				Owner: short(r.GetOwner()), Lease: short(r.GetLease()), Generation: r.GetGeneration(),
				Since:      timestamppb.New(time.UnixMicro(r.GetSinceUs())),
				References: r.GetReferences(), Readers: r.GetReaders(), Writers: r.GetWriters(), Scrubs: r.GetScrubs(),
			})
		}
	}
	return out, nil
}

// short is the beginning of an id, enough to tell a few apart; nothing for one
// that is not set.
func short(b []byte) string {
	for _, x := range b {
		if x != 0 {
			return hex.EncodeToString(b[:min(len(b), 4)])
		}
	}
	return ""
}
