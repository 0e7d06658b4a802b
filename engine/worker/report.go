package worker

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"

	"bulkhead.dev/engine/fabric"
	"bulkhead.dev/engine/history"
	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/worker/peer"
	poolv1 "bulkhead.dev/services/gen/bulkhead/pool/v1"
	"bulkhead.dev/services/gen/bulkhead/pool/v1/poolv1connect"
)

const (
	// retryMin and retryMax bound the pause before the front is tried again.
	// It may start later than its workers.
	retryMin = 50 * time.Millisecond
	retryMax = 2 * time.Second
	// callTimeout bounds one call to the front.
	callTimeout = 5 * time.Second
	// beatMin and beatMax bound the pause between reports, whatever the front
	// says.
	beatMin = 50 * time.Millisecond
	beatMax = time.Minute
)

// reporter makes the worker known to the front and reports what it counts.
type reporter struct {
	w        *worker
	l        leg
	register *poolv1.RegisterRequest
}

// connectFront makes the client of the front, and what records the life of pages
// through it.
func (w *worker) connectFront() (err error) {
	if w.frontHTTP, err = peer.NewClient(w.set.Front, w.set.Credentials, peer.IsGateway); err != nil {
		return fmt.Errorf("front: %w", err)
	}
	w.front = poolv1connect.NewRegistrationServiceClient(w.frontHTTP, peer.BaseURL, peer.Unpacked)
	w.history = history.NewWriter(history.Options{Epoch: w.set.epoch, Now: w.now, Log: w.log, Ship: func(ctx context.Context, blocks [][]byte) (uint64, error) {
		resp, err := w.front.AppendHistory(ctx, &poolv1.AppendHistoryRequest{Epoch: w.set.epoch[:], Blocks: blocks})
		if err != nil && connect.CodeOf(err) == connect.CodeFailedPrecondition {
			return 0, fmt.Errorf("%w: %w", history.ErrBlock, err)
		}
		return resp.GetStored(), err
	}})
	return nil
}

func (w *worker) newReporter(l leg, api, pages net.Listener) *reporter {
	fingerprint := w.pool.Geometry().Fingerprint()
	r := &poolv1.RegisterRequest{
		Epoch: w.set.epoch[:], Role: poolv1.Role_ROLE_DECODE, Address: fabric.Address(api),
		ModelDigest: w.set.digest[:], Geometry: fingerprint[:], PageTokens: kv.PageTokens,
		Pages: uint32(w.set.Pages), ContextWindow: uint32(w.window),
		Build: w.set.build(), CpuLevel: w.level, Pid: uint32(os.Getpid()),
	}
	for _, v := range w.set.handoff {
		r.HandoffVersions = append(r.HandoffVersions, uint32(v))
	}
	if pages != nil {
		r.Role, r.FabricAddress = poolv1.Role_ROLE_PREFILL, fabric.Address(pages)
	}
	return &reporter{w: w, l: l, register: r}
}

// run registers and reports until ctx ends. An error means that the front does
// not want this worker.
func (r *reporter) run(ctx context.Context) error {
	for ctx.Err() == nil {
		every, err := r.announce(ctx)
		if err != nil {
			return err
		}
		r.report(ctx, every)
	}
	return nil
}

// announce registers, again and again while the front is out of reach.
func (r *reporter) announce(ctx context.Context) (time.Duration, error) {
	for pause := retryMin; ; pause = min(2*pause, retryMax) {
		cctx, cancel := context.WithTimeout(ctx, callTimeout)
		resp, err := r.w.front.Register(cctx, r.register)
		cancel()
		if err == nil {
			r.w.log.InfoContext(ctx, "registered")
			return min(max(time.Duration(resp.GetHeartbeatMs())*time.Millisecond, beatMin), beatMax), nil
		}
		if ctx.Err() != nil {
			return 0, nil //nolint:nilerr // it failed because the worker ends
		}
		if unwanted(err) {
			return 0, fmt.Errorf("register: %w", err)
		}
		r.w.log.WarnContext(ctx, "front is out of reach", "error", err)
		if !sleep(ctx, pause) {
			return 0, nil
		}
	}
}

// unwanted reports whether the front was reached and said no.
func unwanted(err error) bool {
	if _, ok := errors.AsType[*connect.Error](err); !ok || !connect.IsWireError(err) {
		return false
	}
	switch connect.CodeOf(err) {
	case connect.CodeFailedPrecondition, connect.CodePermissionDenied, connect.CodeInvalidArgument, connect.CodeUnauthenticated:
		return true
	}
	return false
}

// report sends heartbeats until the front does not know the worker any more.
func (r *reporter) report(ctx context.Context, every time.Duration) {
	for {
		cctx, cancel := context.WithTimeout(ctx, callTimeout)
		resp, err := r.w.front.Heartbeat(cctx, r.beat())
		cancel()
		switch {
		case err == nil && !resp.GetKnown():
			return
		case err != nil && ctx.Err() == nil:
			r.w.log.WarnContext(ctx, "heartbeat failed", "error", err)
		}
		if !sleep(ctx, every) {
			return
		}
	}
}

// beat reports the live counters.
func (r *reporter) beat() *poolv1.HeartbeatRequest {
	w := r.w
	st := w.pool.Stats()
	waiting, running := w.gate.Counts()
	b := &poolv1.HeartbeatRequest{
		Epoch: w.set.epoch[:], Queued: uint32(waiting), Running: uint32(running), Draining: w.draining.Load(),
		GrantedPages: st.GrantedPages, ScrubbedPages: st.ScrubbedPages, ScrubbedAhead: st.ScrubbedAhead, HandoffBytes: w.handoffBytes.Load(),
		CachedPages: uint32(st.CachedPages), MaxQuarantine: uint32(st.MaxQuarantine), CachedTokens: st.CacheHits * kv.PageTokens,
	}
	for _, c := range []struct {
		state kv.State
		n     int
	}{
		{kv.StateClean, st.Clean},
		{kv.StateDirty, st.Dirty},
		{kv.StateScrubbing, st.Scrubbing},
		{kv.StateGranted, st.Granted},
		{kv.StateFilling, st.Filling},
		{kv.StateReading, st.Reading},
		{kv.StateSealed, st.Sealed},
		{kv.StateQuarantined, st.Quarantined},
	} {
		b.Pages = append(b.Pages, &poolv1.PageCount{State: c.state.String(), Pages: uint32(c.n)})
	}
	if w.set.Role == peer.Prefill {
		b.PrefillTokens = r.l.tokens()
	} else {
		b.DecodeTokens = r.l.tokens()
	}
	for reason, n := range w.refusals.snapshot() {
		b.Refusals = append(b.Refusals, &poolv1.RefusalCount{Reason: string(reason), Count: n})
	}
	slices.SortFunc(b.Refusals, func(a, b *poolv1.RefusalCount) int { return strings.Compare(a.GetReason(), b.GetReason()) })
	return b
}

// sleep waits and reports whether ctx is still alive.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
