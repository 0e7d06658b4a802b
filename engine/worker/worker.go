package worker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sync/errgroup"

	"bulkhead.dev/engine/fabric"
	"bulkhead.dev/engine/history"
	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/model"
	"bulkhead.dev/engine/model/gguf"
	"bulkhead.dev/engine/model/tokenizer"
	"bulkhead.dev/engine/sched"
	"bulkhead.dev/engine/worker/harden"
	"bulkhead.dev/engine/worker/peer"
	"bulkhead.dev/services/gen/bulkhead/pool/v1/poolv1connect"
	"bulkhead.dev/services/gen/bulkhead/worker/v1/workerv1connect"
)

const (
	// headerTimeout bounds how long a caller may take for the head of a
	// request; all callers are processes of the platform.
	headerTimeout = 10 * time.Second
	// closeTimeout is how long calls that were told to end may take to do so.
	closeTimeout = 5 * time.Second
	// spareStreams leaves room on a connection for calls that are refused, and
	// for Offer and Drain.
	spareStreams = 64
	// messageBase and messagePerToken bound a message: ids and settings, and a
	// token id (varint, or the share of a manifest entry) for each position.
	messageBase     = 1 << 16
	messagePerToken = 8
)

// worker is what both legs have.
type worker struct {
	set     settings
	log     *slog.Logger
	now     func() time.Time
	forward sched.Forwarder
	window  int // context window that is served, tokens
	level   string
	pool    *kv.Pool
	gate    *sched.Gate

	history      *history.Writer
	freed        chan struct{} // holds one element when pages were freed
	draining     atomic.Bool
	stopping     atomic.Bool
	front        poolv1connect.RegistrationServiceClient
	frontHTTP    *http.Client
	refusals     refusals
	calls        calls
	handoffBytes atomic.Uint64
}

// leg is one of the two roles.
type leg interface {
	mount(*http.ServeMux, ...connect.HandlerOption)
	run(context.Context) error // the loop that owns the model
	tokens() uint64            // computed since the start
	close()                    // connections to other workers
}

// seams are where tests look in.
type seams struct {
	now  func() time.Time
	wrap func(sched.Forwarder) sched.Forwarder
	pool func(*kv.Pool) // is told the pool
	// decode is told the leg
	decode func(*decodeLeg)
}

// Run serves one leg until ctx ends, and then drains. It returns nil after an
// orderly end. An error says why the worker could not start or go on:
// ErrBoot, *CapacityError, a model file that is not the one named, a front that
// refuses the registration.
func Run(ctx context.Context, boot Boot, log *slog.Logger) error {
	return run(ctx, boot, log, seams{now: time.Now})
}

func run(ctx context.Context, boot Boot, log *slog.Logger, s seams) (err error) {
	if !boot.Debug {
		if err := harden.Apply(); err != nil {
			log.WarnContext(ctx, "process is not fully hardened", "error", err)
		}
	}
	set, err := boot.check()
	if err != nil {
		return err
	}
	f, llama, err := open(set)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	window := set.window(llama.Config.Context)
	if err := checkCapacity(set.Role, set.Pages, kv.PageTokens, window); err != nil {
		return err
	}
	rows := set.MaxRunning
	if set.Role == peer.Prefill {
		rows = set.Chunk
	}
	m, err := set.load(f, llama, rows)
	if err != nil {
		return fmt.Errorf("load model: %w", err)
	}
	defer func() { err = errors.Join(err, m.Close()) }()

	w := &worker{
		set: set, log: log.With("role", string(set.Role), "epoch", set.epoch.String()), now: s.now,
		forward: m, window: window, level: m.Level(), freed: make(chan struct{}, 1),
	}
	if err := w.connectFront(); err != nil {
		return err
	}
	defer w.frontHTTP.CloseIdleConnections()
	w.forward = steppedModel(m, string(set.Role))
	if s.wrap != nil {
		w.forward = s.wrap(w.forward)
	}
	memory := kv.Anonymous
	if set.Role == peer.Prefill {
		memory = kv.Memfd // decode workers of this host copy pages out of it
	}
	if w.pool, err = kv.New(kv.Config{
		Geometry: m.Geometry(), Pages: set.Pages + set.Quarantine, Scrub: set.scrub, Pattern: set.fill, Lock: set.LockMemory, Memory: memory, OnEvent: w.onPages,
		MaxQuarantine: set.Quarantine, CachePerOwner: set.CachePages, Now: s.now,
	}); err != nil {
		return fmt.Errorf("make page pool: %w", err)
	}
	if s.pool != nil {
		s.pool(w.pool)
	}
	w.warnArena(ctx)
	w.gate = sched.NewGate(w.pool, sched.GateOptions{Slots: set.MaxRunning, Queue: set.Queue, PerOwner: set.PerTenant, Now: s.now})

	if set.Role == peer.Prefill {
		l := newPrefillLeg(w)
		return w.serve(ctx, l, l.server)
	}
	tok, err := tokenizer.FromGGUF(f)
	if err != nil {
		return fmt.Errorf("load tokenizer: %w", err)
	}
	l := newDecodeLeg(w, func() sched.Text { return tok.NewDecoder() }, tok.IsEOG)
	if s.decode != nil {
		s.decode(l)
	}
	return w.serve(ctx, l, nil)
}

// open verifies the digest of the model file and opens it.
func open(set settings) (*gguf.File, *model.Llama, error) {
	digest, err := model.DigestFile(set.ModelPath)
	if err != nil {
		return nil, nil, fmt.Errorf("verify model file: %w", err)
	}
	if digest != set.digest {
		return nil, nil, fmt.Errorf("verify model file: it is %v, not %v", digest, set.digest)
	}
	f, err := gguf.Open(set.ModelPath)
	if err != nil {
		return nil, nil, fmt.Errorf("open model file: %w", err)
	}
	llama, err := model.LoadLlama(f)
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("read model file: %w", err), f.Close())
	}
	return f, llama, nil
}

// onPages is called under the lock of the pool.
func (w *worker) onPages(e kv.Event) {
	w.history.Note(e)
	// A page that is being wiped ahead is not to be had until it has been.
	if e.Kind == kv.EventFree || e.Kind == kv.EventClear || e.Kind == kv.EventScrub {
		select {
		case w.freed <- struct{}{}:
		default:
		}
	}
}

// recheck lets waiting work in when pages become free without anybody leaving
// the gate: after a quarantine.
func (w *worker) recheck(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-w.freed:
			w.gate.Recheck()
		}
	}
}

func (w *worker) warnArena(ctx context.Context) {
	a := w.pool.Arena()
	if w.set.LockMemory && !a.Locked {
		w.log.WarnContext(ctx, "pages may reach swap", "error", a.LockErr)
	}
	if a.DumpErr != nil {
		w.log.WarnContext(ctx, "pages may appear in a core dump", "error", a.DumpErr)
	}
	if a.MergeErr != nil {
		w.log.WarnContext(ctx, "pages may be merged with equal ones", "error", a.MergeErr)
	}
}

// serve listens, registers, and runs until ctx ends or a part fails.
func (w *worker) serve(ctx context.Context, l leg, pages *fabric.Server) error {
	calls, endCalls := context.WithCancel(context.WithoutCancel(ctx)) // the calls in flight
	defer endCalls()
	server, err := w.server(calls, l)
	if err != nil {
		return err
	}
	api, err := fabric.Listen(w.set.Listen, nil) // TLS comes with the HTTP server
	if err != nil {
		return fmt.Errorf("listen for the worker API: %w", err)
	}
	defer func() { _ = api.Close() }()
	var pageListener net.Listener
	if pages != nil {
		if pageListener, err = w.listenPages(); err != nil {
			return err
		}
		defer func() { _ = pageListener.Close() }()
	}
	reporter := w.newReporter(l, api, pageListener)

	// The history ends after everything that makes it.
	historyCtx, endHistory := context.WithCancel(context.WithoutCancel(ctx))
	defer endHistory()
	recorded := make(chan error, 1)
	go func() { recorded <- w.history.Run(historyCtx) }()

	g, failed := errgroup.WithContext(context.WithoutCancel(ctx))
	background, endBackground := context.WithCancel(failed)
	defer endBackground()
	g.Go(func() error {
		if err := server.ServeTLS(api, "", ""); !errors.Is(err, http.ErrServerClosed) {
			return fmt.Errorf("serve the worker API: %w", err)
		}
		return nil
	})
	g.Go(func() error { return l.run(background) })
	g.Go(func() error { return w.recheck(background) })
	if w.set.ScrubRate > 0 {
		g.Go(func() error { return w.pool.Scrub(background, w.set.ScrubRate) })
	}
	g.Go(func() error { return reporter.run(background) })
	if pages != nil {
		g.Go(func() error { return pages.Serve(background, pageListener) })
	}
	w.log.InfoContext(ctx, "worker started", "address", fabric.Address(api), "pages", w.set.Pages, "window", w.window, "cpu_level", w.level)

	select {
	case <-ctx.Done():
		w.drain(ctx)
	case <-failed.Done():
	}
	w.stopping.Store(true)
	endCalls()
	sctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancel()
	if server.Shutdown(sctx) != nil {
		_ = server.Close()
	}
	endBackground()
	err = g.Wait()
	l.close()
	endHistory()
	if herr := <-recorded; herr != nil {
		w.log.ErrorContext(ctx, "page history has a gap at its end", "events", w.history.Waiting(), "error", herr)
	}
	if cerr := w.pool.Close(); err == nil && cerr != nil {
		// The pages go with the process; what matters is that somebody held them.
		err = fmt.Errorf("close page pool: %w", cerr)
	}
	w.log.InfoContext(ctx, "worker stopped")
	return err
}

func (w *worker) listenPages() (net.Listener, error) {
	conf, err := w.set.Credentials.ServerConfig(peer.Decode.Allow)
	if err != nil {
		return nil, err
	}
	l, err := fabric.Listen(w.set.FabricListen, conf)
	if err != nil {
		return nil, fmt.Errorf("listen for page reads: %w", err)
	}
	return l, nil
}

// server makes the HTTP server of the worker API. Its calls end with ctx.
func (w *worker) server(ctx context.Context, l leg) (*http.Server, error) {
	conf, err := w.set.Credentials.ServerConfig(peer.Anyone) // each method says who may call it
	if err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	opts := []connect.HandlerOption{connect.WithReadMaxBytes(messageBase + messagePerToken*w.window)}
	l.mount(mux, opts...)
	mux.Handle(workerv1connect.NewControlServiceHandler(control{w}, opts...))
	var p http.Protocols
	p.SetHTTP2(true)
	return &http.Server{
		Handler:           peer.Middleware(crash(mux)),
		TLSConfig:         conf,
		Protocols:         &p,
		HTTP2:             &http.HTTP2Config{MaxConcurrentStreams: w.set.MaxRunning + w.set.Queue + spareStreams},
		ReadHeaderTimeout: headerTimeout,
		BaseContext:       func(net.Listener) context.Context { return ctx },
		ErrorLog:          slog.NewLogLogger(w.log.Handler(), slog.LevelDebug),
	}, nil
}

// crash ends the process when a handler panics. The HTTP server would go on, but
// a panic means that the books of the pool are wrong (see package kv), and then
// no page can be trusted to belong to whom it says.
func crash(next http.Handler) http.Handler {
	return http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		defer func() {
			if v := recover(); v != nil {
				go panic(v) // out of reach of the server's recover
				select {}
			}
		}()
		next.ServeHTTP(rw, r)
	})
}

// drain refuses new work and waits for what runs, at most for the drain time.
func (w *worker) drain(ctx context.Context) {
	idle := w.startDrain()
	t := time.NewTimer(time.Duration(w.set.DrainFor))
	defer t.Stop()
	select {
	case <-idle:
	case <-t.C:
		waiting, running := w.gate.Counts()
		w.log.WarnContext(ctx, "drain timeout", "running", running, "waiting", waiting)
	}
}

func (w *worker) startDrain() <-chan struct{} {
	w.draining.Store(true)
	return w.gate.Close()
}

// refused counts and logs a refusal and makes the error of the call. Ids and the
// reason go into the log, messages do not.
func (w *worker) refused(ctx context.Context, call string, n names, err error, m measured) error {
	if w.stopping.Load() && reasonOf(err) == Canceled {
		err = &refusal{Stopped, err}
	}
	out, reason := asError(err, w.facts(m))
	w.refusals.add(reason)
	w.log.DebugContext(ctx, "refused", "call", call, "request", n.request, "transfer", n.transfer, "reason", string(reason))
	return out
}
