package pool

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"slices"
	"sync"
	"time"

	"connectrpc.com/connect"

	"bulkhead.dev/engine/handoff"
	"bulkhead.dev/engine/history"
	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/worker/peer"
	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/id"
	poolv1 "bulkhead.dev/services/gen/bulkhead/pool/v1"
	"bulkhead.dev/services/gen/bulkhead/pool/v1/poolv1connect"
	"bulkhead.dev/services/gen/bulkhead/worker/v1/workerv1connect"
)

const (
	// HeartbeatEvery is how often workers report.
	HeartbeatEvery = 500 * time.Millisecond
	// StaleAfter is how long a worker may be silent before it gets no new
	// requests: four beats, so that one slow collection of garbage is no news.
	StaleAfter = 2 * time.Second
	// RetryAfter is the hint for callers that meet no worker: a restart takes
	// about as long.
	RetryAfter = 2 * time.Second
	// maxGone bounds the memory of epochs that must not come back. At a restart
	// a second it is some hours; the certificate of an epoch lives no longer.
	maxGone = 1 << 14
	// MaxMessage is how large a message to the registration service may be: a
	// delivery of page history and what names its blocks.
	MaxMessage = history.MaxDelivery + 64<<10
)

// ErrEpoch means that a worker claimed an epoch that is not its own, or one
// that is over.
var ErrEpoch = errors.New("worker epoch refused")

// Options wire a registry. All functions are required.
type Options struct {
	Now func() time.Time
	// Client makes the HTTP client for the API of a worker and the base URL to
	// use with it. The client must refuse a peer that does not prove the epoch.
	Client func(address string, role Role, epoch id.Epoch) (*http.Client, string, error)
	// Identity returns the epoch and role that the certificate of the caller
	// names.
	Identity func(ctx context.Context) (id.Epoch, Role, bool)
	// CheckCapacity is the capacity rule of the engine.
	CheckCapacity func(role Role, pages, pageTokens, window int) error
	// History stores blocks of page history and returns the number of the last
	// one stored. An error that is a history.ErrBlock says that they do not fit.
	History func(ctx context.Context, epoch id.Epoch, blocks [][]byte) (uint64, error)
	// Changed is told of each worker that came or went, outside any lock.
	Changed func(w *Worker, gone bool)
}

// Registry keeps the workers. It implements the registration service.
type Registry struct {
	opts Options

	mu      sync.Mutex
	workers map[id.Epoch]*Worker
	gone    map[id.Epoch]bool
	changed chan struct{} // closed and replaced when workers come or go
}

var _ poolv1connect.RegistrationServiceHandler = (*Registry)(nil)

// NewRegistry returns an empty registry.
func NewRegistry(opts Options) *Registry {
	return &Registry{opts: opts, workers: map[id.Epoch]*Worker{}, gone: map[id.Epoch]bool{}, changed: make(chan struct{})}
}

// Register implements the registration service.
func (r *Registry) Register(ctx context.Context, req *poolv1.RegisterRequest) (*poolv1.RegisterResponse, error) {
	w, err := r.parse(ctx, req)
	if err != nil {
		return nil, err
	}
	if err := r.opts.CheckCapacity(w.Role, w.Pages, w.PageTokens, w.Context); err != nil {
		return nil, connect.NewError(connect.CodeFailedPrecondition, err)
	}
	hc, base, err := r.opts.Client(w.Address, w.Role, w.Epoch)
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("worker address: %w", err))
	}
	if w.Role == Prefill {
		w.PrefillClient = workerv1connect.NewPrefillServiceClient(hc, base, connect.WithGRPC(), peer.Unpacked)
	} else {
		w.DecodeClient = workerv1connect.NewDecodeServiceClient(hc, base, connect.WithGRPC(), peer.Unpacked)
	}
	w.ControlClient = workerv1connect.NewControlServiceClient(hc, base, connect.WithGRPC(), peer.Unpacked)
	r.mu.Lock()
	if r.gone[w.Epoch] {
		r.mu.Unlock()
		return nil, connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("%w: %v is over", ErrEpoch, w.Epoch))
	}
	if old := r.workers[w.Epoch]; old != nil { // a repeated registration: the first holds
		old.lastBeat = w.lastBeat
		r.mu.Unlock()
		return &poolv1.RegisterResponse{HeartbeatMs: uint32(HeartbeatEvery.Milliseconds())}, nil
	}
	r.workers[w.Epoch] = w
	r.wake()
	r.mu.Unlock()
	r.opts.Changed(w, false)
	return &poolv1.RegisterResponse{HeartbeatMs: uint32(HeartbeatEvery.Milliseconds())}, nil
}

func (r *Registry) parse(ctx context.Context, req *poolv1.RegisterRequest) (*Worker, error) {
	epoch, role, ok := r.opts.Identity(ctx)
	if !ok {
		return nil, connect.NewError(connect.CodePermissionDenied, errors.New("only a worker may register"))
	}
	claimed, err := id.FromBytes[id.Epoch](req.GetEpoch())
	want := map[poolv1.Role]Role{poolv1.Role_ROLE_PREFILL: Prefill, poolv1.Role_ROLE_DECODE: Decode}[req.GetRole()]
	if err != nil || claimed != epoch || want != role {
		return nil, connect.NewError(connect.CodePermissionDenied, fmt.Errorf("%w: the certificate names %v as %s", ErrEpoch, epoch, role))
	}
	w := &Worker{
		Epoch: epoch, Role: role, Address: req.GetAddress(), FabricAddress: req.GetFabricAddress(),
		PageTokens: int(req.GetPageTokens()), Pages: int(req.GetPages()), Context: int(req.GetContextWindow()),
		Build: req.GetBuild(), CPULevel: req.GetCpuLevel(), PID: int(req.GetPid()),
		Handoff:    handoffVersions(req.GetHandoffVersions()),
		Registered: r.opts.Now(), lastBeat: r.opts.Now(), gone: make(chan struct{}),
	}
	if copy(w.Model[:], req.GetModelDigest()) != 32 || copy(w.Geometry[:], req.GetGeometry()) != 32 ||
		len(req.GetModelDigest()) != 32 || len(req.GetGeometry()) != 32 {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("model digest and geometry have 32 bytes each"))
	}
	if w.PageTokens != kv.PageTokens || w.Pages < 1 || w.Context < 1 || role == Prefill && w.FabricAddress == "" {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("registration lacks pages, context window or page server"))
	}
	return w, nil
}

// handoffVersions reads what a worker speaks. One that says nothing is of the
// time when there was one version.
func handoffVersions(said []uint32) (out []uint16) {
	for _, v := range said {
		if v > 0 && v <= math.MaxUint16 {
			out = append(out, uint16(v))
		}
	}
	if len(said) == 0 {
		out = []uint16{handoff.Whole}
	}
	return out
}

// Heartbeat implements the registration service.
func (r *Registry) Heartbeat(ctx context.Context, req *poolv1.HeartbeatRequest) (*poolv1.HeartbeatResponse, error) {
	epoch, _, ok := r.opts.Identity(ctx)
	if claimed, err := id.FromBytes[id.Epoch](req.GetEpoch()); !ok || err != nil || claimed != epoch {
		return nil, connect.NewError(connect.CodePermissionDenied, ErrEpoch)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	w := r.workers[epoch]
	if w == nil {
		return &poolv1.HeartbeatResponse{}, nil
	}
	wasLive := r.live(w)
	w.lastBeat, w.draining, w.beat = r.opts.Now(), req.GetDraining(), req
	if !wasLive {
		r.wake()
	}
	return &poolv1.HeartbeatResponse{Known: true}, nil
}

// AppendHistory implements the registration service.
func (r *Registry) AppendHistory(ctx context.Context, req *poolv1.AppendHistoryRequest) (*poolv1.AppendHistoryResponse, error) {
	epoch, _, ok := r.opts.Identity(ctx)
	if claimed, err := id.FromBytes[id.Epoch](req.GetEpoch()); !ok || err != nil || claimed != epoch {
		return nil, connect.NewError(connect.CodePermissionDenied, ErrEpoch)
	}
	if n := len(req.GetBlocks()); n > history.MaxPending {
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("%d blocks of page history at once", n))
	}
	stored, err := r.opts.History(ctx, epoch, req.GetBlocks())
	switch {
	case errors.Is(err, history.ErrBlock):
		return nil, connect.NewError(connect.CodeFailedPrecondition, err)
	case err != nil:
		return nil, connect.NewError(connect.CodeUnavailable, errors.New("page history cannot be stored now"))
	}
	return &poolv1.AppendHistoryResponse{Stored: stored}, nil
}

// Lost says that a worker is dead, which the caller has proof of: it reaped the
// process. Requests on it are told, and its epoch is never accepted again.
func (r *Registry) Lost(epoch id.Epoch) {
	r.mu.Lock()
	if len(r.gone) >= maxGone {
		clear(r.gone)
	}
	r.gone[epoch] = true
	w := r.workers[epoch]
	delete(r.workers, epoch)
	if w != nil {
		close(w.gone)
		r.wake()
	}
	r.mu.Unlock()
	if w != nil {
		r.opts.Changed(w, true)
	}
}

// Pick chooses the two legs for a model. The error is an *apperr.Error that
// tells the caller when to try again.
func (r *Registry) Pick(model [32]byte) (Pair, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var best Pair
	var load int64
	for _, p := range r.workers {
		if p.Role != Prefill || p.Model != model || !r.live(p) || p.draining {
			continue
		}
		for _, d := range r.workers {
			if d.Role != Decode || d.Model != model || d.Geometry != p.Geometry || !r.live(d) || d.draining {
				continue
			}
			version := handoff.Common(p.Handoff, d.Handoff)
			if n := p.inflight.Load() + d.inflight.Load(); version > 0 && (best.Prefill == nil || n < load) {
				best, load = Pair{Prefill: p, Decode: d, Handoff: version}, n
			}
		}
	}
	if best.Prefill == nil {
		return Pair{}, apperr.New(apperr.Unavailable, "no_workers", "No workers are ready for this model; they may be restarting.").WithRetryAfter(RetryAfter)
	}
	best.Prefill.inflight.Add(1)
	best.Decode.inflight.Add(1)
	return best, nil
}

// EffectiveContext returns the token positions that every leg of the model can
// hold: the least over its window and the pools of all live workers. It is 0
// when no worker is live.
func (r *Registry) EffectiveContext(model [32]byte) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	least := 0
	for _, w := range r.workers {
		if w.Model != model || !r.live(w) {
			continue
		}
		if n := min(w.Context, w.Capacity()); least == 0 || n < least {
			least = n
		}
	}
	return least
}

// WaitReady returns when a pair for the model is live.
func (r *Registry) WaitReady(ctx context.Context, model [32]byte) error {
	for {
		r.mu.Lock()
		changed := r.changed
		r.mu.Unlock()
		if pair, err := r.Pick(model); err == nil {
			pair.Release()
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("wait for workers: %w", context.Cause(ctx))
		}
	}
}

// Worker returns a worker that is not known to be dead, nil if there is none of
// that epoch.
func (r *Registry) Worker(epoch id.Epoch) *Worker {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.workers[epoch]
}

// Workers returns what is known of each worker, ordered by epoch.
func (r *Registry) Workers() []Status {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []Status
	for _, w := range r.workers {
		out = append(out, Status{Worker: w, Live: r.live(w), Draining: w.draining, InFlight: w.inflight.Load(), Heartbeat: w.beat})
	}
	slices.SortFunc(out, func(a, b Status) int { return slices.Compare(a.Worker.Epoch[:], b.Worker.Epoch[:]) })
	return out
}

// live is called with mu held.
func (r *Registry) live(w *Worker) bool { return r.opts.Now().Sub(w.lastBeat) < StaleAfter }

// wake is called with mu held.
func (r *Registry) wake() {
	close(r.changed)
	r.changed = make(chan struct{})
}
