package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"syscall"
	"time"

	"connectrpc.com/connect"

	"bulkhead.dev/audit"
	"bulkhead.dev/audit/settle"
	"bulkhead.dev/engine/pool"
	"bulkhead.dev/engine/worker/peer"
	"bulkhead.dev/infra/telemetry"
	"bulkhead.dev/services/gateway"
	poolv1connect "bulkhead.dev/services/gen/bulkhead/pool/v1/poolv1connect"
	"bulkhead.dev/services/httpx"
	"bulkhead.dev/services/openai"
	"bulkhead.dev/services/rpc"
	"bulkhead.dev/tenancy"
)

// maxRPC bounds a message of the Connect services, bytes.
const maxRPC = 8 << 20

// openListeners opens the public and the operations listener. hard is the
// context of requests: it outlives the signal that starts the drain.
func (p *platform) openListeners(hard context.Context) error {
	edge := &httpx.Edge{Log: p.log, Now: time.Now, Observer: p.metrics, TrustedProxies: p.cfg.Public.TrustedProxies}
	rest := openai.New(openai.Options{Backend: openaiBackend{p.gateway}, Keys: p.auth, Edge: edge, BodyLimit: p.cfg.Limits.BodyBytes})
	tenants := tenancy.NewStore(p.pools.App, p.keys, time.Now)
	connect := rpc.New(rpc.Options{
		Backend: rpcBackend{p.gateway}, Tenants: tenants, Limits: tenants, Receipts: audit.NewReader(p.pools.App),
		Workers: p.registry,
		Keys:    p.auth, Edge: edge, ReadLimit: maxRPC, Ready: p.isReady,
	})
	o := httpx.ServerOptions{BehindProxy: p.cfg.Public.BehindProxy, Log: p.log}
	scheme := "http"
	if p.cfg.Public.TLSCert != "" {
		cert, err := tls.LoadX509KeyPair(p.cfg.Public.TLSCert, p.cfg.Public.TLSKey)
		if err != nil {
			return fmt.Errorf("load public.tls_cert: %w", err)
		}
		o.TLS, scheme = &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12}, "https"
	}
	l, err := httpx.Listen(p.cfg.Public.Listen, o)
	if err != nil {
		return listenHelp(err, p.cfg.Public.Listen, "--listen")
	}
	p.onClose(func() error { return closed(l.Close()) })
	p.url = scheme + "://" + l.Addr().String()
	public := httpx.NewServer(routes(connect, rest), o)
	public.BaseContext = func(net.Listener) context.Context { return hard }
	ol, err := net.Listen("tcp", p.cfg.Ops.Listen)
	if err != nil {
		return listenHelp(err, p.cfg.Ops.Listen, "--ops-listen")
	}
	p.onClose(func() error { return closed(ol.Close()) })
	p.opsURL = "http://" + ol.Addr().String()
	// They are shut down in this order.
	p.servers = []*server{
		{http: public, l: l, tls: o.TLS != nil},
		{http: httpx.NewServer(p.operations(), httpx.ServerOptions{Log: p.log}), l: ol},
	}
	return nil
}

// routes sends the procedures of Connect to their handler and everything else
// to the OpenAI surface.
func routes(connect, rest http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.URL.Path, "/bulkhead.") || strings.HasPrefix(r.URL.Path, "/grpc.") {
			connect.ServeHTTP(w, r)
			return
		}
		rest.ServeHTTP(w, r)
	})
}

// closed forgives that a listener was closed by its server.
func closed(err error) error {
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

func listenHelp(err error, addr, flag string) error {
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return fmt.Errorf("%s is in use by another program; stop it, or choose another address with %s (port 0 takes a free one)", addr, flag)
	case errors.Is(err, syscall.EACCES):
		return fmt.Errorf("%s is not allowed for this user; choose a port above 1023 with %s", addr, flag)
	}
	return err
}

// operations serves what operators and orchestrators ask. It has no
// authentication and tells nothing about tenants.
func (p *platform) operations() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("ok\n")) })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if !p.isReady() {
			http.Error(w, p.whyNotReady(), http.StatusServiceUnavailable)
			return
		}
		_, _ = w.Write([]byte("ready\n"))
	})
	mux.Handle("GET /metrics", p.metrics.Handler())
	return mux
}

func (p *platform) isReady() bool { return p.whyNotReady() == "" }

func (p *platform) whyNotReady() string {
	if p.draining.Load() {
		return "draining"
	}
	if p.registry.EffectiveContext(p.shape.digest) == 0 {
		return "no workers"
	}
	pair, err := p.registry.Pick(p.shape.digest)
	if err != nil {
		return "a worker is missing"
	}
	pair.Release()
	if p.settler.Ready() != nil {
		return "receipts cannot be written"
	}
	return ""
}

// serveRegistration lets workers make themselves known.
func (p *platform) serveRegistration(address string, mine peer.Credentials) error {
	_, path, err := peer.SplitAddress(address)
	if err != nil {
		return err
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return fmt.Errorf("listen for workers: %w", err)
	}
	config, err := mine.ServerConfig(func(i peer.Identity) bool { return !i.Gateway })
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.Handle(poolv1connect.NewRegistrationServiceHandler(p.registry, connect.WithReadMaxBytes(pool.MaxMessage)))
	s := httpx.NewServer(peer.Middleware(mux), httpx.ServerOptions{TLS: config, Log: p.log})
	p.reports = &server{http: s, l: l, tls: true}
	p.onClose(func() error { return closed(l.Close()) })
	return nil
}

func (p *platform) recordWorker(ctx context.Context, w *pool.Worker, gone bool) error {
	return pool.Record(ctx, p.pools.Background, w, gone, time.Now())
}

func (p *platform) workerStats() []telemetry.WorkerStats {
	var out []telemetry.WorkerStats
	for _, s := range p.registry.Workers() {
		w := telemetry.WorkerStats{Role: string(s.Worker.Role), Live: s.Live, Pages: map[string]uint32{}, Refusals: map[string]uint64{}}
		if b := s.Heartbeat; b != nil {
			w.Queued, w.Running, w.Granted, w.Scrubbed = b.GetQueued(), b.GetRunning(), b.GetGrantedPages(), b.GetScrubbedPages()
			w.HandoffBytes, w.PrefillTokens, w.DecodeTokens = b.GetHandoffBytes(), b.GetPrefillTokens(), b.GetDecodeTokens()
			w.ScrubbedAhead, w.Cached, w.CachedTokens, w.MaxQuarantine = b.GetScrubbedAhead(), b.GetCachedPages(), b.GetCachedTokens(), b.GetMaxQuarantine()
			for _, c := range b.GetPages() {
				w.Pages[c.GetState()] = c.GetPages()
			}
			for _, c := range b.GetRefusals() {
				w.Refusals[c.GetReason()] = c.GetCount()
			}
		}
		out = append(out, w)
	}
	return out
}

func (p *platform) poolStats() []telemetry.PoolStats {
	var out []telemetry.PoolStats
	for _, s := range p.pools.Stats() {
		out = append(out, telemetry.PoolStats{Name: s.Name, Total: s.Total, Acquired: s.Total - s.Idle, Max: s.Max, Waits: s.EmptyAcquire})
	}
	return out
}

// The surfaces declare the stream they need as an interface; Go does not turn a
// method that returns a *gateway.Stream into one that returns it.
type openaiBackend struct{ *gateway.Gateway }

// Generate implements openai.Backend.
func (b openaiBackend) Generate(ctx context.Context, p tenancy.Principal, r gateway.Request) (openai.Stream, error) {
	s, err := b.Gateway.Generate(ctx, p, r)
	if err != nil {
		return nil, err
	}
	return s, nil
}

// evidence is the settler as the gateway sees it.
type evidence struct{ *settle.Settler }

// Intend implements gateway.Evidence.
func (e evidence) Intend(i settle.Intent) gateway.Ticket { return e.Settler.Intend(i) }

type rpcBackend struct{ *gateway.Gateway }

// Generate implements rpc.Backend.
func (b rpcBackend) Generate(ctx context.Context, p tenancy.Principal, r gateway.Request) (rpc.Stream, error) {
	s, err := b.Gateway.Generate(ctx, p, r)
	if err != nil {
		return nil, err
	}
	return s, nil
}
