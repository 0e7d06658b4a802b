package gateway

import (
	"time"

	"bulkhead.dev/audit/receipt"
	"bulkhead.dev/engine/pool"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/tenancy"

	workerv1 "bulkhead.dev/services/gen/bulkhead/worker/v1"
)

// record gathers what is known about one admitted request. It has digests of
// the answer, never the answer.
type record struct {
	principal   tenancy.Principal
	req         Request
	prep        *prepared
	pair        pool.Pair
	replica     id.Epoch
	admitted    time.Time
	committedAt time.Time
	firstByte   time.Time
	prefill     *workerv1.LegFacts
	decode      *workerv1.LegFacts
	prefillEnd  ended // of a request that did not end well
	decodeEnd   ended
	hasher      *receipt.Hasher
	output      int // ids received from decode
	finish      string
}

// ended is what a leg said when it was asked whether it is done.
type ended struct {
	asked, acknowledged bool
	facts               *workerv1.LegFacts
	quarantined         uint32
}

// last is what a leg measured: what it said in the end, if it did.
func (e ended) last(before *workerv1.LegFacts) *workerv1.LegFacts {
	if e.facts != nil {
		return e.facts
	}
	return before
}

// decoded is how many ids the decode leg computed, as far as it said.
func (r *record) decoded() int64 {
	return int64(max(r.decodeEnd.last(r.decode).GetOutputTokens(), uint32(r.output)))
}

// delta takes in a piece of the answer.
func (r *record) delta(d *workerv1.Delta) {
	r.output += len(d.GetIds())
	r.hasher.IDs(d.GetIds())
	r.hasher.Text(d.GetText())
}

// finishes is the list of ends that a leg may report, with what the client is
// told. Anything else is no end of an answer but a failure (an abort that
// passes for "length" is a known way to leak).
var finishes = map[string]string{"eos": "stop", "stop_string": "stop", "max_tokens": "length"}

// finished takes in the end of the answer. It returns a failure when decode
// claims what it did not do.
func (r *record) finished(f *workerv1.Finished, maxOutput int) *failure {
	if f.GetFacts() != nil {
		r.decode = f.GetFacts()
	}
	want, ok := finishes[f.GetDetail()]
	switch {
	case !ok || want != f.GetFinishReason():
		return &failure{leg: legDecode, reason: reasonFinish}
	case int(f.GetOutputTokens()) != r.output || r.output > maxOutput:
		return &failure{leg: legDecode, reason: reasonOutput}
	case want == "length" && r.output != maxOutput:
		return &failure{leg: legDecode, reason: reasonOutput}
	}
	r.finish = want
	return nil
}

// cached is the number of prompt tokens that were not computed for this request.
// No worker can say more than it has computed in all.
func (r *record) cached() int {
	f := r.prefillEnd.last(r.prefill)
	return int(min(f.GetCachedTokens(), f.GetTokens()))
}

// billable is the number of prompt tokens to meter: what prefill computed.
func (r *record) billable() int { return int(r.prefillEnd.last(r.prefill).GetTokens()) }

// receipt makes the receipt of a request that ended with f, nil for well.
func (r *record) receipt(outcome receipt.Outcome, f *failure, now time.Time) receipt.Receipt {
	edge := uint32(len(r.prep.ids))
	out := receipt.Receipt{
		Version: receipt.Version,
		Request: r.req.ID, Tenant: r.principal.Tenant, Project: r.principal.Project, Key: r.principal.Key,
		Model: r.prep.model.Name, ModelDigest: r.prep.model.Digest, Surface: r.req.Surface, Streamed: r.req.Streamed,
		Received: receipt.At(r.req.Received), Admitted: receipt.At(r.admitted), Committed: receipt.At(r.committedAt),
		FirstByte: receipt.At(r.firstByte), Finished: receipt.At(now),
		EdgeTokens: &edge,
		Prefill:    leg(r.pair.Prefill, r.prefill, r.prefillEnd),
		Decode:     leg(r.pair.Decode, r.decode, r.decodeEnd),
		Output:     uint32(r.output), MaxOutput: uint32(r.prep.maxOutput),
		Outcome: outcome, Finish: r.finish, Isolation: receipt.Shared, Replica: r.replica,
	}
	out.Transport = r.decode.GetTransport()
	if r.output > 0 || outcome == receipt.Completed {
		out.Response = r.hasher.Response()
	}
	if f != nil {
		out.Refusal = &receipt.Refusal{Leg: f.leg, Reason: f.reason}
	}
	return out
}

// leg takes the measurements of a worker into a receipt. A leg that never said
// anything still names the worker that was asked.
func leg(w *pool.Worker, f *workerv1.LegFacts, e ended) *receipt.Leg {
	l := &receipt.Leg{Worker: w.Epoch, Build: w.Build, Unacknowledged: e.asked && !e.acknowledged, Quarantined: e.quarantined}
	f = e.last(f)
	if f == nil {
		return l
	}
	tokens := f.GetTokens()
	l.Tokens = &tokens
	copy(l.ManifestRoot[:], f.GetManifestRoot())
	l.Cached = f.GetCachedTokens()
	l.HandoffBytes, l.ComputeUS, l.HandoffUS, l.QueueUS = f.GetHandoffBytes(), f.GetComputeUs(), f.GetHandoffUs(), f.GetQueueUs()
	for _, e := range f.GetExtents() {
		l.Extents = append(l.Extents, receipt.Extent{First: e.GetFirst(), Count: e.GetCount(), Generation: e.GetGeneration(), Scrubbed: e.GetScrubbed()})
	}
	return l
}
