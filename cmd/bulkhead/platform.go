package main

import (
	"cmp"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	pagehistory "bulkhead.dev/audit/history"
	"bulkhead.dev/audit/settle"
	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/model"
	"bulkhead.dev/engine/model/chat"
	"bulkhead.dev/engine/model/gguf"
	"bulkhead.dev/engine/model/store"
	"bulkhead.dev/engine/pool"
	"bulkhead.dev/engine/sim"
	"bulkhead.dev/engine/worker"
	"bulkhead.dev/engine/worker/peer"
	"bulkhead.dev/infra/config"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/infra/pgdb"
	"bulkhead.dev/infra/pgembed"
	"bulkhead.dev/infra/replica"
	"bulkhead.dev/infra/secret"
	"bulkhead.dev/infra/telemetry"
	"bulkhead.dev/services/gateway"
	"bulkhead.dev/tenancy"
	"bulkhead.dev/tenancy/quota"
)

// platform is everything that `bulkhead up` runs. Its parts are made in the
// order of the fields and closed in the reverse.
type platform struct {
	cfg     config.Config
	log     *slog.Logger
	metrics *telemetry.Metrics
	dir     string
	lock    *os.File
	keys    tenancy.KeyFile
	model   store.Entry
	store   *store.Store
	shape   shape

	postgres *pgembed.Server // nil with DATABASE_URL
	pools    *pgdb.Pools
	replica  id.Epoch
	firstKey secret.String // API key of the first start, else empty
	auth     *tenancy.Authenticator
	settler  *settle.Settler
	member   *replica.Member
	quota    *quota.Book

	runDir    string
	authority *peer.Authority
	registry  *pool.Registry
	prefill   *keeper
	decode    *keeper
	prompts   *gateway.Files
	gateway   *gateway.Gateway
	ready     atomic.Bool // the platform was ready once
	draining  atomic.Bool

	servers      []*server // of clients and operations
	reports      *server   // of the workers, which outlasts them
	keeping      sync.WaitGroup
	url          string
	opsURL       string
	closers      []func() error
	databaseGone <-chan struct{}
	stopWorkers  context.CancelFunc
}

// shape is what the front needs to know of a model file.
type shape struct {
	digest   [32]byte
	context  int
	geometry kv.Geometry
	chat     bool
}

// startPlatform makes everything up to the listeners. ctx ends the start; work
// that it starts lives on hard.
func startPlatform(ctx, hard context.Context, cfg config.Config, e *env, log *slog.Logger) (_ *platform, err error) {
	p := &platform{cfg: cfg, log: log, metrics: telemetry.NewMetrics(), replica: id.NewEpoch(time.Now())}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.close())
		}
	}()
	for _, step := range []func(context.Context, *env) error{
		p.openData, p.openModel, p.openDatabase, p.openTenancy,
		func(context.Context, *env) error { return p.openWorkers() },
		func(context.Context, *env) error { return p.openGateway() },
		func(context.Context, *env) error { return p.openListeners(hard) },
	} {
		if err := step(ctx, e); err != nil {
			return nil, err
		}
	}
	return p, nil
}

func (p *platform) onClose(f func() error) { p.closers = append(p.closers, f) }

// close undoes what was made, last first.
func (p *platform) close() error {
	var errs []error
	for i := len(p.closers) - 1; i >= 0; i-- {
		errs = append(errs, p.closers[i]())
	}
	p.closers = nil
	return errors.Join(errs...)
}

func (p *platform) openData(_ context.Context, e *env) (err error) {
	if p.dir, err = dataDir(p.cfg.Data, e.getenv); err != nil {
		return err
	}
	if p.lock, err = openDataDir(p.dir); err != nil {
		return err
	}
	p.onClose(p.lock.Close)
	if p.keys, err = tenancy.OpenKeyFile(filepath.Join(p.dir, keysFile)); err != nil {
		return err
	}
	// Sockets have short paths, so they cannot always be in the data folder.
	if p.runDir, err = os.MkdirTemp("", "bulkhead-"); err != nil { // mode 0700
		return fmt.Errorf("make folder for sockets: %w", err)
	}
	p.onClose(func() error { return os.RemoveAll(p.runDir) })
	return nil
}

func (p *platform) openModel(ctx context.Context, e *env) (err error) {
	if p.store, err = store.Open(filepath.Join(p.dir, modelsDir), time.Now); err != nil {
		return err
	}
	if p.model, err = resolveModel(ctx, p.store, p.cfg.Model, e); err != nil {
		return err
	}
	f, err := gguf.Open(p.store.Path(p.model))
	if err != nil {
		return fmt.Errorf("model %s: %w", p.model.Name, err)
	}
	defer f.Close()
	l, err := model.LoadLlama(f)
	if err != nil {
		return fmt.Errorf("model %s: %w", p.model.Name, err)
	}
	digest, err := model.ParseDigest(p.model.Digest)
	if err != nil {
		return fmt.Errorf("model %s: %w", p.model.Name, err)
	}
	dtype := kv.F16
	if p.cfg.Worker.KVType == "f32" {
		dtype = kv.F32
	}
	window := l.Config.Context
	if w := p.cfg.Worker.ContextWindow; w > 0 {
		window = min(window, w)
	}
	p.shape = shape{digest: digest, context: window, geometry: kv.Geometry{Layers: l.Config.Layers,
		KVHeads: l.Config.KVHeads, HeadDim: l.Config.HeadDim, PageTokens: kv.PageTokens, DType: dtype, Layout: kv.Layout1}}
	if p.cfg.Worker.Backend == config.Simulated {
		p.shape.geometry = sim.Geometry(dtype)
		p.log.WarnContext(ctx, "THE ENGINE IS SIMULATED: answers are words without meaning; set worker.backend to compute them")
	}
	return nil
}

func (p *platform) openDatabase(ctx context.Context, e *env) error {
	src := pgdb.Source{DSN: p.cfg.DatabaseURL, RoleSecret: p.keys.PostgresSecret()}
	if src.DSN.IsZero() {
		bin, err := p.findPostgres(ctx, e)
		if err != nil {
			return err
		}
		password := superuserPassword(p.keys)
		p.postgres, err = pgembed.Start(ctx, pgembed.Options{Dir: filepath.Join(p.dir, postgresDir), Bin: bin, Password: password})
		if err != nil {
			return fmt.Errorf("start the private database: %w", err)
		}
		p.onClose(p.postgres.Close)
		src.DSN, src.Password = secret.New(p.postgres.DSN("postgres")), password
		p.databaseGone = p.postgres.Done()
	}
	from, to, err := pgdb.Migrate(ctx, src)
	if err != nil {
		return fmt.Errorf("prepare the database: %w", err)
	}
	if from != to {
		p.log.InfoContext(ctx, "database migrated", "from", from, "to", to)
	}
	if p.pools, err = pgdb.Open(ctx, src, pgdb.DefaultSizes); err != nil {
		return fmt.Errorf("open the database: %w", err)
	}
	p.onClose(func() error { p.pools.Close(); return nil })
	return nil
}

// superuserPassword derives the password of the private server's superuser.
func superuserPassword(keys tenancy.KeyFile) secret.String {
	m := hmac.New(sha256.New, []byte(keys.PostgresSecret().Reveal()))
	m.Write([]byte("bulkhead superuser v1"))
	return secret.New(hex.EncodeToString(m.Sum(nil)))
}

func (p *platform) findPostgres(ctx context.Context, e *env) (string, error) {
	fetched := filepath.Join(p.dir, binariesDir)
	bin, err := pgembed.FindBin(p.cfg.PostgresBin, fetched)
	if !errors.Is(err, pgembed.ErrNoBinaries) {
		return bin, err
	}
	if p.cfg.PostgresBin != "" {
		return "", fmt.Errorf("%s has no initdb and postgres; correct BULKHEAD_PG_BIN, or leave it out", p.cfg.PostgresBin)
	}
	if err := os.MkdirAll(fetched, 0o755); err != nil {
		return "", fmt.Errorf("make folder for PostgreSQL: %w", err)
	}
	return pgembed.Fetch(ctx, fetched, pgembed.FetchOptions{Env: os.Environ(), Progress: func(s pgembed.Stage) {
		fmt.Fprintf(e.stderr, "No PostgreSQL on this machine: %s; this happens once.\n", s)
	}})
}

func (p *platform) openTenancy(ctx context.Context, _ *env) error {
	tenants := tenancy.NewStore(p.pools.App, p.keys, time.Now)
	_, err := tenants.FirstRun(ctx, func(f tenancy.First) error {
		p.firstKey = f.TenantKey
		return writeSecret(filepath.Join(p.dir, operatorKeyFile), f.OperatorKey.Reveal()+"\n")
	})
	if err != nil {
		return fmt.Errorf("make the first tenant: %w", err)
	}
	p.auth = tenancy.NewAuthenticator(p.pools.Auth, p.keys, time.Now)
	p.onClose(func() error { p.auth.Close(); return nil })

	// The sandbox of chat templates is compiled once for this machine.
	engine := chat.NewEngine(chat.EngineOptions{CacheDir: filepath.Join(p.dir, cacheDir)})
	p.onClose(func() error { return engine.Close(context.Background()) })
	p.prompts = &gateway.Files{Path: p.modelPath, ChatOptions: chat.Options{Engine: engine, AllowUnlisted: p.cfg.UnlistedTemplates}}
	p.onClose(p.prompts.Close)
	prompter, err := p.prompts.Prompter(ctx, p.shape.digest)
	if err != nil {
		return fmt.Errorf("model %s: %w", p.model.Name, err)
	}
	p.shape.chat = prompter.Chat()
	if why := prompter.WhyNoChat(); why != nil {
		p.log.WarnContext(ctx, "the model cannot chat, only complete; unlisted_templates allows a template that was not checked",
			"model", p.model.Name, "cause", why.Error())
	}
	catalog := tenancy.NewCatalog(p.pools.Background)
	err = catalog.UpsertModel(ctx, tenancy.Model{
		Name: p.model.Name, Digest: p.shape.digest, Bytes: p.model.Bytes, Architecture: "llama", ContextWindow: p.shape.context,
		DefaultOutputTokens: p.cfg.Limits.DefaultOutputTokens, Chat: p.shape.chat, Source: p.model.Source, Licence: p.model.Licence,
		Created: p.model.Added,
	})
	if err != nil {
		return fmt.Errorf("list the model: %w", err)
	}

	// Closed after the settler, so that what it still writes is this replica's.
	if err := p.openReplica(ctx); err != nil {
		return err
	}
	p.settler = settle.New(settle.Options{DB: p.pools.Settle, Replica: p.replica, Log: p.log, Now: time.Now, HoldFor: p.cfg.Timeout.Evidence.Std()})
	p.settler.Start()
	p.onClose(func() error {
		ctx, cancel := context.WithTimeout(context.Background(), p.cfg.Timeout.Evidence.Std())
		defer cancel()
		return p.settler.Stop(ctx)
	})
	return p.endOthers(ctx)
}

func (p *platform) modelPath(digest [32]byte) (string, error) {
	if digest != p.shape.digest {
		return "", errors.New("no worker serves this model")
	}
	return p.store.Path(p.model), nil
}

func (p *platform) openWorkers() (err error) {
	if p.authority, err = peer.NewAuthority(time.Now); err != nil {
		return err
	}
	mine, err := p.authority.Issue(peer.Gateway())
	if err != nil {
		return err
	}
	p.registry = pool.NewRegistry(pool.Options{
		Now: time.Now,
		Client: func(address string, role pool.Role, epoch id.Epoch) (*http.Client, string, error) {
			c, err := peer.NewClient(address, mine, peer.Only(peer.Worker(peer.Role(role), epoch)))
			return c, "https://worker", err
		},
		Identity: func(ctx context.Context) (id.Epoch, pool.Role, bool) {
			who, ok := peer.FromContext(ctx)
			return who.Epoch, pool.Role(who.Role), ok && !who.Gateway
		},
		CheckCapacity: func(role pool.Role, pages, pageTokens, window int) error {
			return worker.CheckCapacity(peer.Role(role), pages, pageTokens, window)
		},
		History: pagehistory.NewStore(p.pools.Settle).Append,
		Changed: p.workerChanged,
	})
	front := "unix:" + filepath.Join(p.runDir, "front")
	if err := p.serveRegistration(front, mine); err != nil {
		return err
	}
	exe, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	prefillPages, decodePages := p.poolPages()
	w := p.cfg.Worker
	make := func(role peer.Role, pages int) *keeper {
		return &keeper{
			role: role, authority: p.authority, registry: p.registry, restarted: p.metrics.WorkerRestarted, ready: &p.ready, log: p.log,
			exe: exe, sockets: p.runDir, grace: p.cfg.Timeout.Drain.Std() + workerGrace,
			args: []string{"engine", "--parent", fmt.Sprint(os.Getpid()), "--log-level", p.cfg.Log.Level, "--log-format", p.cfg.Log.Format},
			boot: worker.Boot{
				Role: role, ModelPath: p.store.Path(p.model), ModelDigest: p.model.Digest, Front: front,
				Threads: w.ThreadsOrDefault(), Backend: w.Backend, Pages: pages, KVType: w.KVType, Scrub: w.Scrub, LockMemory: true,
				Sim:        worker.Sim{PromptToken: micros(w.Sim.PromptTokenUS), Step: micros(w.Sim.StepUS), Sequence: micros(w.Sim.SequenceUS)},
				Window:     w.ContextWindow,
				Quarantine: cmp.Or(w.QuarantinePages, max(pages/16, 1)), ScrubRate: int64(w.ScrubMBPerSecond) * 1e6, Handoff: w.HandoffVersion,
				MaxRunning: w.MaxRunning, Queue: w.Queue, PerTenant: p.cfg.Limits.TenantConcurrency,
				OfferWait: worker.Span(p.cfg.Timeout.Handoff), DrainFor: worker.Span(p.cfg.Timeout.Drain), Build: buildText(),
			},
		}
	}
	p.prefill, p.decode = make(peer.Prefill, prefillPages), make(peer.Decode, decodePages)
	p.prefill.boot.Chunk = w.PrefillChunk
	p.prefill.boot.CachePages = prefillPages * w.PrefixCachePercent / 100
	if p.cfg.Log.Format == "" {
		format := "json"
		if telemetry.IsTerminal(os.Stderr) {
			format = "text"
		}
		for _, k := range []*keeper{p.prefill, p.decode} {
			k.args[len(k.args)-1] = format
		}
	}
	return nil
}

func micros(n int) worker.Span { return worker.Span(time.Duration(n) * time.Microsecond) }

// workerGrace is what a worker gets on top of its drain before it is killed.
const workerGrace = 2 * time.Second

// poolPages returns the pages of the two pools.
func (p *platform) poolPages() (prefill, decode int) {
	g := p.shape.geometry
	window := g.PagesFor(p.shape.context)
	fit := func(tokens, windows int) int {
		if tokens > 0 {
			return g.PagesFor(tokens)
		}
		pages := windows * window
		if mem := meminfo("MemTotal") * 1000 / 4; mem > 0 {
			pages = min(pages, int(mem)/g.PageBytes())
		}
		return max(pages, window) // less could not hold one full request
	}
	return fit(p.cfg.Worker.PrefillPoolTokens, 2), fit(p.cfg.Worker.DecodePoolTokens, 4)
}

func (p *platform) workerChanged(w *pool.Worker, gone bool) {
	p.log.Info("worker changed", "gone", gone, "role", string(w.Role), "epoch", w.Epoch.String(), "pages", w.Pages, "cpu", w.CPULevel)
	ctx, cancel := context.WithTimeout(context.Background(), recordWorker)
	defer cancel()
	if err := p.recordWorker(ctx, w, gone); err != nil {
		// The registry in memory decides; the row is for receipts of later.
		p.log.Warn("worker was not recorded", "epoch", w.Epoch.String(), "error", err)
	}
}

// recordWorker bounds the wait for a row that nothing depends on.
const recordWorker = 2 * time.Second

func (p *platform) openGateway() error {
	p.gateway = &gateway.Gateway{
		Catalog: &gateway.CachedCatalog{From: tenancy.NewCatalog(p.pools.App), Now: time.Now}, Prompts: p.prompts, Pool: p.registry, Evidence: evidence{p.settler}, Quota: p.quota, Observer: p.metrics,
		Log: p.log, Now: time.Now, Seed: rand.Uint64, DigestKey: p.keys.DigestKey, Replica: p.replica,
	}
	p.onClose(func() error { p.gateway.Wait(); return nil })
	p.metrics.Collect(p.workerStats, p.poolStats, func() telemetry.LimitStats { return telemetry.LimitStats(p.quota.Counts()) })
	return nil
}

// run starts what runs until the end. It ends when ctx does or a part fails.
func (p *platform) run(g *errgroup.Group, ctx context.Context) {
	workers, stop := context.WithCancel(context.WithoutCancel(ctx))
	p.stopWorkers = stop
	for _, k := range []*keeper{p.prefill, p.decode} {
		p.keeping.Add(1)
		g.Go(func() error {
			defer p.keeping.Done()
			return k.Run(workers)
		})
	}
	for _, s := range append(p.servers, p.reports) {
		g.Go(s.run)
	}
	g.Go(func() error { return p.member.Run(workers) })
	if p.databaseGone != nil {
		g.Go(func() error {
			select {
			case <-p.databaseGone:
				return fmt.Errorf("the private database ended: %w", p.postgres.Err())
			case <-workers.Done():
				return nil
			}
		})
	}
}

func (p *platform) waitReady(ctx context.Context) error {
	if err := p.registry.WaitReady(ctx, p.shape.digest); err != nil {
		return err
	}
	p.ready.Store(true)
	return nil
}

// stop drains: listeners take nothing new, running requests go on for at most
// the given time, then the workers end, and last the listener that they report to.
// hard ends all waiting.
func (p *platform) stop(g *errgroup.Group, hard context.Context, drain time.Duration) error {
	p.draining.Store(true)
	ctx, cancel := context.WithTimeout(hard, drain)
	defer cancel()
	for _, s := range p.servers {
		s.shutdown(ctx)
	}
	p.stopWorkers()
	if hard.Err() != nil || drain == 0 {
		p.prefill.Kill()
		p.decode.Kill()
	} else {
		go func() {
			<-hard.Done()
			p.prefill.Kill()
			p.decode.Kill()
		}()
	}
	p.keeping.Wait()
	p.reports.shutdown(ctx)
	return g.Wait()
}

// server is a listener that is served.
type server struct {
	http *http.Server
	l    net.Listener
	tls  bool
}

func (s *server) run() error {
	var err error
	if s.tls {
		err = s.http.ServeTLS(s.l, "", "")
	} else {
		err = s.http.Serve(s.l)
	}
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return fmt.Errorf("serve %s: %w", s.l.Addr(), err)
}

// shutdown waits for running requests until ctx ends, and then cuts them off.
func (s *server) shutdown(ctx context.Context) {
	if s.http.Shutdown(ctx) != nil {
		_ = s.http.Close()
	}
}
