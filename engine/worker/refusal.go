package worker

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"connectrpc.com/connect"

	"bulkhead.dev/engine/handoff"
	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/sched"
	"bulkhead.dev/engine/worker/peer"
	workerv1 "bulkhead.dev/services/gen/bulkhead/worker/v1"
)

// Reason says why a leg did not do what was asked. The list is closed: receipts,
// metrics and alarms are built on it.
type Reason string

// The reasons of a worker. Those of package handoff are reasons too, under the
// same names.
const (
	// The request itself.
	BadRequest    Reason = "bad_request"    // a field is malformed or out of range
	ContextLength Reason = "context_length" // prompt and output exceed the window
	WrongPeer     Reason = "wrong_peer"     // the caller may not do this
	WrongModel    Reason = "wrong_model"    // this worker has other weights

	// Admission. Nothing was granted; trying again later can help.
	QueueFull         Reason = "queue_full"         // no slot, and the queue is full
	TenantConcurrency Reason = "tenant_concurrency" // the owner has as many requests as it may
	Exhausted         Reason = "exhausted"          // more pages than the pool has
	QuarantineFull    Reason = "quarantine_full"    // too many pages are in quarantine
	Draining          Reason = "draining"           // the worker takes no new work
	Stopped           Reason = "stopped"            // the worker ended before the work had

	// The other side.
	Canceled          Reason = "canceled"           // the caller went away
	DeadlineExceeded  Reason = "deadline"           // the deadline of the call passed
	OfferTimeout      Reason = "offer_timeout"      // no offer of the prefill leg in time
	OfferWithdrawn    Reason = "offer_withdrawn"    // the prefill leg went away while its pages were read
	SlowConsumer      Reason = "slow_consumer"      // the text was not taken
	DecodeUnreachable Reason = "decode_unreachable" // the offer could not be delivered
	WrongRoot         Reason = "wrong_root"         // decode acknowledged another manifest

	// Evidence that something is wrong. No text leaves.
	NotFinite         Reason = "not_finite"         // a step gave a NaN or an infinity
	RecomputeMismatch Reason = "recompute_mismatch" // the last prompt position does not recompute
	ComputeFailed     Reason = "compute_failed"     // the forward pass failed
	PagesRefused      Reason = "pages_refused"      // the pool refused the pages of a live lease
	Internal          Reason = "internal"           // none of the above
)

// codes maps every reason to a Connect code.
var codes = map[Reason]connect.Code{
	BadRequest:    connect.CodeInvalidArgument,
	ContextLength: connect.CodeInvalidArgument,
	WrongPeer:     connect.CodePermissionDenied,
	WrongModel:    connect.CodeFailedPrecondition,

	QueueFull:         connect.CodeResourceExhausted,
	TenantConcurrency: connect.CodeResourceExhausted,
	Exhausted:         connect.CodeResourceExhausted,
	QuarantineFull:    connect.CodeResourceExhausted,
	Draining:          connect.CodeUnavailable,
	Stopped:           connect.CodeUnavailable,

	Canceled:          connect.CodeCanceled,
	DeadlineExceeded:  connect.CodeDeadlineExceeded,
	OfferTimeout:      connect.CodeDeadlineExceeded,
	OfferWithdrawn:    connect.CodeUnavailable,
	SlowConsumer:      connect.CodeAborted,
	DecodeUnreachable: connect.CodeUnavailable,
	WrongRoot:         connect.CodeDataLoss,

	NotFinite:         connect.CodeDataLoss,
	RecomputeMismatch: connect.CodeDataLoss,
	ComputeFailed:     connect.CodeInternal,
	PagesRefused:      connect.CodeInternal,
	Internal:          connect.CodeInternal,

	Reason(handoff.BadManifest):   connect.CodeDataLoss,
	Reason(handoff.WrongTransfer): connect.CodeFailedPrecondition,
	Reason(handoff.WrongRequest):  connect.CodeFailedPrecondition,
	Reason(handoff.WrongNonce):    connect.CodeFailedPrecondition,
	Reason(handoff.WrongOwner):    connect.CodeFailedPrecondition,
	Reason(handoff.WrongEpoch):    connect.CodeFailedPrecondition,
	Reason(handoff.WrongGeometry): connect.CodeFailedPrecondition,
	Reason(handoff.WrongTokens):   connect.CodeDataLoss,
	Reason(handoff.WrongVersion):  connect.CodeFailedPrecondition,
	Reason(handoff.WrongPreview):  connect.CodeDataLoss,
	Reason(handoff.Coverage):      connect.CodeDataLoss,
	Reason(handoff.Digest):        connect.CodeDataLoss,
	Reason(handoff.Generation):    connect.CodeDataLoss,
	Reason(handoff.Replay):        connect.CodeFailedPrecondition,
	Reason(handoff.Fabric):        connect.CodeUnavailable,
}

// Code returns the Connect code of a reason.
func (r Reason) Code() connect.Code {
	if c, ok := codes[r]; ok {
		return c
	}
	return connect.CodeInternal
}

// RefusalOf returns the refusal that an error of a worker call carries.
func RefusalOf(err error) (*workerv1.Refusal, bool) {
	ce, ok := errors.AsType[*connect.Error](err)
	if !ok {
		return nil, false
	}
	for _, d := range ce.Details() {
		if v, err := d.Value(); err == nil {
			if r, ok := v.(*workerv1.Refusal); ok {
				return r, true
			}
		}
	}
	return nil, false
}

// refusal is an error whose reason is known.
type refusal struct {
	reason Reason
	err    error
}

func (r *refusal) Error() string { return string(r.reason) + ": " + r.err.Error() }
func (r *refusal) Unwrap() error { return r.err }

func refuse(reason Reason, format string, args ...any) *refusal {
	return &refusal{reason, fmt.Errorf(format, args...)}
}

// reasons maps the errors of the packages below. The first that matches counts.
var reasons = []struct {
	err    error
	reason Reason
}{
	{sched.ErrQueueFull, QueueFull},
	{sched.ErrOwnerLimit, TenantConcurrency},
	{sched.ErrDraining, Draining},
	{sched.ErrStopped, Stopped},
	{sched.ErrCanceled, Canceled},
	{sched.ErrSlowConsumer, SlowConsumer},
	{sched.ErrNotFinite, NotFinite},
	{sched.ErrRecompute, RecomputeMismatch},
	{sched.ErrModel, ComputeFailed},
	{sched.ErrPages, PagesRefused},
	{sched.ErrRequest, BadRequest},
	{handoff.ErrRoot, WrongRoot},
	{handoff.ErrWithdrawn, Canceled},
	{kv.ErrOwner, BadRequest},
	{context.Canceled, Canceled},
	{context.DeadlineExceeded, DeadlineExceeded},
}

func reasonOf(err error) Reason {
	if r, ok := errors.AsType[*refusal](err); ok {
		return r.reason
	}
	if r, ok := errors.AsType[*handoff.Refusal](err); ok {
		return Reason(r.Reason)
	}
	if _, ok := errors.AsType[*sched.TooLargeError](err); ok {
		return Exhausted
	}
	if _, ok := errors.AsType[kv.ErrQuarantine](err); ok {
		return QuarantineFull
	}
	if errors.Is(err, peer.ErrIdentity) {
		return WrongPeer
	}
	for _, m := range reasons {
		if errors.Is(err, m.err) {
			return m.reason
		}
	}
	return Internal
}

// refusals counts by reason since the start.
type refusals struct {
	mu     sync.Mutex
	counts map[Reason]uint64
}

func (r *refusals) add(reason Reason) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.counts == nil {
		r.counts = map[Reason]uint64{}
	}
	r.counts[reason]++
}

func (r *refusals) snapshot() map[Reason]uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := make(map[Reason]uint64, len(r.counts))
	for k, v := range r.counts {
		out[k] = v
	}
	return out
}

// asError makes the error of a call out of an error and what was measured.
func asError(err error, facts *workerv1.LegFacts) (*connect.Error, Reason) {
	reason := reasonOf(err)
	out := connect.NewError(reason.Code(), err)
	d, derr := connect.NewErrorDetail(&workerv1.Refusal{Reason: string(reason), Message: err.Error(), Facts: facts})
	if derr == nil {
		out.AddDetail(d)
	}
	return out, reason
}
