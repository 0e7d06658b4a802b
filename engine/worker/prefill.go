package worker

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"connectrpc.com/connect"

	"bulkhead.dev/engine/fabric"
	"bulkhead.dev/engine/handoff"
	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/sched"
	"bulkhead.dev/engine/worker/peer"
	"bulkhead.dev/infra/id"
	workerv1 "bulkhead.dev/services/gen/bulkhead/worker/v1"
	"bulkhead.dev/services/gen/bulkhead/worker/v1/workerv1connect"
)

// prefillLeg serves PrefillService and the pages.
type prefillLeg struct {
	*worker
	chunks  *sched.Prefill
	server  *fabric.Server
	decodes *peers[decodeClient]
}

func newPrefillLeg(w *worker) *prefillLeg {
	return &prefillLeg{
		worker:  w,
		chunks:  sched.NewPrefill(sched.PrefillOptions{Model: w.forward, Geometry: w.pool.Geometry(), Chunk: w.set.Chunk, Now: w.now}),
		server:  fabric.NewServer(fabric.ServerOptions{Now: w.now, Arena: w.pool, StallTimeout: time.Duration(w.set.PageStall)}),
		decodes: decodeClients(w.set.Credentials),
	}
}

func (l *prefillLeg) mount(mux *http.ServeMux, opts ...connect.HandlerOption) {
	mux.Handle(workerv1connect.NewPrefillServiceHandler(l, opts...))
}

func (l *prefillLeg) run(ctx context.Context) error { return l.chunks.Run(ctx) }
func (l *prefillLeg) tokens() uint64                { return l.chunks.Tokens() }
func (l *prefillLeg) close() {
	l.decodes.close()
	l.pool.Forget(id.Owner{})
}

// Prefill implements workerv1connect.PrefillServiceHandler.
func (l *prefillLeg) Prefill(ctx context.Context, req *workerv1.PrefillRequest) (*workerv1.PrefillResponse, error) {
	var m measured
	var n names
	err := l.prefill(ctx, req, &n, &m)
	n.ended(l.facts(m))
	if err != nil {
		return nil, l.refused(ctx, "prefill", n, err, m)
	}
	l.log.DebugContext(ctx, "prefilled", "request", n.request, "transfer", n.transfer, "tokens", m.tokens)
	return &workerv1.PrefillResponse{Facts: l.facts(m)}, nil
}

// prefill does the whole call. Every path releases the pages before the slot.
func (l *prefillLeg) prefill(ctx context.Context, req *workerv1.PrefillRequest, n *names, m *measured) error {
	if _, err := peer.Require(ctx, peer.IsGateway); err != nil {
		return err
	}
	var err error
	if *n, err = parseNames(req); err != nil {
		return err
	}
	if n.end, err = l.calls.begin(n.transfer); err != nil {
		return err
	}
	if err := l.checkModel(req.GetModelDigest()); err != nil {
		return err
	}
	tokens, err := l.parseTokens(req.GetTokens())
	if err != nil {
		return err
	}
	defer clear(tokens)
	decode, err := parsePeer(req.GetDecode(), req.GetDecode().GetAddress())
	if err != nil {
		return err
	}

	version, err := l.parseVersion(req.GetHandoffVersion())
	if err != nil {
		return err
	}
	client, err := l.decodes.get(decode)
	if err != nil {
		return refuse(BadRequest, "decode leg: %w", err)
	}

	slot, err := l.gate.Enter(ctx, n.owner, l.pool.Geometry().PagesFor(len(tokens)))
	if err != nil {
		return err
	}
	defer slot.Leave()
	m.queue = slot.Waited()
	if err := step("prefill.entered"); err != nil {
		return err
	}

	offer := handoff.NewOffer(l.server, handoff.Meta{
		Version: version, Request: n.request, Transfer: n.transfer, Nonce: n.nonce,
		PrefillEpoch: l.set.epoch, DecodeEpoch: decode.epoch,
		Model: l.set.digest, TokenDigest: handoff.TokenDigest(tokens),
	})
	defer offer.Abort()
	scope := kv.CacheScope{Owner: n.owner, Model: l.set.digest}
	start, err := l.pool.Recall(scope, tokens)
	if err != nil {
		return err
	}
	d := &delivery{client: client, names: n, offer: offer}
	filled, err := l.fill(ctx, d, sched.Job{Credits: slot.Credits(), Lease: n.lease, Tokens: tokens, Start: start}, version)
	m.tokens, m.cached, m.extents, m.compute = filled.Tokens, filled.Cached, filled.Extents, filled.Computed
	if err != nil {
		return err
	}
	if err := step("prefill.sealed"); err != nil {
		filled.Sealed.Release()
		return err
	}
	began := l.now()
	if err := offer.Complete(filled.Sealed); err != nil {
		return err
	}
	root := offer.Root()
	m.root, m.bytes = root[:], offer.Bytes()
	if err := step("prefill.offered"); err != nil {
		return err
	}
	var kept error
	err = d.complete(ctx, func(s *kv.Sealed) { kept = s.Remember(scope, tokens) })
	m.handoff = l.now().Sub(began)
	if err != nil {
		return err
	}
	if err := step("prefill.acknowledged"); err != nil {
		return err
	}
	if kept != nil {
		return fmt.Errorf("remember a prompt: %w", kept)
	}
	l.handoffBytes.Add(m.bytes)
	return nil
}

// fill computes the prompt, and meanwhile tells the decode leg which pages are
// finished, if the hand-off has that. It returns when both are over.
func (l *prefillLeg) fill(ctx context.Context, d *delivery, job sched.Job, version uint16) (sched.Filled, error) {
	if version < handoff.Early || len(job.Tokens) <= l.set.Chunk { // one pass: nothing is finished before the rest
		return l.chunks.Fill(ctx, job)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	box := make(chan *kv.Sealed, 1)
	job.Early = func(s *kv.Sealed) { replace(box, s) }
	told := make(chan error, 1)
	go func() {
		err := d.preview(ctx, box)
		if err != nil {
			cancel() // what the decode leg refused need not be computed
		}
		for s := range box {
			s.Release()
		}
		told <- err
	}()
	filled, err := l.chunks.Fill(ctx, job)
	close(box) // the loop is done with the prompt
	if err != nil {
		cancel()
	}
	if terr := <-told; terr != nil {
		if filled.Sealed != nil {
			filled.Sealed.Release()
			filled.Sealed = nil
		}
		if err == nil || errors.Is(err, sched.ErrCanceled) {
			err = terr
		}
	}
	return filled, err
}

// replace puts a handle into a box for one, in place of one that was not taken.
func replace(box chan *kv.Sealed, s *kv.Sealed) {
	select {
	case old := <-box:
		old.Release()
	default:
	}
	box <- s // there is room: nobody else puts
}

// delivery tells the decode leg of an offer.
type delivery struct {
	client decodeClient
	names  *names
	offer  *handoff.Offer
}

// preview tells of the pages that come out of the box until it is closed.
func (d *delivery) preview(ctx context.Context, box <-chan *kv.Sealed) error {
	for s := range box {
		preview, err := d.offer.Preview(s)
		if err == nil {
			err = step("prefill.preview")
		}
		if err != nil {
			return err
		}
		if _, err := d.client.Preview(ctx, &workerv1.PreviewRequest{
			RequestId: d.names.request[:], TransferId: d.names.transfer[:], Preview: preview,
		}); err != nil {
			return offerError(ctx, err)
		}
	}
	return nil
}

// complete makes the offer and takes the acknowledgment. verified is given the
// pages if the decode leg has proof of them.
func (d *delivery) complete(ctx context.Context, verified func(*kv.Sealed)) error {
	resp, err := d.client.Offer(ctx, &workerv1.OfferRequest{
		RequestId: d.names.request[:], TransferId: d.names.transfer[:], Manifest: d.offer.Manifest(),
	})
	if err != nil {
		return offerError(ctx, err)
	}
	if len(resp.GetManifestRoot()) != 32 {
		return refuse(WrongRoot, "acknowledgment of %d bytes", len(resp.GetManifestRoot()))
	}
	return d.offer.AckThen([32]byte(resp.GetManifestRoot()), verified)
}

// offerError says why an offer was not taken: for the reason that the decode
// leg gave, or because it was not reached.
func offerError(ctx context.Context, err error) error {
	if r, ok := RefusalOf(err); ok {
		reason := Reason(r.GetReason())
		if _, known := codes[reason]; known {
			return refuse(reason, "decode leg: %s", r.GetMessage())
		}
		return refuse(Internal, "decode leg: unknown reason")
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if ce, ok := errors.AsType[*connect.Error](err); ok && connect.IsWireError(err) {
		return refuse(Internal, "decode leg: %v", ce.Code())
	}
	return refuse(DecodeUnreachable, "%w", err)
}
