package worker

import (
	"time"

	"bulkhead.dev/engine/kv"
	workerv1 "bulkhead.dev/services/gen/bulkhead/worker/v1"
)

// measured is what a leg found out about one request. It becomes the facts of
// an answer and of a refusal alike.
type measured struct {
	tokens    int         // prefill: positions written; decode: positions in verified pages
	cached    int         // prefill: positions of them in remembered pages
	extents   []kv.Extent // pages granted to the lease
	root      []byte      // of the manifest; nil if it did not get that far
	transport string      // decode: how the pages came
	bytes     uint64      // of pages offered or pulled
	compute   time.Duration
	handoff   time.Duration
	queue     time.Duration
	output    int // decode: ids computed
}

func (w *worker) facts(m measured) *workerv1.LegFacts {
	f := &workerv1.LegFacts{
		Epoch: w.set.epoch[:], Tokens: uint32(m.tokens), CachedTokens: uint32(m.cached), ManifestRoot: m.root, HandoffBytes: m.bytes, Transport: m.transport, OutputTokens: uint32(m.output),
		ComputeUs: micros(m.compute), HandoffUs: micros(m.handoff), QueueUs: micros(m.queue),
	}
	for _, e := range m.extents {
		f.Extents = append(f.Extents, &workerv1.Extent{First: e.First, Count: e.Count, Generation: e.Generation, Scrubbed: e.Scrubbed})
	}
	return f
}

// micros is not negative, whatever the clock did.
func micros(d time.Duration) uint64 { return uint64(max(d, 0).Microseconds()) }
