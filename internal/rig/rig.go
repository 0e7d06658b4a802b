package rig

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"

	"connectrpc.com/connect"

	"bulkhead.dev/audit/receipt"
	"bulkhead.dev/audit/settle"
	"bulkhead.dev/engine/history"
	"bulkhead.dev/engine/model"
	"bulkhead.dev/engine/model/chat"
	"bulkhead.dev/engine/model/gguf"
	"bulkhead.dev/engine/pool"
	"bulkhead.dev/engine/worker"
	"bulkhead.dev/engine/worker/peer"
	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/services/gateway"
	"bulkhead.dev/services/gen/bulkhead/pool/v1/poolv1connect"
	"bulkhead.dev/services/httpx"
	"bulkhead.dev/services/openai"
	"bulkhead.dev/tenancy"
	"bulkhead.dev/tenancy/quota"
)

// Options say what to run. Model and Tenants are needed.
type Options struct {
	// Model is the path of a GGUF file.
	Model string
	// Tenants is how many there are; see Rig.Key and Rig.Owner.
	Tenants int
	// Prefill and Decode change the boot documents of the workers.
	Prefill, Decode func(*worker.Boot)
	// PrefillProgram and DecodeProgram name what the processes run, out of those
	// given to Main; "" is a worker as it is released.
	PrefillProgram, DecodeProgram string
	// Args are given to the worker processes, after the name of the program.
	Args []string
	// CheckCapacity and Workers replace parts of the front; nil is the real one.
	CheckCapacity func(role pool.Role, pages, pageTokens, window int) error
	Workers       func(*pool.Registry) gateway.Workers
	// Believe takes receipts as they come. The format of receipts cannot say that
	// an answer is complete whose counts do not agree, which would hold back the
	// end of such an answer.
	Believe bool
	// Logs gets what the processes and the front write; nil is thrown away.
	Logs *os.File
}

func (o Options) log() *slog.Logger {
	if o.Logs == nil {
		return quiet
	}
	return slog.New(slog.NewJSONHandler(o.Logs, nil))
}

// Rig is a running platform.
type Rig struct {
	// URL is the address of the OpenAI surface.
	URL string
	// Registry knows the workers.
	Registry *pool.Registry
	// Prefill and Decode are the worker processes.
	Prefill, Decode *Process
	// Digest identifies the model.
	Digest model.Digest

	believe   bool
	dir       string
	window    int
	authority *peer.Authority
	gateway   *gateway.Gateway
	prompts   *gateway.Files
	engine    *chat.Engine
	servers   []*http.Server
	serving   sync.WaitGroup

	mu       sync.Mutex
	receipts []receipt.Receipt
	links    map[id.Epoch]history.Link
}

// Start runs a platform. Close it.
func Start(ctx context.Context, o Options) (_ *Rig, err error) {
	r := &Rig{believe: o.Believe, links: map[id.Epoch]history.Link{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.Close())
		}
	}()
	if r.Digest, err = model.DigestFile(o.Model); err != nil {
		return nil, fmt.Errorf("read the model: %w", err)
	}
	if r.window, err = window(o.Model); err != nil {
		return nil, err
	}
	// Names of sockets have to be short.
	if r.dir, err = os.MkdirTemp("", "rig"); err != nil {
		return nil, fmt.Errorf("make a folder for sockets: %w", err)
	}
	if r.authority, err = peer.NewAuthority(time.Now); err != nil {
		return nil, err
	}
	mine, err := r.authority.Issue(peer.Gateway())
	if err != nil {
		return nil, err
	}
	r.openRegistry(mine, o)
	if err := r.serveRegistration(mine); err != nil {
		return nil, err
	}
	if err := r.openGateway(o); err != nil {
		return nil, err
	}
	if err := r.serveOpenAI(o); err != nil {
		return nil, err
	}
	r.Prefill = r.process(peer.Prefill, o.PrefillProgram, o.Prefill, o)
	r.Decode = r.process(peer.Decode, o.DecodeProgram, o.Decode, o)
	for _, p := range []*Process{r.Prefill, r.Decode} {
		if err := p.Start(); err != nil {
			return nil, err
		}
	}
	return r, r.ready(ctx)
}

func window(path string) (n int, err error) {
	f, err := gguf.Open(path)
	if err != nil {
		return 0, fmt.Errorf("open the model: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	m, err := model.LoadLlama(f)
	if err != nil {
		return 0, fmt.Errorf("read the model: %w", err)
	}
	return m.Config.Context, nil
}

// ErrRefused means that a worker was not let in, or did not start.
var ErrRefused = errors.New("a worker ended before it was ready")

// ready waits until both legs serve, or one of them ends.
func (r *Rig) ready(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	for _, p := range []*Process{r.Prefill, r.Decode} {
		done := p.Done()
		go func() {
			select {
			case <-done:
				cancel(fmt.Errorf("%w: %s: %s", ErrRefused, p.role, p.LastLine()))
			case <-ctx.Done():
			}
		}()
	}
	return r.Registry.WaitReady(ctx, r.Digest)
}

// WaitReady waits until both legs serve.
func (r *Rig) WaitReady(ctx context.Context) error { return r.Registry.WaitReady(ctx, r.Digest) }

func (r *Rig) openRegistry(mine peer.Credentials, o Options) {
	check := o.CheckCapacity
	if check == nil {
		check = func(role pool.Role, pages, pageTokens, window int) error {
			return worker.CheckCapacity(peer.Role(role), pages, pageTokens, window)
		}
	}
	r.Registry = pool.NewRegistry(pool.Options{
		Now: time.Now,
		Client: func(address string, role pool.Role, epoch id.Epoch) (*http.Client, string, error) {
			c, err := peer.NewClient(address, mine, peer.Only(peer.Worker(peer.Role(role), epoch)))
			return c, peer.BaseURL, err
		},
		Identity: func(ctx context.Context) (id.Epoch, pool.Role, bool) {
			who, ok := peer.FromContext(ctx)
			return who.Epoch, pool.Role(who.Role), ok && !who.Gateway
		},
		CheckCapacity: check,
		History:       r.history,
		Changed:       func(*pool.Worker, bool) {},
	})
}

// history keeps nothing of what it is told, but checks it.
func (r *Rig) history(_ context.Context, epoch id.Epoch, blocks [][]byte) (uint64, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, b := range blocks {
		if h, err := history.DecodeHeader(b); err == nil && h.Number <= r.links[epoch].Number {
			continue // delivered before, but the answer was lost
		}
		_, next, err := r.links[epoch].Next(epoch, b)
		if err != nil {
			return 0, err
		}
		r.links[epoch] = next
	}
	return r.links[epoch].Number, nil
}

func (r *Rig) serveRegistration(mine peer.Credentials) error {
	conf, err := mine.ServerConfig(func(i peer.Identity) bool { return !i.Gateway })
	if err != nil {
		return err
	}
	l, err := net.Listen("unix", r.front())
	if err != nil {
		return fmt.Errorf("listen for workers: %w", err)
	}
	mux := http.NewServeMux()
	mux.Handle(poolv1connect.NewRegistrationServiceHandler(r.Registry, connect.WithReadMaxBytes(pool.MaxMessage)))
	s := httpx.NewServer(peer.Middleware(mux), httpx.ServerOptions{TLS: conf, Log: quiet})
	r.serve(s, func() error { return s.ServeTLS(l, "", "") })
	return nil
}

func (r *Rig) front() string { return filepath.Join(r.dir, "front") }

var quiet = slog.New(slog.DiscardHandler)

func (r *Rig) serve(s *http.Server, f func() error) {
	r.servers = append(r.servers, s)
	r.serving.Go(func() { _ = f() })
}

func (r *Rig) openGateway(o Options) error {
	// What is compiled once serves every rig on this machine.
	r.engine = chat.NewEngine(chat.EngineOptions{CacheDir: filepath.Join(os.TempDir(), "bulkhead-rig")})
	r.prompts = &gateway.Files{
		Path:        func([32]byte) (string, error) { return o.Model, nil },
		ChatOptions: chat.Options{Engine: r.engine, AllowUnlisted: true},
	}
	var workers gateway.Workers = r.Registry
	if o.Workers != nil {
		workers = o.Workers(r.Registry)
	}
	r.gateway = &gateway.Gateway{
		Catalog: catalog{r}, Prompts: r.prompts, Pool: workers, Evidence: evidence{r}, Quota: unlimited{}, Observer: observer{}, Log: o.log(),
		Now: time.Now, Seed: func() uint64 { return 1 }, DigestKey: func(id.Tenant) (string, [32]byte) { return "rig", [32]byte{1} },
		Replica: id.NewEpoch(time.Now()),
	}
	return nil
}

// backend is the gateway as the OpenAI surface sees it.
type backend struct{ *gateway.Gateway }

func (b backend) Generate(ctx context.Context, p tenancy.Principal, q gateway.Request) (openai.Stream, error) {
	s, err := b.Gateway.Generate(ctx, p, q)
	if err != nil {
		return nil, err
	}
	return s, nil
}

func (r *Rig) serveOpenAI(o Options) error {
	h := openai.New(openai.Options{
		Backend: backend{r.gateway}, Keys: keys(o.Tenants), BodyLimit: 8 << 20,
		Edge: &httpx.Edge{Log: o.log(), Now: time.Now, Observer: observer{}},
	})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	r.URL = "http://" + l.Addr().String()
	s := httpx.NewServer(h, httpx.ServerOptions{Log: quiet})
	r.serve(s, func() error { return s.Serve(l) })
	return nil
}

// Encode returns the token ids of a prompt as Ask makes it.
func (r *Rig) Encode(ctx context.Context, text string) ([]int32, error) {
	p, err := r.prompts.Prompter(ctx, r.Digest)
	if err != nil {
		return nil, err
	}
	return p.Encode(ctx, &gateway.Request{Messages: []chat.Message{{Role: "user", Content: text}}}, time.Now())
}

// Receipts returns the receipts of all requests that ended, in the order in
// which they were settled.
func (r *Rig) Receipts() []receipt.Receipt {
	r.gateway.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]receipt.Receipt(nil), r.receipts...)
}

// Close stops everything. It may be called on a rig that did not start.
func (r *Rig) Close() error {
	var errs []error
	// While workers live, the server that they report to has callers.
	for _, p := range []*Process{r.Prefill, r.Decode} {
		if p != nil {
			p.Kill()
		}
	}
	for _, s := range r.servers {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		if s.Shutdown(ctx) != nil {
			errs = append(errs, s.Close())
		}
		cancel()
	}
	if r.gateway != nil {
		r.gateway.Wait()
		errs = append(errs, r.prompts.Close(), r.engine.Close(context.Background()))
	}
	r.serving.Wait()
	if r.dir != "" {
		errs = append(errs, os.RemoveAll(r.dir))
	}
	return errors.Join(errs...)
}

// Model is the name under which the model is served.
const Model = "rig"

type catalog struct{ r *Rig }

func (c catalog) model() tenancy.Model {
	return tenancy.Model{Name: Model, Digest: c.r.Digest, ContextWindow: c.r.window, DefaultOutputTokens: 64, Chat: true}
}

func (c catalog) Models(context.Context) ([]tenancy.Model, error) {
	return []tenancy.Model{c.model()}, nil
}

func (c catalog) ModelByName(_ context.Context, name string) (tenancy.Model, error) {
	if name != Model {
		return tenancy.Model{}, apperr.New(apperr.NotFound, "model_not_found", "There is no such model.")
	}
	return c.model(), nil
}

// evidence keeps receipts in memory.
type evidence struct{ r *Rig }

// unlimited is a platform without limits.
type unlimited struct{}

func (unlimited) Reserve(context.Context, quota.Ask) (*quota.Reservation, error) {
	return new(quota.Reservation), nil
}

// written is an intent that is as good as durable.
type written struct{}

func (written) Done() <-chan struct{} {
	done := make(chan struct{})
	close(done)
	return done
}

func (evidence) Ready() error                        { return nil }
func (evidence) Intend(settle.Intent) gateway.Ticket { return written{} }

func (e evidence) Settle(_ context.Context, f settle.Facts) error {
	if _, err := f.Receipt.Encode(); err != nil && !e.r.believe {
		return err
	}
	e.r.mu.Lock()
	defer e.r.mu.Unlock()
	e.r.receipts = append(e.r.receipts, f.Receipt)
	return nil
}

type observer struct{}

func (observer) Admitted() func()                      { return func() {} }
func (observer) FirstToken(time.Duration)              {}
func (observer) NextToken(time.Duration)               {}
func (observer) Refused(string, string)                {}
func (observer) Settled(time.Duration, int, int)       {}
func (observer) Withheld()                             {}
func (observer) Request(string, string, time.Duration) {}
func (observer) Unauthenticated()                      {}

// keys are the API keys of so many tenants.
type keys int

// Key returns the API key of the n-th tenant, counted from 0.
func Key(n int) string { return fmt.Sprintf("rig-key-%d", n) }

// Owner returns the owner tag of the n-th tenant.
func Owner(n int) id.Owner { return principal(n).Owner }

func principal(n int) tenancy.Principal {
	h := sha256.Sum256(fmt.Appendf(nil, "rig tenant %d", n))
	tenant := id.Tenant(h[:16])
	return tenancy.Principal{
		Tenant: tenant, Project: id.Project(h[8:24]), Key: id.Key(h[16:]), Owner: tenancy.OwnerTag([32]byte{1}, tenant, 1),
		Scopes: tenancy.ScopesDefault,
	}
}

func (k keys) Authenticate(_ context.Context, bearer string) (tenancy.Principal, error) {
	for n := range int(k) {
		if Key(n) == bearer {
			return principal(n), nil
		}
	}
	return tenancy.Principal{}, apperr.New(apperr.Unauthenticated, "invalid_api_key", "There is no such key.")
}
