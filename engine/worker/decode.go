package worker

import (
	"context"
	"errors"
	"io"
	"net/http"
	"sync"
	"time"

	"connectrpc.com/connect"

	"bulkhead.dev/engine/fabric"
	"bulkhead.dev/engine/handoff"
	"bulkhead.dev/engine/sched"
	"bulkhead.dev/engine/worker/peer"
	"bulkhead.dev/infra/id"
	workerv1 "bulkhead.dev/services/gen/bulkhead/worker/v1"
	"bulkhead.dev/services/gen/bulkhead/worker/v1/workerv1connect"
)

// decodeLeg serves DecodeService.
type decodeLeg struct {
	*worker
	batch    *sched.Decode
	receiver *handoff.Receiver
	readers  *peers[*fabric.Client]

	mu       sync.Mutex
	expected map[id.Transfer]*expectation
}

// expectation is a transfer that the gateway announced and Generate waits for.
type expectation struct {
	request id.Request
	epoch   id.Epoch // of the prefill worker that may offer it

	mu    sync.Mutex
	began time.Time // when the offer came; zero before
}

func newDecodeLeg(w *worker, text func() sched.Text, isEOG func(int32) bool) *decodeLeg {
	return &decodeLeg{
		worker: w,
		batch: sched.NewDecode(sched.DecodeOptions{
			Model: w.forward, NewText: text, IsEOG: isEOG,
			Mailbox: w.set.Mailbox, SlowLimit: time.Duration(w.set.SlowLimit), Now: w.now,
		}),
		receiver: handoff.NewReceiver(handoff.ReceiverConfig{Epoch: w.set.epoch, Geometry: w.pool.Geometry(), Model: w.set.digest}),
		readers:  pageReaders(w.set.Credentials, time.Duration(w.set.PageStall)),
		expected: map[id.Transfer]*expectation{},
	}
}

func (d *decodeLeg) mount(mux *http.ServeMux, opts ...connect.HandlerOption) {
	mux.Handle(workerv1connect.NewDecodeServiceHandler(d, opts...))
}

func (d *decodeLeg) run(ctx context.Context) error { return d.batch.Run(ctx) }
func (d *decodeLeg) tokens() uint64                { return d.batch.Tokens() }
func (d *decodeLeg) close()                        { d.readers.close() }

// expect notes who may offer a transfer. The caller must call the function
// returned once it waits no more.
func (d *decodeLeg) expect(p generateParams) (*expectation, func()) {
	e := &expectation{request: p.request, epoch: p.prefill.epoch}
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, ok := d.expected[p.transfer]; ok {
		return e, func() {} // the receiver refuses a transfer that it knows
	}
	d.expected[p.transfer] = e
	return e, func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		delete(d.expected, p.transfer)
	}
}

// Generate implements workerv1connect.DecodeServiceHandler.
func (d *decodeLeg) Generate(ctx context.Context, req *workerv1.GenerateRequest, stream *connect.ServerStream[workerv1.GenerateResponse]) error {
	g := &generation{d: d, send: stream.Send}
	_, err := peer.Require(ctx, peer.IsGateway)
	if err == nil {
		g.p, err = d.parseGenerate(req)
	}
	if err == nil {
		g.p.end, err = d.calls.begin(g.p.transfer)
	}
	if err == nil {
		err = g.run(ctx)
	}
	g.p.ended(d.facts(g.m))
	if err != nil {
		return d.refused(ctx, "generate", g.p.names, err, g.m)
	}
	d.log.DebugContext(ctx, "generated", "request", g.p.request, "transfer", g.p.transfer,
		"prompt_tokens", g.m.tokens, "early_pages", g.early, "output_tokens", g.result.Output, "finish", string(g.result.Finish))
	return nil
}

// generation is one Generate call.
type generation struct {
	d      *decodeLeg
	p      generateParams
	m      measured
	send   func(*workerv1.GenerateResponse) error
	early  int // pages that were pulled while the prompt was computed
	result sched.Result
}

// run does the whole call. Whatever ends it, everything is given back in this
// order: the run, the transfer, the slot.
func (g *generation) run(ctx context.Context) error {
	d, p := g.d, g.p
	slot, err := d.gate.Enter(ctx, p.owner, d.pool.Geometry().PagesFor(p.prompt+p.maxOutput))
	if err != nil {
		return err
	}
	defer slot.Leave()
	g.m.queue = slot.Waited()
	if err := step("decode.entered"); err != nil {
		return err
	}

	reader, err := d.readers.get(p.prefill)
	if err != nil {
		return refuse(BadRequest, "page server of the prefill leg: %w", err)
	}
	expectation, forget := d.expect(p)
	defer forget()
	pages := slot.Credits().Pages()
	in, err := d.receiver.Expect(handoff.Expect{
		Version: p.version, Request: p.request, Transfer: p.transfer, Nonce: p.nonce, Owner: p.owner, Lease: p.lease,
		PrefillEpoch: p.prefill.epoch, Model: d.set.digest, TokenDigest: p.digest, Tokens: p.prompt,
	}, slot.Credits(), steppedReader(reader))
	if err != nil {
		return err
	}
	defer in.Close()
	if err := g.reserved(pages); err != nil {
		return err
	}
	if err := step("decode.reserved"); err != nil {
		return err
	}
	committed, err := g.await(ctx, in)
	g.m.extents = in.Extents()
	if err != nil {
		return err
	}
	if err := step("decode.committed"); err != nil {
		return err
	}
	root := committed.Root()
	g.m.tokens, g.m.root, g.m.bytes = committed.Tokens(), root[:], committed.Bytes()
	g.early, g.m.transport = committed.Early(), string(reader.Transport())
	g.m.handoff = expectation.took(d.now())
	d.handoffBytes.Add(committed.Bytes())

	run, err := d.batch.Start(sched.Request{
		Committed: committed, LastToken: p.last, MaxOutput: p.maxOutput, Params: p.params, Stops: p.stops,
	})
	if err != nil {
		return err
	}
	defer run.Close()
	err = g.stream(ctx, run)
	g.m.compute, g.m.extents, g.m.output = run.Computed(), run.Extents(), run.Output()
	if err != nil {
		return err
	}
	if err := step("decode.finished"); err != nil {
		return err
	}
	return g.finished()
}

func (g *generation) reserved(pages int) error {
	return g.sent(&workerv1.GenerateResponse{Event: &workerv1.GenerateResponse_Reserved{
		Reserved: &workerv1.Reserved{Pages: uint32(pages)},
	}})
}

// await waits for the proof.
func (g *generation) await(ctx context.Context, in *handoff.Inbound) (*handoff.Committed, error) {
	limit := time.Duration(g.d.set.OfferWait)
	wctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	c, err := in.Wait(wctx)
	if err == nil {
		return c, nil
	}
	r, ok := errors.AsType[*handoff.Refusal](err)
	switch {
	case !ok || r.Reason != handoff.Canceled:
		return nil, err
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case wctx.Err() != nil:
		return nil, refuse(OfferTimeout, "no offer within %v", limit)
	}
	return nil, refuse(OfferWithdrawn, "%w", err)
}

// stream sends the proof, and then the text as it is computed.
func (g *generation) stream(ctx context.Context, run *sched.Run) error {
	if err := g.sent(&workerv1.GenerateResponse{Event: &workerv1.GenerateResponse_Committed{
		Committed: &workerv1.Committed{Facts: g.d.facts(g.m)},
	}}); err != nil {
		return err
	}
	for {
		delta, err := run.Next(ctx)
		if errors.Is(err, io.EOF) {
			g.result = run.Result()
			return nil
		}
		if err != nil {
			return err
		}
		ids := make([]uint32, len(delta.IDs))
		for i, id := range delta.IDs {
			ids[i] = uint32(id)
		}
		if err := g.sent(&workerv1.GenerateResponse{Event: &workerv1.GenerateResponse_Delta{
			Delta: &workerv1.Delta{Text: delta.Text, Ids: ids},
		}}); err != nil {
			return err
		}
	}
}

// finishReasons are the words of the public API for the ends of a run.
var finishReasons = map[sched.Finish]string{sched.EOS: "stop", sched.StopWord: "stop", sched.MaxTokens: "length"}

func (g *generation) finished() error {
	word, ok := finishReasons[g.result.Finish]
	if !ok {
		return errors.New("a run ended in an unknown way")
	}
	return g.sent(&workerv1.GenerateResponse{Event: &workerv1.GenerateResponse_Finished{Finished: &workerv1.Finished{
		FinishReason: word, OutputTokens: uint32(g.result.Output), Facts: g.d.facts(g.m), Detail: string(g.result.Finish),
	}}})
}

// sent sends an event. It fails only if the gateway is gone.
func (g *generation) sent(m *workerv1.GenerateResponse) error {
	if err := g.send(m); err != nil {
		return refuse(Canceled, "send event: %w", err)
	}
	return nil
}

// took returns the time since the offer came.
func (e *expectation) took(now time.Time) time.Duration {
	e.mu.Lock()
	defer e.mu.Unlock()
	return now.Sub(e.began)
}

// Offer implements workerv1connect.DecodeServiceHandler.
func (d *decodeLeg) Offer(ctx context.Context, req *workerv1.OfferRequest) (*workerv1.OfferResponse, error) {
	var n names
	root, err := d.pull(ctx, req, &n)
	if err != nil {
		return nil, d.refused(ctx, "offer", n, err, measured{})
	}
	return &workerv1.OfferResponse{ManifestRoot: root[:]}, nil
}

func (d *decodeLeg) pull(ctx context.Context, req *workerv1.OfferRequest, n *names) (root [32]byte, err error) {
	e, err := d.expectedOf(ctx, req, n)
	if err != nil {
		return root, err
	}
	if e != nil {
		e.mu.Lock()
		e.began = d.now()
		e.mu.Unlock()
	}
	if err := step("decode.offered"); err != nil {
		return root, err
	}
	if root, err = d.receiver.Pull(ctx, n.transfer, req.GetManifest()); err != nil {
		return root, err
	}
	return root, step("decode.pulled")
}

// Preview implements workerv1connect.DecodeServiceHandler.
func (d *decodeLeg) Preview(ctx context.Context, req *workerv1.PreviewRequest) (*workerv1.PreviewResponse, error) {
	var n names
	_, err := d.expectedOf(ctx, req, &n)
	if err == nil {
		err = step("decode.preview")
	}
	if err == nil {
		err = d.receiver.Preview(ctx, n.transfer, req.GetPreview())
	}
	if err != nil {
		return nil, d.refused(ctx, "preview", n, err, measured{})
	}
	return &workerv1.PreviewResponse{}, nil
}

// expectedOf finds what the gateway announced of a transfer that a prefill
// worker speaks of, nil if nothing. It refuses anybody but the one announced.
func (d *decodeLeg) expectedOf(ctx context.Context, req interface {
	GetRequestId() []byte
	GetTransferId() []byte
}, n *names) (*expectation, error) {
	who, err := peer.Require(ctx, peer.Prefill.Allow)
	if err != nil {
		return nil, err
	}
	parse(&err, &n.request, req.GetRequestId(), "request_id")
	parse(&err, &n.transfer, req.GetTransferId(), "transfer_id")
	if err != nil {
		return nil, err
	}
	d.mu.Lock()
	e := d.expected[n.transfer]
	d.mu.Unlock()
	if e != nil {
		// A worker that was not announced must not be able to use up the
		// transfer of another, so this comes before the receiver is asked.
		if e.epoch != who.Epoch {
			return nil, refuse(WrongPeer, "the transfer was announced for another run of a prefill worker")
		}
		if e.request != n.request {
			return nil, refuse(Reason(handoff.WrongRequest), "the transfer belongs to another request")
		}
	}
	return e, nil
}
