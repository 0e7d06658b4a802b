package gateway

import (
	"context"
	"errors"

	"connectrpc.com/connect"

	"bulkhead.dev/engine/handoff"
	"bulkhead.dev/engine/pool"
	"bulkhead.dev/infra/id"
	workerv1 "bulkhead.dev/services/gen/bulkhead/worker/v1"
)

// legs are the two calls that serve one request. Both run under one context:
// when one fails the other is canceled.
type legs struct {
	pair   pool.Pair
	cancel context.CancelCauseFunc
	decode *connect.ServerStreamForClient[workerv1.GenerateResponse]
	done   chan prefillResult // buffered: one result, also when nobody waits
}

type prefillResult struct {
	facts *workerv1.LegFacts
	err   error
}

// errWorkerLost is the cause of a canceled context when a worker was reaped.
var errWorkerLost = errors.New("worker lost")

// ids are what both legs know a request by. They are minted for each attempt.
type ids struct {
	transfer      id.Transfer
	nonce         id.Nonce
	prefill       id.Lease
	decode        id.Lease
	prefillCalled bool
	decodeCalled  bool
}

func newIDs() ids {
	return ids{transfer: id.NewTransfer(), nonce: id.NewNonce(), prefill: id.NewLease(), decode: id.NewLease()}
}

// startLegs asks decode to reserve, and prefill to compute once it has. It
// returns when decode holds its credits; the hand-off is under way then.
// On an error nothing runs any more.
func startLegs(ctx context.Context, cancel context.CancelCauseFunc, pair pool.Pair, n *ids, r *Request, owner id.Owner, p *prepared) (_ *legs, err error) {
	l := &legs{pair: pair, cancel: cancel, done: make(chan prefillResult, 1)}
	n.decodeCalled = true
	digest := handoff.TokenDigest(p.ids)
	l.decode, err = pair.Decode.DecodeClient.Generate(ctx, &workerv1.GenerateRequest{
		RequestId: r.ID[:], Owner: owner[:], LeaseId: n.decode[:], TransferId: n.transfer[:], Nonce: n.nonce[:],
		ModelDigest:     pair.Decode.Model[:],
		PromptTokens:    uint32(len(p.ids)),
		TokenDigest:     digest[:],
		LastToken:       uint32(p.ids[len(p.ids)-1]),
		MaxOutputTokens: uint32(p.maxOutput),
		Sampling: &workerv1.Sampling{
			Temperature: r.Params.Temperature, TopK: uint32(r.Params.TopK), TopP: r.Params.TopP, MinP: r.Params.MinP,
			FrequencyPenalty: r.Params.FrequencyPenalty, PresencePenalty: r.Params.PresencePenalty, Seed: r.Params.Seed,
		},
		Stop:           r.Stop,
		HandoffVersion: uint32(pair.Handoff),
		Prefill:        &workerv1.Peer{Epoch: pair.Prefill.Epoch[:], Address: pair.Prefill.Address, FabricAddress: pair.Prefill.FabricAddress},
	})
	if err != nil {
		return nil, fail(legDecode, err)
	}
	event, err := l.receive()
	if err != nil {
		return nil, errors.Join(err, l.decode.Close())
	}
	if event.GetReserved() == nil {
		return nil, errors.Join(fail(legGateway, errProtocol), l.decode.Close())
	}
	tokens := make([]uint32, len(p.ids))
	for i, t := range p.ids {
		tokens[i] = uint32(t)
	}
	n.prefillCalled = true
	go func() {
		res, err := pair.Prefill.PrefillClient.Prefill(ctx, &workerv1.PrefillRequest{
			RequestId: r.ID[:], Owner: owner[:], LeaseId: n.prefill[:], TransferId: n.transfer[:], Nonce: n.nonce[:],
			ModelDigest: pair.Prefill.Model[:], Tokens: tokens,
			Decode:         &workerv1.Peer{Epoch: pair.Decode.Epoch[:], Address: pair.Decode.Address},
			HandoffVersion: uint32(pair.Handoff),
		})
		if err != nil {
			f := fail(legPrefill, err)
			if ctx.Err() == nil {
				f = f.notOurs()
			}
			cancel(f) // decode must not wait for an offer that will not come
			l.done <- prefillResult{facts: f.facts, err: f}
			return
		}
		l.done <- prefillResult{facts: res.GetFacts()}
	}()
	return l, nil
}

// errProtocol means that a worker spoke out of turn.
var errProtocol = errors.New("a worker broke the protocol")

// receive returns the next event of decode. The error is a *failure.
func (l *legs) receive() (*workerv1.GenerateResponse, error) {
	if l.decode.Receive() {
		return l.decode.Msg(), nil
	}
	err := l.decode.Err()
	if err == nil { // the stream ended without the event that ends it
		err = errProtocol
	}
	return nil, fail(legDecode, err)
}

// join waits for both halves of the hand-off: what decode committed and what
// prefill says it computed. When decode failed because prefill did, the error
// is that of prefill, which is the one that explains.
func (l *legs) join() (prefill, decode *workerv1.LegFacts, err error) {
	event, err := l.receive()
	if err != nil {
		l.cancel(err)
		res := <-l.done
		if p, ok := errors.AsType[*failure](res.err); ok && !p.canceled() {
			err = p
		}
		return res.facts, factsOf(err), err
	}
	if event.GetCommitted().GetFacts() == nil {
		l.cancel(errProtocol)
		res := <-l.done
		return res.facts, nil, fail(legGateway, errProtocol)
	}
	decode = event.GetCommitted().GetFacts()
	res := <-l.done
	if res.err != nil {
		return res.facts, decode, res.err
	}
	return res.facts, decode, nil
}

// close cancels what still runs and waits for it.
func (l *legs) close() {
	l.cancel(context.Canceled)
	_ = l.decode.Close() // reports the cancellation
}
