package gateway

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	"bulkhead.dev/audit/receipt"
	"bulkhead.dev/audit/settle"
	"bulkhead.dev/engine/model/chat"
	"bulkhead.dev/engine/model/gguf"
	"bulkhead.dev/engine/model/synth"
	"bulkhead.dev/engine/pool"
	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/infra/pgdb/pgtest"
	poolv1 "bulkhead.dev/services/gen/bulkhead/pool/v1"
	workerv1 "bulkhead.dev/services/gen/bulkhead/worker/v1"
	"bulkhead.dev/services/gen/bulkhead/worker/v1/workerv1connect"
	"bulkhead.dev/tenancy"
	"bulkhead.dev/tenancy/quota"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// legs of a script: what the two fake workers do. By default they tell the
// truth.
type script struct {
	reserve error                             // decode refuses at once
	prefill func(*workerv1.LegFacts)          // changes what prefill reports
	refuse  error                             // prefill fails with it
	commit  func(*workerv1.LegFacts)          // changes what decode reports at the commit
	refuse2 error                             // decode fails instead of committing
	text    []string                          // one id each
	hang    bool                              // decode says nothing after the text
	early   bool                              // decode ends the stream without its end
	finish  func(*workerv1.Finished)          // changes the end
	event   func() *workerv1.GenerateResponse // sent instead of the commit

	last        *workerv1.LegFacts // what the legs say when they are asked whether they are done
	quarantined uint32
	silent      bool // they do not say
}

// bundle is a gateway between fake workers and a fake settler.
type bundle struct {
	*Gateway
	t        *testing.T
	script   script
	registry *pool.Registry
	epochs   map[pool.Role]id.Epoch

	mu       sync.Mutex
	receipts []receipt.Receipt
	usage    settle.Usage // of the last one
	intents  []settle.Intent
	charges  []quota.Charge
	asks     []quota.Ask
	full     error // of Reserve
	settle   error // of Settle
	offered  chan struct{}
	calls    int
	ended    chan struct{} // decode's call ended
}

// Preview is not used: the fake workers speak version 1 of the hand-off.
func (fakeDecode) Preview(context.Context, *workerv1.PreviewRequest) (*workerv1.PreviewResponse, error) {
	return nil, connect.NewError(connect.CodeUnimplemented, nil)
}

type identityKey struct{}

func setup(t *testing.T, s script) *bundle {
	t.Helper()
	b := &bundle{t: t, script: s, epochs: map[pool.Role]id.Epoch{}, offered: make(chan struct{}), ended: make(chan struct{})}
	mux := http.NewServeMux()
	mux.Handle(workerv1connect.NewPrefillServiceHandler(fakePrefill{b}))
	mux.Handle(workerv1connect.NewDecodeServiceHandler(fakeDecode{b}))
	mux.Handle(workerv1connect.NewControlServiceHandler(fakeControl{b: b}))
	ts := httptest.NewUnstartedServer(mux)
	ts.EnableHTTP2 = true
	ts.StartTLS()
	t.Cleanup(ts.Close)
	b.registry = pool.NewRegistry(pool.Options{
		Now:    func() time.Time { return time.Time{} }, // nobody here sends heartbeats
		Client: func(string, pool.Role, id.Epoch) (*http.Client, string, error) { return ts.Client(), ts.URL, nil },
		Identity: func(ctx context.Context) (id.Epoch, pool.Role, bool) {
			r := ctx.Value(identityKey{}).(pool.Role)
			return b.epochs[r], r, true
		},
		CheckCapacity: func(pool.Role, int, int, int) error { return nil },
		Changed:       func(*pool.Worker, bool) {},
	})
	for role, number := range map[pool.Role]poolv1.Role{pool.Prefill: poolv1.Role_ROLE_PREFILL, pool.Decode: poolv1.Role_ROLE_DECODE} {
		e := id.NewEpoch(time.Now())
		b.epochs[role] = e
		_, err := b.registry.Register(context.WithValue(t.Context(), identityKey{}, role), &poolv1.RegisterRequest{
			Epoch: e[:], Role: number, Address: "unix:/x", FabricAddress: "unix:/f", ModelDigest: make([]byte, 32), Geometry: make([]byte, 32),
			PageTokens: 16, Pages: 16, ContextWindow: 256, Build: "test",
		})
		assert.NoError(t, err)
	}
	path := filepath.Join(t.TempDir(), "m.gguf")
	assert.NoError(t, os.WriteFile(path, synth.RandomLlama(1, synth.Shape{Layers: 1, Dim: 32, Heads: 2, KVHeads: 1, HeadDim: 16, Hidden: 32, Vocab: 288, Context: 256, Type: gguf.F32}), 0o600))
	files := &Files{Path: func([32]byte) (string, error) { return path, nil }, ChatOptions: chat.Options{}}
	t.Cleanup(func() { _ = files.Close() })
	b.Gateway = &Gateway{
		Catalog: b, Prompts: files, Pool: b.registry, Evidence: b, Quota: b, Observer: silent{}, Log: slog.New(slog.DiscardHandler), Now: time.Now,
		Seed: func() uint64 { return 7 }, DigestKey: func(id.Tenant) (string, [32]byte) { return "d1", [32]byte{1} }, Replica: id.NewEpoch(time.Now()),
	}
	t.Cleanup(b.Wait)
	return b
}

type silent struct{}

func (silent) Admitted() func()                { return func() {} }
func (silent) FirstToken(time.Duration)        {}
func (silent) NextToken(time.Duration)         {}
func (silent) Refused(string, string)          {}
func (silent) Settled(time.Duration, int, int) {}
func (silent) Withheld()                       {}
func (b *bundle) Ready() error                 { return nil }

// The catalogue.

func (b *bundle) Models(context.Context) ([]tenancy.Model, error) { return nil, nil }

func (b *bundle) ModelByName(_ context.Context, name string) (tenancy.Model, error) {
	if name != "tiny" {
		return tenancy.Model{}, apperr.New(apperr.NotFound, "model_not_found", "There is no such model.")
	}
	return tenancy.Model{Name: "tiny", ContextWindow: 256, DefaultOutputTokens: 64, Chat: true}, nil
}

// The settler.

type ticket struct{}

func (ticket) Done() <-chan struct{} {
	done := make(chan struct{})
	close(done)
	return done
}

func (b *bundle) Reserve(_ context.Context, a quota.Ask) (*quota.Reservation, error) {
	b.asks = append(b.asks, a)
	return new(quota.Reservation), b.full
}

func (b *bundle) Intend(i settle.Intent) Ticket {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.intents = append(b.intents, i)
	return ticket{}
}

func (b *bundle) Settle(_ context.Context, f settle.Facts) error {
	if _, err := f.Receipt.Encode(); err != nil {
		b.t.Errorf("a receipt that cannot be: %v", err)
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.receipts, b.usage = append(b.receipts, f.Receipt), f.Usage
	b.charges = append(b.charges, f.Charges...)
	return b.settle
}

// receipt returns the one receipt of the one request.
func (b *bundle) receipt() receipt.Receipt {
	b.t.Helper()
	b.Wait()
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.receipts) != 1 || len(b.intents) != 1 {
		b.t.Fatalf("%d receipts and %d intents for one request", len(b.receipts), len(b.intents))
	}
	return b.receipts[0]
}

var root = make([]byte, 32)

func init() { root[0] = 1 }

type fakePrefill struct{ b *bundle }

func (f fakePrefill) Prefill(_ context.Context, in *workerv1.PrefillRequest) (*workerv1.PrefillResponse, error) {
	if f.b.script.refuse != nil {
		return nil, f.b.script.refuse
	}
	e := f.b.epochs[pool.Prefill]
	facts := &workerv1.LegFacts{Epoch: e[:], Tokens: uint32(len(in.GetTokens())), ManifestRoot: root}
	if f.b.script.prefill != nil {
		f.b.script.prefill(facts)
	}
	close(f.b.offered)
	return &workerv1.PrefillResponse{Facts: facts}, nil
}

// fakeControl answers for both legs: the two have one address here.
type fakeControl struct {
	workerv1connect.UnimplementedControlServiceHandler
	b *bundle
}

func (f fakeControl) End(ctx context.Context, _ *workerv1.EndRequest) (*workerv1.EndResponse, error) {
	if f.b.script.silent {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return &workerv1.EndResponse{Facts: f.b.script.last, Quarantined: f.b.script.quarantined}, nil
}

type fakeDecode struct{ b *bundle }

func (f fakeDecode) Offer(context.Context, *workerv1.OfferRequest) (*workerv1.OfferResponse, error) {
	return nil, errors.New("not used")
}

func (f fakeDecode) Generate(ctx context.Context, in *workerv1.GenerateRequest, out *connect.ServerStream[workerv1.GenerateResponse]) error {
	defer close(f.b.ended)
	s := f.b.script
	f.b.mu.Lock()
	f.b.calls++
	f.b.mu.Unlock()
	if s.reserve != nil {
		return s.reserve
	}
	send := func(r *workerv1.GenerateResponse) { _ = out.Send(r) }
	send(&workerv1.GenerateResponse{Event: &workerv1.GenerateResponse_Reserved{Reserved: &workerv1.Reserved{}}})
	select {
	case <-f.b.offered:
	case <-ctx.Done():
		return ctx.Err()
	}
	if s.refuse2 != nil {
		return s.refuse2
	}
	if s.event != nil {
		send(s.event())
		<-ctx.Done()
		return ctx.Err()
	}
	e := f.b.epochs[pool.Decode]
	facts := &workerv1.LegFacts{Epoch: e[:], Tokens: in.GetPromptTokens(), ManifestRoot: root}
	if s.commit != nil {
		s.commit(facts)
	}
	send(&workerv1.GenerateResponse{Event: &workerv1.GenerateResponse_Committed{Committed: &workerv1.Committed{Facts: facts}}})
	for i, text := range s.text {
		send(&workerv1.GenerateResponse{Event: &workerv1.GenerateResponse_Delta{Delta: &workerv1.Delta{Text: text, Ids: []uint32{uint32(i)}}}})
	}
	if s.hang {
		<-ctx.Done()
		return ctx.Err()
	}
	if s.early {
		return nil
	}
	end := &workerv1.Finished{FinishReason: "stop", Detail: "eos", OutputTokens: uint32(len(s.text)), Facts: facts}
	if s.finish != nil {
		s.finish(end)
	}
	send(&workerv1.GenerateResponse{Event: &workerv1.GenerateResponse_Finished{Finished: end}})
	return nil
}

// refusal is how a worker refuses.
func refusal(t *testing.T, code connect.Code, reason string) error {
	t.Helper()
	err := connect.NewError(code, errors.New("refused"))
	d, errDetail := connect.NewErrorDetail(&workerv1.Refusal{Reason: reason})
	assert.NoError(t, errDetail)
	err.AddDetail(d)
	return err
}
