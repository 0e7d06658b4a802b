package gateway

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"bulkhead.dev/audit/receipt"
	"bulkhead.dev/audit/settle"
	"bulkhead.dev/engine/pool"
	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/id"
	workerv1 "bulkhead.dev/services/gen/bulkhead/worker/v1"
	"bulkhead.dev/tenancy/quota"
)

// Stream is an admitted request whose hand-off is proven. It belongs to one
// goroutine.
type Stream struct {
	g      *Gateway
	pair   pool.Pair
	req    Request
	prep   *prepared
	owner  id.Owner
	rec    *record
	held   *quota.Reservation
	ticket Ticket
	legs   *legs
	ids    ids
	out    func()

	ctx       context.Context
	cancel    context.CancelCauseFunc
	unwatch   func()
	committed atomic.Bool

	last     time.Time // of the last piece of text, zero before the first
	finished *workerv1.Finished
	err      *apperr.Error // how the stream ended, if not well
	settled  bool
	final    Final
}

// Model returns the name of the model that answers.
func (s *Stream) Model() string { return s.prep.model.Name }

// Created returns when the request was admitted.
func (s *Stream) Created() time.Time { return s.rec.admitted }

// PromptTokens returns the length of the prompt, as all three legs counted it.
func (s *Stream) PromptTokens() int { return len(s.prep.ids) }

// Limits returns what is left of the rates that bind the tenant most.
func (s *Stream) Limits() quota.Status { return s.held.Status }

// ReceiptID returns the id of the receipt, which exists once the stream ended.
func (s *Stream) ReceiptID() id.Receipt { return s.req.ID.Receipt() }

// open runs the hand-off and compares what the legs say. The error is a
// *failure.
func (s *Stream) open() error {
	l, err := startLegs(s.ctx, s.cancel, s.pair, &s.ids, &s.req, s.owner, s.prep)
	if err != nil {
		return explain(s.ctx, err)
	}
	s.legs = l
	prefill, decode, err := l.join()
	s.rec.prefill, s.rec.decode = prefill, decode
	if err != nil {
		return explain(s.ctx, err)
	}
	s.rec.committedAt = s.g.Now()
	s.committed.Store(true)
	return agreed(len(s.prep.ids), s.pair, prefill, decode)
}

// compare is the last wall: three counts that were made independently, and the
// same manifest on both sides. Nothing leaves before it holds.
func compare(edge int, pair pool.Pair, prefill, decode *workerv1.LegFacts) error {
	switch {
	case prefill == nil || decode == nil:
		return &failure{leg: legGateway, reason: reasonProtocol, cause: errProtocol}
	case !bytes.Equal(prefill.GetEpoch(), pair.Prefill.Epoch[:]) || !bytes.Equal(decode.GetEpoch(), pair.Decode.Epoch[:]):
		return &failure{leg: legGateway, reason: reasonProtocol, cause: errProtocol}
	case int(prefill.GetTokens()) != edge || int(decode.GetTokens()) != edge:
		return &failure{leg: legGateway, reason: reasonCounts}
	case len(prefill.GetManifestRoot()) != 32 || !bytes.Equal(prefill.GetManifestRoot(), decode.GetManifestRoot()):
		return &failure{leg: legGateway, reason: reasonManifest}
	}
	return nil
}

// Next returns the next piece of the answer: whole characters, never empty. It
// returns io.EOF when the text is complete, which is not yet success: see
// Finish. Any other error is an *apperr.Error and final; the receipt is on its
// way then.
func (s *Stream) Next(ctx context.Context) (string, error) {
	if s.err != nil {
		return "", s.err
	}
	if s.finished != nil {
		return "", io.EOF
	}
	defer context.AfterFunc(ctx, func() { s.cancel(context.Cause(ctx)) })()
	for {
		event, err := s.legs.receive()
		if err != nil {
			return "", s.end(explain(s.ctx, err))
		}
		switch {
		case event.GetDelta() != nil:
			s.rec.delta(event.GetDelta())
			if event.GetDelta().GetText() == "" {
				continue
			}
			s.piece()
			return event.GetDelta().GetText(), nil
		case event.GetFinished() != nil:
			if f := s.rec.finished(event.GetFinished(), s.prep.maxOutput); f != nil {
				return "", s.end(f)
			}
			s.finished = event.GetFinished()
			return "", io.EOF
		}
		return "", s.end(fail(legGateway, errProtocol))
	}
}

// piece records the pace of the answer.
func (s *Stream) piece() {
	now := s.g.Now()
	if s.last.IsZero() {
		s.rec.firstByte = now
		s.g.Observer.FirstToken(now.Sub(s.rec.admitted))
	} else {
		s.g.Observer.NextToken(now.Sub(s.last))
	}
	s.last = now
}

// Finish makes usage and receipt durable and says how the answer ended. Only
// after it may the end of the answer be sent. The error is an *apperr.Error;
// the caller then ends in an error and sends no success.
func (s *Stream) Finish(ctx context.Context) (Final, error) {
	switch {
	case s.err != nil:
		return Final{}, s.err
	case s.settled:
		return s.final, nil
	case s.finished == nil:
		return Final{}, s.end(&failure{leg: legGateway, reason: reasonProtocol, cause: errors.New("finish before the end of the text")})
	}
	s.stop()
	s.settled = true
	r := s.rec.receipt(receipt.Completed, nil, s.g.Now())
	// A client that leaves now has its answer but for the end; the receipt is
	// not its to cancel. The settler bounds the wait.
	ctx = context.WithoutCancel(ctx)
	// The receipt takes the place of the intent, so that is not waited for.
	if err := s.settle(ctx, r); err != nil {
		s.g.Observer.Withheld()
		s.g.Observer.Refused(legGateway, reasonNoEvidence)
		s.err = apperr.From(err)
		return Final{}, s.err
	}
	s.final = Final{FinishReason: s.finished.GetFinishReason(), PromptTokens: len(s.prep.ids), CachedTokens: s.rec.cached(), CompletionTokens: s.rec.output, Receipt: s.ReceiptID()}
	return s.final, nil
}

// Close ends the stream whatever state it is in. A stream that did not end is
// canceled, and its receipt says so.
func (s *Stream) Close() {
	if s.err == nil && !s.settled {
		_ = s.end(&failure{leg: legGateway, reason: reasonCanceled, cause: context.Canceled})
	}
}

// end stops both legs and settles a request that failed. Whoever waits for a
// refusal gets it with the receipt in place; whoever went away is not waited
// for.
func (s *Stream) end(err error) *apperr.Error {
	f := fail(legGateway, err)
	s.stop()
	s.settled = true
	s.err = f.public()
	s.g.Observer.Refused(f.leg, f.reason)
	outcome := receipt.Failed
	switch {
	case f.canceled():
		outcome = receipt.Canceled
	case !s.committed.Load():
		outcome = receipt.Refused
	}
	now := s.g.Now()
	settled := make(chan struct{})
	s.g.background.Go(func() {
		defer close(settled)
		// The client is answered at once; what is written waits for both legs to
		// have let go.
		s.acknowledge()
		r := s.rec.receipt(outcome, f, now)
		// Not the request's context: its end is why we are here. The settler
		// bounds the wait and keeps what it could not write.
		if err := s.settle(context.WithoutCancel(s.ctx), r); err != nil {
			s.g.Log.ErrorContext(s.ctx, "receipt of a failed request is late", "request_id", s.req.ID.String())
		}
	})
	if !f.canceled() {
		select {
		case <-settled:
		case <-time.After(settleRefusal):
		}
	}
	return s.err
}

// acknowledge asks the legs that were called whether they are done with the
// request, and takes in what they measured in the end.
func (s *Stream) acknowledge() {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(s.ctx), cmp.Or(s.g.ackWithin, ackTimeout))
	defer cancel()
	var asked sync.WaitGroup
	ask := func(called bool, w *pool.Worker, to *ended) {
		if !called {
			return
		}
		asked.Go(func() {
			res, err := w.ControlClient.End(ctx, &workerv1.EndRequest{TransferId: s.ids.transfer[:]})
			*to = ended{asked: true, acknowledged: err == nil, facts: res.GetFacts(), quarantined: res.GetQuarantined()}
		})
	}
	ask(s.ids.prefillCalled, s.pair.Prefill, &s.rec.prefillEnd)
	ask(s.ids.decodeCalled, s.pair.Decode, &s.rec.decodeEnd)
	asked.Wait()
}

// ackTimeout is far above what a step or a chunk takes. A leg that needs longer
// stands still or is dead, and the receipt says so.
const ackTimeout = 5 * time.Second

// settleRefusal is how long an error waits for its receipt. Nothing of a
// tenant leaves with an error, so unlike an answer it does not have to wait.
const settleRefusal = 500 * time.Millisecond

// stop releases everything but the record.
func (s *Stream) stop() {
	if s.settled {
		return
	}
	if s.legs != nil {
		s.legs.close()
	} else {
		s.cancel(context.Canceled)
	}
	s.unwatch()
	s.pair.Release()
	s.out()
}

func (s *Stream) settle(ctx context.Context, r receipt.Receipt) error {
	start := s.g.Now()
	// Nothing is computed any more.
	defer s.held.Close()
	charges := s.held.Spend(s.rec.billable(), int(s.rec.decoded()))
	if err := s.g.Evidence.Settle(ctx, settle.Facts{Receipt: r, Charges: charges,
		Usage: settle.Usage{CachedTokens: int64(s.rec.cached()), DecodeTokens: s.rec.decoded()}}); err != nil {
		return err
	}
	s.g.Observer.Settled(s.g.Now().Sub(start), s.rec.billable(), s.rec.output)
	return nil
}
