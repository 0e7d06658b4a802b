package pool

import (
	"encoding/hex"
	"sync/atomic"
	"time"

	"bulkhead.dev/infra/id"
	poolv1 "bulkhead.dev/services/gen/bulkhead/pool/v1"
	"bulkhead.dev/services/gen/bulkhead/worker/v1/workerv1connect"
)

// Role is the leg that a worker serves.
type Role string

// The legs.
const (
	Prefill Role = "prefill"
	Decode  Role = "decode"
)

// Worker is one run of a worker process. Its exported fields do not change
// after registration.
type Worker struct {
	Epoch         id.Epoch
	Role          Role
	Address       string // worker API, "unix:/path" or "tcp:host:port"
	FabricAddress string // page server, prefill only
	Model         [32]byte
	Geometry      [32]byte
	PageTokens    int
	Pages         int
	Context       int // tokens, from the model file
	Build         string
	CPULevel      string
	PID           int
	Handoff       []uint16 // versions of the hand-off that it speaks
	Registered    time.Time

	// PrefillClient or DecodeClient is set, by role.
	PrefillClient workerv1connect.PrefillServiceClient
	DecodeClient  workerv1connect.DecodeServiceClient
	ControlClient workerv1connect.ControlServiceClient

	inflight atomic.Int64
	gone     chan struct{} // closed by Registry.Lost

	// Under Registry.mu.
	lastBeat time.Time
	draining bool
	beat     *poolv1.HeartbeatRequest // the last one, nil before the first
}

// Gone closes when the worker is known to be dead.
func (w *Worker) Gone() <-chan struct{} { return w.gone }

// Capacity returns the token positions that the pool of the worker holds.
func (w *Worker) Capacity() int { return w.Pages * w.PageTokens }

// Pair is the two legs that serve a request. Call Release once it is over.
type Pair struct {
	Prefill *Worker
	Decode  *Worker
	// Handoff is the best version of the hand-off that both speak.
	Handoff uint16
}

// Release says that the request no longer uses the pair.
func (p Pair) Release() {
	p.Prefill.inflight.Add(-1)
	p.Decode.inflight.Add(-1)
}

// Status is what the registry knows of a worker, for people and metrics.
type Status struct {
	Worker    *Worker
	Live      bool
	Draining  bool
	InFlight  int64
	Heartbeat *poolv1.HeartbeatRequest // nil before the first
}

// ModelText returns the digest of the model in the form "sha256:…".
func (w *Worker) ModelText() string { return "sha256:" + hex.EncodeToString(w.Model[:]) }
