package worker

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	"bulkhead.dev/engine/compute"
	"bulkhead.dev/engine/handoff"
	"bulkhead.dev/engine/history"
	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/model"
	"bulkhead.dev/engine/model/synth"
	"bulkhead.dev/engine/sched"
	"bulkhead.dev/engine/worker/peer"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
	poolv1 "bulkhead.dev/services/gen/bulkhead/pool/v1"
	"bulkhead.dev/services/gen/bulkhead/pool/v1/poolv1connect"
	workerv1 "bulkhead.dev/services/gen/bulkhead/worker/v1"
	"bulkhead.dev/services/gen/bulkhead/worker/v1/workerv1connect"
)

// cluster is a prefill and a decode worker with a front and a gateway in one
// process, over real sockets with real certificates.
type cluster struct {
	t         *testing.T
	dir       string
	authority *peer.Authority
	gateway   peer.Credentials
	front     *front
	model     string
	digest    model.Digest
	prefill   *instance
	decode    *instance
}

// instance is a running worker.
type instance struct {
	boot Boot
	who  peer.Identity
	hook *hook
	pool *kv.Pool
	leg  *decodeLeg
	logs *logBuffer
	stop context.CancelFunc
	err  error
	done chan struct{}
}

// hook stands between a loop and its model.
type hook struct {
	sched.Forwarder
	mu sync.Mutex
	// around, if set, is called in place of each pass.
	around func(next func([]compute.Span) error, spans []compute.Span) error
}

func (h *hook) Forward(spans []compute.Span) error {
	h.mu.Lock()
	f := h.around
	h.mu.Unlock()
	if f != nil {
		return f(h.Forwarder.Forward, spans)
	}
	return h.Forwarder.Forward(spans)
}

func (h *hook) set(f func(next func([]compute.Span) error, spans []compute.Span) error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.around = f
}

// logBuffer collects what a worker logs.
type logBuffer struct {
	mu sync.Mutex
	b  []byte
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.b = append(l.b, p...)
	return len(p), nil
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return string(l.b)
}

// front is the registration service.
type front struct {
	mu       sync.Mutex
	refuse   error
	joined   map[id.Epoch]*poolv1.RegisterRequest
	beats    map[id.Epoch]*poolv1.HeartbeatRequest
	messages int
	history  map[id.Epoch]history.Link
}

func (f *front) Register(ctx context.Context, r *poolv1.RegisterRequest) (*poolv1.RegisterResponse, error) {
	who, ok := peer.FromContext(ctx)
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.refuse != nil {
		return nil, f.refuse
	}
	if !ok || string(r.GetEpoch()) != string(who.Epoch[:]) {
		return nil, connect.NewError(connect.CodePermissionDenied, errors.New("another's epoch"))
	}
	f.joined[who.Epoch] = r
	f.messages++
	return &poolv1.RegisterResponse{HeartbeatMs: 50}, nil
}

func (f *front) Heartbeat(ctx context.Context, r *poolv1.HeartbeatRequest) (*poolv1.HeartbeatResponse, error) {
	who, _ := peer.FromContext(ctx)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.beats[who.Epoch] = r
	f.messages++
	_, known := f.joined[who.Epoch]
	return &poolv1.HeartbeatResponse{Known: known}, nil
}

func (f *front) AppendHistory(ctx context.Context, r *poolv1.AppendHistoryRequest) (*poolv1.AppendHistoryResponse, error) {
	who, _ := peer.FromContext(ctx)
	f.mu.Lock()
	defer f.mu.Unlock()
	link := f.history[who.Epoch]
	for _, b := range r.GetBlocks() {
		var err error
		if _, link, err = link.Next(who.Epoch, b); err != nil {
			return nil, connect.NewError(connect.CodeFailedPrecondition, err)
		}
	}
	f.history[who.Epoch] = link
	return &poolv1.AppendHistoryResponse{Stored: link.Number}, nil
}

func (f *front) joinedAs(e id.Epoch) *poolv1.RegisterRequest {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.joined[e]
}

func (f *front) beat(e id.Epoch) *poolv1.HeartbeatRequest {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.beats[e]
}

// smallModel is a random model with three layers and 272 tokens.
func smallModel() []byte {
	return synth.RandomLlama(7, synth.Shape{Layers: 3, Dim: 32, Heads: 4, KVHeads: 2, HeadDim: 8, Hidden: 64, Vocab: synth.MinVocab, Context: 256})
}

// newCluster starts nothing but the front.
func newCluster(t *testing.T, file string) *cluster {
	t.Helper()
	dir, err := os.MkdirTemp("", "bh") // t.TempDir can be too long for a socket
	assert.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	c := &cluster{t: t, dir: dir, authority: authority(t), model: file,
		front: &front{joined: map[id.Epoch]*poolv1.RegisterRequest{}, beats: map[id.Epoch]*poolv1.HeartbeatRequest{}, history: map[id.Epoch]history.Link{}}}
	c.gateway, err = c.authority.Issue(peer.Gateway())
	assert.NoError(t, err)
	if file == "" {
		c.useModel(smallModel())
	} else {
		c.digest, err = model.DigestFile(c.model)
		assert.NoError(t, err)
	}
	c.serveFront()
	return c
}

// useModel makes the workers that are started from now on serve another file.
func (c *cluster) useModel(file []byte) {
	c.t.Helper()
	c.model = filepath.Join(c.dir, "model.gguf")
	assert.NoError(c.t, os.WriteFile(c.model, file, 0o600))
	var err error
	c.digest, err = model.DigestFile(c.model)
	assert.NoError(c.t, err)
}

func (c *cluster) serveFront() {
	conf, err := c.gateway.ServerConfig(peer.Anyone)
	assert.NoError(c.t, err)
	l, err := net.Listen("unix", filepath.Join(c.dir, "front"))
	assert.NoError(c.t, err)
	mux := http.NewServeMux()
	mux.Handle(poolv1connect.NewRegistrationServiceHandler(c.front))
	s := &http.Server{Handler: peer.Middleware(mux), TLSConfig: conf, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)}
	done := make(chan struct{})
	go func() { defer close(done); _ = s.ServeTLS(l, "", "") }()
	c.t.Cleanup(func() { _ = s.Close(); <-done })
}

// start runs a worker until the test ends.
func (c *cluster) start(role peer.Role, change func(*Boot)) *instance {
	c.t.Helper()
	b := boot(c.t, c.authority, role)
	b.ModelPath, b.ModelDigest = c.model, c.digest.String()
	name := filepath.Join(c.dir, b.Epoch)
	b.Listen, b.Front = "unix:"+name, "unix:"+filepath.Join(c.dir, "front")
	if role == peer.Prefill {
		b.FabricListen = "unix:" + name + "f"
	}
	b.Pages, b.Chunk, b.MaxRunning, b.Queue, b.PerTenant = 128, 32, 16, 16, 16
	b.DrainFor = Span(10 * time.Second)
	if change != nil {
		change(&b)
	}
	i := &instance{boot: b, hook: &hook{}, logs: &logBuffer{}, done: make(chan struct{})}
	epoch, err := id.ParseEpoch(b.Epoch)
	assert.NoError(c.t, err)
	i.who = peer.Worker(role, epoch)
	var ctx context.Context
	ctx, i.stop = context.WithCancel(context.Background())
	log := slog.New(slog.NewTextHandler(i.logs, &slog.HandlerOptions{Level: slog.LevelDebug}))
	go func() {
		defer close(i.done)
		i.err = run(ctx, b, log, seams{
			now:    time.Now,
			wrap:   func(f sched.Forwarder) sched.Forwarder { i.hook.Forwarder = f; return i.hook },
			pool:   func(p *kv.Pool) { i.pool = p },
			decode: func(l *decodeLeg) { i.leg = l },
		})
	}()
	c.t.Cleanup(func() { i.hook.set(nil); i.stop(); <-i.done })
	return i
}

// pair starts both workers and waits until they have registered.
func (c *cluster) pair(change func(*Boot)) {
	c.t.Helper()
	c.prefill, c.decode = c.start(peer.Prefill, change), c.start(peer.Decode, change)
	c.ready(c.prefill)
	c.ready(c.decode)
}

func (c *cluster) ready(i *instance) {
	c.t.Helper()
	c.eventually("registration", func() bool {
		select {
		case <-i.done:
			c.t.Fatalf("worker ended: %v", i.err)
		default:
		}
		return c.front.joinedAs(i.who.Epoch) != nil
	})
}

// patience is far above what anything takes, also with the race detector on a
// busy machine.
const patience = 20 * time.Second

func (c *cluster) eventually(what string, ok func() bool) {
	c.t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			c.t.Fatalf("%s: never", what)
		}
	}
}

// restored waits until every page and credit of both workers is back.
func (c *cluster) restored() {
	c.t.Helper()
	for _, i := range []*instance{c.prefill, c.decode} {
		c.eventually("pages of "+string(i.boot.Role), func() bool {
			st := i.pool.Stats()
			return st.Free == st.Pages && st.Quarantined == 0
		})
	}
}

// client makes an HTTP client for a worker under an identity.
func (c *cluster) client(i *instance, as peer.Credentials) connect.HTTPClient {
	hc, err := peer.NewClient(i.boot.Listen, as, peer.Only(i.who))
	assert.NoError(c.t, err)
	c.t.Cleanup(hc.CloseIdleConnections)
	return hc
}

func (c *cluster) as(who peer.Identity) peer.Credentials {
	creds, err := c.authority.Issue(who)
	assert.NoError(c.t, err)
	return creds
}

// job is one request as the gateway makes it. A test may change either call
// before it is made.
type job struct {
	generate *workerv1.GenerateRequest
	prefill  *workerv1.PrefillRequest
}

func (c *cluster) job(owner byte, tokens []int32, maxOutput int) *job {
	request, transfer, nonce := id.NewRequest(time.Now()), id.NewTransfer(), id.NewNonce()
	o := id.Owner{0: owner, 1: 1}
	leases := [2]id.Lease{id.NewLease(), id.NewLease()}
	digest := handoff.TokenDigest(tokens)
	ids := make([]uint32, len(tokens))
	for i, t := range tokens {
		ids[i] = uint32(t)
	}
	return &job{
		generate: &workerv1.GenerateRequest{
			RequestId: request[:], Owner: o[:], LeaseId: leases[1][:], TransferId: transfer[:], Nonce: nonce[:],
			HandoffVersion: c.version(),
			ModelDigest:    c.digest[:], PromptTokens: uint32(len(tokens)), TokenDigest: digest[:], LastToken: ids[len(ids)-1],
			MaxOutputTokens: uint32(maxOutput), Sampling: &workerv1.Sampling{TopP: 1},
			Prefill: &workerv1.Peer{Epoch: c.prefill.who.Epoch[:], Address: c.prefill.boot.Listen, FabricAddress: c.prefill.boot.FabricListen},
		},
		prefill: &workerv1.PrefillRequest{
			RequestId: request[:], Owner: o[:], LeaseId: leases[0][:], TransferId: transfer[:], Nonce: append([]byte(nil), nonce[:]...),
			ModelDigest: c.digest[:], Tokens: ids, HandoffVersion: c.version(),
			Decode: &workerv1.Peer{Epoch: c.decode.who.Epoch[:], Address: c.decode.boot.Listen},
		},
	}
}

// version is what the registry would agree on.
func (c *cluster) version() uint32 {
	said := func(i *instance) (out []uint16) {
		for _, v := range c.front.joinedAs(i.who.Epoch).GetHandoffVersions() {
			out = append(out, uint16(v))
		}
		return out
	}
	return uint32(handoff.Common(said(c.prefill), said(c.decode)))
}

// outcome is what the gateway saw.
type outcome struct {
	events     []string // in order, repetitions of "delta" once
	reserved   int
	committed  *workerv1.LegFacts
	text       string
	ids        []int32
	finished   *workerv1.Finished
	err        error // of Generate
	prefilled  *workerv1.LegFacts
	prefillErr error
}

func (o *outcome) reasons() [2]string {
	var out [2]string
	for i, err := range []error{o.err, o.prefillErr} {
		if r, ok := RefusalOf(err); ok {
			out[i] = r.GetReason()
		} else if err != nil {
			out[i] = "no refusal: " + err.Error()
		}
	}
	return out
}

// do plays the gateway: Generate, and Prefill once credits are reserved. seen,
// if set, is told each event. As the gateway does, it ends each leg when the
// other fails.
func (c *cluster) do(ctx context.Context, j *job, seen func(event string)) *outcome {
	o := &outcome{}
	dc := workerv1connect.NewDecodeServiceClient(c.client(c.decode, c.gateway), peer.BaseURL, connect.WithGRPC())
	pc := workerv1connect.NewPrefillServiceClient(c.client(c.prefill, c.gateway), peer.BaseURL, connect.WithGRPC())
	// Bounded, so that a fault is a failed test and not one that hangs.
	ctx, cancel := context.WithTimeout(ctx, 2*patience)
	defer cancel()
	stream, err := dc.Generate(ctx, j.generate)
	if err != nil {
		o.err = err
		return o
	}
	defer func() { _ = stream.Close() }()
	var legs sync.WaitGroup
	defer legs.Wait()
	note := func(e string) {
		if n := len(o.events); n == 0 || o.events[n-1] != e {
			o.events = append(o.events, e)
		}
		if seen != nil {
			seen(e)
		}
	}
	for stream.Receive() {
		switch e := stream.Msg().GetEvent().(type) {
		case *workerv1.GenerateResponse_Reserved:
			o.reserved = int(e.Reserved.GetPages())
			note("reserved")
			if j.prefill == nil {
				continue
			}
			legs.Go(func() {
				resp, err := pc.Prefill(ctx, j.prefill)
				o.prefilled, o.prefillErr = resp.GetFacts(), err
				if err != nil {
					time.AfterFunc(grace, cancel)
				}
			})
		case *workerv1.GenerateResponse_Committed:
			o.committed = e.Committed.GetFacts()
			note("committed")
		case *workerv1.GenerateResponse_Delta:
			o.text += e.Delta.GetText()
			for _, id := range e.Delta.GetIds() {
				o.ids = append(o.ids, int32(id))
			}
			note("delta")
		case *workerv1.GenerateResponse_Finished:
			o.finished = e.Finished
			note("finished")
		}
	}
	o.err = stream.Err()
	if o.err != nil {
		time.AfterFunc(grace, cancel)
	}
	legs.Wait()
	return o
}

// grace is how long the other leg may take to fail by itself after one has. The
// gateway gives none; here it shows what each leg says.
const grace = 300 * time.Millisecond

func prompt(n, seed int) []int32 {
	p := make([]int32, n)
	for i := range p {
		p[i] = int32(5 + (i*31+seed*17)%200)
	}
	return p
}
