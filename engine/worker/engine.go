package worker

import (
	"time"

	"bulkhead.dev/engine/compute"
	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/model"
	"bulkhead.dev/engine/model/gguf"
	"bulkhead.dev/engine/model/tokenizer"
	"bulkhead.dev/engine/sched"
	"bulkhead.dev/engine/sim"
)

// engine is what computes: a *compute.Model, or a *sim.Model in its place.
type engine interface {
	sched.Forwarder
	Geometry() kv.Geometry
	Level() string
	Close() error
}

// load makes the engine that the boot document names.
func (s settings) load(f *gguf.File, l *model.Llama, rows int) (engine, error) {
	if s.Backend != Simulated {
		return compute.Load(l, compute.Options{Backend: s.Backend, Level: s.CPULevel, Threads: s.Threads, DType: s.dtype, MaxRows: rows})
	}
	tok, err := tokenizer.FromGGUF(f)
	if err != nil {
		return nil, err
	}
	return sim.New(sim.Options{
		Vocab: l.Config.Vocab, Context: l.Config.Context, DType: s.dtype, Sleep: time.Sleep,
		Piece: func(id int32) ([]byte, bool) { return tok.Piece(id), !tok.IsControl(id) && !tok.IsEOG(id) },
		Latency: sim.Latency{
			PromptToken: time.Duration(s.Sim.PromptToken), Step: time.Duration(s.Sim.Step), Sequence: time.Duration(s.Sim.Sequence),
		},
	})
}

// build is what the worker calls itself, in the registry and in receipts: nobody
// shall take a simulated answer for one that was computed.
func (b Boot) build() string {
	if b.Backend == Simulated {
		return b.Build + " (simulated)"
	}
	return b.Build
}
