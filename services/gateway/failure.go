package gateway

import (
	"context"
	"errors"
	"fmt"
	"time"

	"connectrpc.com/connect"

	"bulkhead.dev/audit/settle"
	"bulkhead.dev/engine/handoff"
	"bulkhead.dev/engine/worker"
	"bulkhead.dev/infra/apperr"
	workerv1 "bulkhead.dev/services/gen/bulkhead/worker/v1"
)

// The legs that can end a request.
const (
	legGateway = "gateway"
	legPrefill = "prefill"
	legDecode  = "decode"
)

// Reasons of the gateway itself; the others come from the workers.
const (
	reasonCanceled   = "canceled"         // the client went away
	reasonLost       = "worker_lost"      // a worker died
	reasonProtocol   = "protocol"         // a worker spoke out of turn
	reasonCounts     = "counts_differ"    // the three token counts are not equal
	reasonManifest   = "manifests_differ" // the legs name different manifests
	reasonOutput     = "output_differs"   // decode claims other output than it sent
	reasonFinish     = "finish_reason"    // an end that is not on the list
	reasonDeadline   = "deadline"         // the request ran into a deadline
	reasonTransport  = "transport"        // a worker could not be reached
	reasonNoEvidence = "evidence"         // the receipt could not be made durable in time
)

// retryBusy is the hint when a queue is full: about one answer.
const retryBusy = time.Second

// failure is why a request ended without an answer, with what the leg had
// measured. It holds no content.
type failure struct {
	leg    string
	reason string
	facts  *workerv1.LegFacts // nil when the leg never said
	cause  error
}

func (f *failure) Error() string { return fmt.Sprintf("%s: %s", f.leg, f.reason) }
func (f *failure) Unwrap() error { return f.cause }

func (f *failure) canceled() bool { return f.reason == reasonCanceled }

// notOurs corrects a cancellation that nobody here asked for: when a process
// dies, HTTP/2 may reset its streams with the code of a cancellation.
func (f *failure) notOurs() *failure {
	if f.canceled() {
		f.reason = reasonTransport
	}
	return f
}

// fail classifies the error of a leg. A refusal of the worker names its reason
// itself.
func fail(leg string, err error) *failure {
	if f, ok := errors.AsType[*failure](err); ok {
		return f
	}
	f := &failure{leg: leg, reason: reasonTransport, cause: err}
	switch {
	case errors.Is(err, errProtocol):
		f.reason = reasonProtocol
	case errors.Is(err, errWorkerLost):
		f.reason = reasonLost
	}
	ce, ok := errors.AsType[*connect.Error](err)
	if !ok {
		if errors.Is(err, context.Canceled) {
			f.reason = reasonCanceled
		}
		return f
	}
	for _, d := range ce.Details() {
		v, err := d.Value()
		if refusal, ok := v.(*workerv1.Refusal); err == nil && ok && refusal.GetReason() != "" {
			f.reason, f.facts = refusal.GetReason(), refusal.GetFacts()
			return f
		}
	}
	switch ce.Code() {
	case connect.CodeCanceled:
		f.reason = reasonCanceled
	case connect.CodeDeadlineExceeded:
		f.reason = reasonDeadline
	}
	return f
}

func factsOf(err error) *workerv1.LegFacts {
	if f, ok := errors.AsType[*failure](err); ok {
		return f.facts
	}
	return nil
}

// public turns a failure into what the caller may know. The reasons of workers
// that are not listed are proof that failed, or a bug: both withhold.
func (f *failure) public() *apperr.Error {
	switch worker.Reason(f.reason) {
	case reasonCanceled:
		return apperr.Wrap(f, apperr.Canceled, "request_canceled", "The request was canceled.")
	case worker.QueueFull, worker.Exhausted, worker.QuarantineFull:
		return apperr.Wrap(f, apperr.Unavailable, "server_is_overloaded", "The platform is overloaded; try again shortly.").WithRetryAfter(retryBusy)
	case worker.TenantConcurrency:
		return apperr.Wrap(f, apperr.TooMany, "rate_limit_exceeded", "Too many requests of this tenant run at once; wait for one to end.").WithRetryAfter(retryBusy)
	case worker.Draining, worker.Stopped, worker.OfferWithdrawn, worker.DecodeUnreachable, worker.Reason(handoff.Fabric), reasonLost, reasonTransport:
		return apperr.Wrap(f, apperr.Unavailable, "worker_lost", "A worker went away while it served the request; try again.").WithRetryAfter(retryBusy)
	case worker.OfferTimeout, reasonDeadline:
		return apperr.Wrap(f, apperr.Unavailable, "handoff_timeout", "The prompt could not be handed over in time; try again.").WithRetryAfter(retryBusy)
	case worker.ContextLength:
		return apperr.Wrap(f, apperr.Invalid, "context_length_exceeded", "Prompt and answer do not fit into the context window of the model.").WithParam("messages")
	case reasonNoEvidence:
		return settle.Unavailable(f)
	case worker.SlowConsumer:
		return apperr.Wrap(f, apperr.Invalid, "slow_consumer", "The answer was not read fast enough.")
	}
	return apperr.Wrap(f, apperr.Internal, "response_withheld",
		"The answer was withheld because the platform could not prove that it is yours alone. The receipt says why.").WithNoRetry()
}

// LeftReceipt reports whether the error of Generate came after admission, so
// that there is a receipt which explains it.
func LeftReceipt(err error) bool {
	_, ok := errors.AsType[*failure](err)
	return ok
}
