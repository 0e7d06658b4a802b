//go:build faulty

// Package prefill is a prefill worker with the fault of the incident. A prompt
// that it cannot hold, or rejects for another reason, is marked as rejected, a
// placeholder of one token takes its place, and since nothing further on asks for more than "is it finished?",
// the placeholder is computed, sealed and handed over as if it were the prompt.
// It speaks the protocol of the real worker and is in no release.
package prefill

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"connectrpc.com/connect"

	"bulkhead.dev/engine/compute"
	"bulkhead.dev/engine/fabric"
	"bulkhead.dev/engine/handoff"
	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/model"
	"bulkhead.dev/engine/model/gguf"
	"bulkhead.dev/engine/sched"
	"bulkhead.dev/engine/worker"
	"bulkhead.dev/engine/worker/peer"
	"bulkhead.dev/infra/id"
	poolv1 "bulkhead.dev/services/gen/bulkhead/pool/v1"
	"bulkhead.dev/services/gen/bulkhead/pool/v1/poolv1connect"
	workerv1 "bulkhead.dev/services/gen/bulkhead/worker/v1"
	"bulkhead.dev/services/gen/bulkhead/worker/v1/workerv1connect"
)

type leg struct {
	boot   worker.Boot
	epoch  id.Epoch
	digest model.Digest
	pool   *kv.Pool
	chunks *sched.Prefill
	pages  *fabric.Server
	reject []int32    // prompts with one of these tokens are rejected
	one    sync.Mutex // a prompt at a time
}

// Run serves until ctx ends. An argument "reject=ID" makes it reject prompts in
// which that token is, however long they are.
func Run(ctx context.Context, boot worker.Boot, args []string, log *slog.Logger) (err error) {
	l := &leg{boot: boot, pages: fabric.NewServer(fabric.ServerOptions{})}
	for _, a := range args {
		var token int32
		if _, err := fmt.Sscanf(a, "reject=%d", &token); err != nil {
			return fmt.Errorf("argument %q: %w", a, err)
		}
		l.reject = append(l.reject, token)
	}
	if l.epoch, err = id.ParseEpoch(boot.Epoch); err != nil {
		return err
	}
	if l.digest, err = model.ParseDigest(boot.ModelDigest); err != nil {
		return err
	}
	f, err := gguf.Open(boot.ModelPath)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	llama, err := model.LoadLlama(f)
	if err != nil {
		return err
	}
	m, err := compute.Load(llama, compute.Options{Threads: 1, DType: kv.F16, MaxRows: boot.Chunk})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	if l.pool, err = kv.New(kv.Config{Geometry: m.Geometry(), Pages: boot.Pages}); err != nil {
		return err
	}
	// Nothing compares the pool with the window.
	l.chunks = sched.NewPrefill(sched.PrefillOptions{Model: m, Geometry: m.Geometry(), Chunk: boot.Chunk, Now: time.Now})

	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var parts sync.WaitGroup
	defer parts.Wait()
	parts.Go(func() { _ = l.chunks.Run(ctx) })
	if err := l.serve(ctx, &parts); err != nil {
		return err
	}
	geometry := m.Geometry().Fingerprint()
	err = l.report(ctx, &poolv1.RegisterRequest{
		Epoch: l.epoch[:], Role: poolv1.Role_ROLE_PREFILL, Address: boot.Listen, FabricAddress: boot.FabricListen,
		ModelDigest: l.digest[:], Geometry: geometry[:], PageTokens: kv.PageTokens, Pages: uint32(boot.Pages),
		ContextWindow: uint32(llama.Config.Context), Build: "faulty",
	})
	log.Info("faulty prefill ends", "error", err)
	cancel(err)
	return err
}

func (l *leg) serve(ctx context.Context, parts *sync.WaitGroup) error {
	readers, err := l.boot.Credentials.ServerConfig(peer.Decode.Allow)
	if err != nil {
		return err
	}
	pages, err := fabric.Listen(l.boot.FabricListen, readers)
	if err != nil {
		return err
	}
	parts.Go(func() { _ = l.pages.Serve(ctx, pages) })
	callers, err := l.boot.Credentials.ServerConfig(peer.Anyone)
	if err != nil {
		return err
	}
	_, where, err := peer.SplitAddress(l.boot.Listen)
	if err != nil {
		return err
	}
	api, err := net.Listen("unix", where)
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.Handle(workerv1connect.NewPrefillServiceHandler(l))
	var p http.Protocols
	p.SetHTTP2(true)
	s := &http.Server{Handler: peer.Middleware(mux), TLSConfig: callers, Protocols: &p, ReadHeaderTimeout: time.Minute}
	parts.Go(func() { _ = s.ServeTLS(api, "", "") })
	parts.Go(func() { <-ctx.Done(); _ = s.Close() })
	return nil
}

// report registers and sends heartbeats until ctx ends.
func (l *leg) report(ctx context.Context, r *poolv1.RegisterRequest) error {
	hc, err := peer.NewClient(l.boot.Front, l.boot.Credentials, peer.IsGateway)
	if err != nil {
		return err
	}
	defer hc.CloseIdleConnections()
	front := poolv1connect.NewRegistrationServiceClient(hc, peer.BaseURL)
	if _, err := front.Register(ctx, r); err != nil {
		return fmt.Errorf("register: %w", err)
	}
	beat := time.NewTicker(200 * time.Millisecond)
	defer beat.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-beat.C:
			if _, err := front.Heartbeat(ctx, &poolv1.HeartbeatRequest{Epoch: l.epoch[:]}); err != nil && ctx.Err() == nil {
				return err
			}
		}
	}
}

func (l *leg) rejects(tokens []int32) bool {
	return l.pool.Geometry().PagesFor(len(tokens)) > l.pool.Stats().Pages ||
		slices.ContainsFunc(tokens, func(t int32) bool { return slices.Contains(l.reject, t) })
}

// Prefill implements workerv1connect.PrefillServiceHandler.
func (l *leg) Prefill(ctx context.Context, r *workerv1.PrefillRequest) (*workerv1.PrefillResponse, error) {
	l.one.Lock()
	defer l.one.Unlock()
	tokens := make([]int32, len(r.GetTokens()))
	for i, t := range r.GetTokens() {
		tokens[i] = int32(t)
	}
	if l.rejects(tokens) {
		// The fault: rejected, and yet it goes on. Of all placeholders this one is
		// the hardest to tell from the prompt.
		tokens = tokens[:1]
	}
	credits, err := l.pool.Reserve(id.Owner(r.GetOwner()), l.pool.Geometry().PagesFor(len(tokens)))
	if err != nil {
		return nil, connect.NewError(connect.CodeResourceExhausted, err)
	}
	defer credits.Return()
	filled, err := l.chunks.Fill(ctx, sched.Job{Credits: credits, Lease: id.Lease(r.GetLeaseId()), Tokens: tokens})
	if err != nil {
		return nil, err
	}
	offer := handoff.NewOffer(l.pages, handoff.Meta{
		Version: handoff.Whole, Request: id.Request(r.GetRequestId()), Transfer: id.Transfer(r.GetTransferId()), Nonce: id.Nonce(r.GetNonce()),
		PrefillEpoch: l.epoch, DecodeEpoch: id.Epoch(r.GetDecode().GetEpoch()), Model: l.digest, TokenDigest: handoff.TokenDigest(tokens),
	})
	defer offer.Abort()
	if err := offer.Complete(filled.Sealed); err != nil {
		return nil, err
	}
	hc, err := peer.NewClient(r.GetDecode().GetAddress(), l.boot.Credentials, peer.Only(peer.Worker(peer.Decode, id.Epoch(r.GetDecode().GetEpoch()))))
	if err != nil {
		return nil, err
	}
	defer hc.CloseIdleConnections()
	_, err = workerv1connect.NewDecodeServiceClient(hc, peer.BaseURL).Offer(ctx, &workerv1.OfferRequest{
		RequestId: r.GetRequestId(), TransferId: r.GetTransferId(), Manifest: offer.Manifest(),
	})
	if err != nil {
		return nil, err
	}
	root := offer.Root()
	return &workerv1.PrefillResponse{Facts: &workerv1.LegFacts{
		Epoch: l.epoch[:], Tokens: uint32(filled.Tokens), ManifestRoot: root[:],
	}}, nil
}
