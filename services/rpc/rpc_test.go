package rpc

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/reflect/protoreflect"

	"bulkhead.dev/audit"
	"bulkhead.dev/audit/receipt"
	"bulkhead.dev/engine/pool"
	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/services/gateway"
	auditv1 "bulkhead.dev/services/gen/bulkhead/audit/v1"
	"bulkhead.dev/services/gen/bulkhead/audit/v1/auditv1connect"
	catalogv1 "bulkhead.dev/services/gen/bulkhead/catalog/v1"
	inferencev1 "bulkhead.dev/services/gen/bulkhead/inference/v1"
	"bulkhead.dev/services/gen/bulkhead/inference/v1/inferencev1connect"
	limitsv1 "bulkhead.dev/services/gen/bulkhead/limits/v1"
	operationsv1 "bulkhead.dev/services/gen/bulkhead/operations/v1"
	"bulkhead.dev/services/gen/bulkhead/operations/v1/operationsv1connect"
	tenancyv1 "bulkhead.dev/services/gen/bulkhead/tenancy/v1"
	workerv1 "bulkhead.dev/services/gen/bulkhead/worker/v1"
	"bulkhead.dev/services/httpx"
	"bulkhead.dev/tenancy"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type fake struct {
	scopes tenancy.Scopes
	err    error
	finish error
	panics bool
	asked  gateway.Request
	stored audit.Stored
}

func (f *fake) Authenticate(_ context.Context, bearer string) (tenancy.Principal, error) {
	if bearer != "good" {
		return tenancy.Principal{}, apperr.New(apperr.Unauthenticated, "invalid_api_key", "The API key is not valid.")
	}
	return tenancy.Principal{Tenant: id.Tenant{1}, Scopes: f.scopes}, nil
}

func (f *fake) Models(context.Context, tenancy.Principal) ([]tenancy.Model, error) {
	return []tenancy.Model{{Name: "tiny"}}, nil
}

func (f *fake) Model(context.Context, tenancy.Principal, string) (tenancy.Model, error) {
	return tenancy.Model{Name: "tiny"}, nil
}

func (f *fake) Generate(_ context.Context, _ tenancy.Principal, r gateway.Request) (Stream, error) {
	if f.panics {
		panic("the prompt was hunter2")
	}
	f.asked = r
	if f.err != nil {
		return nil, f.err
	}
	return &fakeStream{f: f, id: r.ID, left: []string{"He", "llo"}}, nil
}

func (f *fake) Get(_ context.Context, tenant id.Tenant, _ id.Request) (audit.Stored, error) {
	if tenant != (id.Tenant{1}) {
		return audit.Stored{}, apperr.New(apperr.NotFound, "receipt_not_found", "No.")
	}
	return f.stored, nil
}

func (f *fake) PageMaps(context.Context) []pool.PageMap {
	owner := append([]byte{0xab, 0xcd, 0xef, 0x01}, make([]byte, 12)...)
	return []pool.PageMap{
		{Worker: &pool.Worker{Epoch: id.Epoch{1}, Role: pool.Prefill}, Pages: &workerv1.PagesResponse{MaxQuarantine: 2, Runs: []*workerv1.PageRun{
			{First: 0, Count: 3, State: "quarantined", Reason: "reader open", Owner: owner, Lease: owner, Generation: 9, SinceUs: 1_800_000_000_000_000, Readers: 1},
			{First: 8, Count: 1, State: "sealed", Owner: append([]byte{9}, owner[1:]...), Lease: owner, References: 2, Scrubs: 4},
			{First: 9, Count: 2, State: "dirty", Owner: owner, Lease: make([]byte, 16)},
			{First: 3, Count: 5, State: "clean", Owner: make([]byte, 16), Lease: make([]byte, 16), SinceUs: 1},
		}}},
		{Worker: &pool.Worker{Epoch: id.Epoch{2}, Role: pool.Decode}, Err: errors.New("with the address of a socket in it")},
	}
}

type fakeStream struct {
	f    *fake
	id   id.Request
	left []string
}

func (s *fakeStream) Model() string         { return "tiny" }
func (s *fakeStream) PromptTokens() int     { return 7 }
func (s *fakeStream) ReceiptID() id.Receipt { return s.id.Receipt() }
func (s *fakeStream) Close()                {}
func (s *fakeStream) Next(context.Context) (string, error) {
	if len(s.left) == 0 {
		return "", io.EOF
	}
	p := s.left[0]
	s.left = s.left[1:]
	return p, nil
}

func (s *fakeStream) Finish(context.Context) (gateway.Final, error) {
	return gateway.Final{FinishReason: "stop", PromptTokens: 7, CompletionTokens: 2, Receipt: s.id.Receipt()}, s.f.finish
}

type nobody struct{}

func (nobody) Request(string, string, time.Duration) {}
func (nobody) Unauthenticated()                      {}

func serve(t *testing.T, f *fake) *httptest.Server {
	t.Helper()
	ts := httptest.NewUnstartedServer(New(Options{
		Backend: f, Tenants: nil, Receipts: f, Workers: f, Keys: f, ReadLimit: 1 << 16, Ready: func() bool { return true },
		Edge: &httpx.Edge{Log: slog.New(slog.DiscardHandler), Now: time.Now, Observer: nobody{}},
	}))
	ts.EnableHTTP2 = true
	ts.StartTLS()
	t.Cleanup(ts.Close)
	return ts
}

func withKey(key string) connect.ClientOption {
	return connect.WithInterceptors(keyed(key))
}

type keyed string

func (k keyed) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, r connect.AnyRequest) (connect.AnyResponse, error) {
		r.Header().Set("Authorization", "Bearer "+string(k))
		return next(ctx, r)
	}
}

func (k keyed) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, s connect.Spec) connect.StreamingClientConn {
		c := next(ctx, s)
		c.RequestHeader().Set("Authorization", "Bearer "+string(k))
		return c
	}
}

func (k keyed) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}

// procedures are those of all services that the surface serves.
func procedures() []string {
	var out []string
	for _, f := range []protoreflect.FileDescriptor{inferencev1.File_bulkhead_inference_v1_inference_proto, tenancyv1.File_bulkhead_tenancy_v1_tenancy_proto,
		catalogv1.File_bulkhead_catalog_v1_catalog_proto, limitsv1.File_bulkhead_limits_v1_limits_proto, auditv1.File_bulkhead_audit_v1_audit_proto,
		operationsv1.File_bulkhead_operations_v1_operations_proto} {
		for i := range f.Services().Len() {
			s := f.Services().Get(i)
			for j := range s.Methods().Len() {
				out = append(out, "/"+string(s.FullName())+"/"+string(s.Methods().Get(j).Name()))
			}
		}
	}
	return out
}

func TestEveryProcedureWantsAKeyAndAScope(t *testing.T) {
	t.Parallel()
	ts := serve(t, &fake{})
	assert.Equal(t, len(procedures()), len(scopes))
	for _, p := range procedures() {
		if _, ok := scopes[p]; !ok {
			t.Errorf("%s has no scope", p)
		}
		for key, want := range map[string]string{"wrong": "unauthenticated", "good": "permission_denied"} {
			req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, ts.URL+p, strings.NewReader("\x1f\x8b no gzip"))
			assert.NoError(t, err)
			req.Header.Set("Authorization", "Bearer "+key)
			req.Header.Set("Content-Type", "application/json")
			req.Header.Set("Content-Encoding", "gzip")
			res, err := ts.Client().Do(req)
			assert.NoError(t, err)
			b, err := io.ReadAll(res.Body)
			assert.NoError(t, err)
			_ = res.Body.Close()
			if strings.Contains(p, "Stream") {
				continue // a streaming procedure does not take this content type
			}
			if !strings.Contains(string(b), want) {
				t.Errorf("%s with a %s key: %s", p, key, b)
			}
		}
	}
	for path, want := range map[string]int{"/bulkhead.worker.v1.DecodeService/Generate": 404, "/grpc.health.v1.Health/Check": 200} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, ts.URL+path, strings.NewReader("{}"))
		assert.NoError(t, err)
		req.Header.Set("Content-Type", "application/json")
		if want == 404 {
			req.Header.Set("Authorization", "Bearer good")
		}
		res, err := ts.Client().Do(req)
		assert.NoError(t, err)
		_ = res.Body.Close()
		assert.Equal(t, res.StatusCode, want)
	}
}

func TestThreeProtocols(t *testing.T) {
	t.Parallel()
	for name, opt := range map[string]connect.ClientOption{"connect": connect.WithClientOptions(), "gRPC": connect.WithGRPC(), "gRPC-Web": connect.WithGRPCWeb()} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := &fake{scopes: tenancy.ScopesTenant}
			ts := serve(t, f)
			c := inferencev1connect.NewInferenceServiceClient(ts.Client(), ts.URL, opt, withKey("good"))
			seed, temperature := uint64(5), float32(0)
			p := &inferencev1.Parameters{Seed: &seed, Temperature: &temperature, Stop: []string{"x"}}
			res, err := c.Generate(t.Context(), &inferencev1.GenerateRequest{Model: "tiny", Prompt: "p", Parameters: p})
			assert.NoError(t, err)
			assert.Equal(t, res.GetText(), "Hello")
			assert.Equal(t, res.GetUsage().GetCompletionTokens(), uint32(2))
			assert.True(t, f.asked.SeedSet && f.asked.Params.Seed == 5 && f.asked.Params.Temperature == 0 && f.asked.Params.TopP == 1 && f.asked.Text == "p")
			stream, err := c.GenerateStream(t.Context(), &inferencev1.GenerateStreamRequest{Model: "tiny", Messages: []*inferencev1.Message{{Role: "user", Content: "c"}}})
			assert.NoError(t, err)
			text, finals := "", 0
			for stream.Receive() {
				text += stream.Msg().GetText()
				if stream.Msg().GetFinal() != nil {
					finals++
				}
			}
			assert.NoError(t, stream.Err())
			assert.True(t, text == "Hello" && finals == 1 && f.asked.Streamed)
			assert.True(t, strings.HasPrefix(stream.ResponseHeader().Get("X-Bulkhead-Receipt"), "rcp_"))
			assert.NoError(t, stream.Close())

			f.finish = apperr.New(apperr.Unavailable, "evidence_unavailable", "Late.")
			stream, err = c.GenerateStream(t.Context(), &inferencev1.GenerateStreamRequest{Model: "tiny", Prompt: "p"})
			assert.NoError(t, err)
			for stream.Receive() {
				assert.True(t, stream.Msg().GetFinal() == nil)
			}
			assert.Equal(t, connect.CodeOf(stream.Err()), connect.CodeUnavailable)
			assert.NoError(t, stream.Close())
		})
	}
}

func TestErrors(t *testing.T) {
	t.Parallel()
	for kind, code := range codes {
		f := &fake{scopes: tenancy.ScopesTenant, err: apperr.Wrap(errors.New("hunter2"), kind, "some_code", "Public.").WithRetryAfter(1500 * time.Millisecond)}
		ts := serve(t, f)
		_, err := inferencev1connect.NewInferenceServiceClient(ts.Client(), ts.URL, withKey("good")).Generate(t.Context(), &inferencev1.GenerateRequest{Model: "m", Prompt: "p"})
		e := assert.ErrorAs[*connect.Error](t, err)
		assert.Equal(t, e.Code(), code)
		assert.Equal(t, e.Message(), "Public.")
		assert.Equal(t, e.Meta().Get(ErrorCodeHeader), "some_code")
		assert.Equal(t, e.Meta().Get("Retry-After"), "2")
	}
	ts := serve(t, &fake{scopes: tenancy.ScopesTenant, panics: true})
	c := inferencev1connect.NewInferenceServiceClient(ts.Client(), ts.URL, withKey("good"))
	_, err := c.Generate(t.Context(), &inferencev1.GenerateRequest{Model: "m", Prompt: "p"})
	assert.True(t, connect.CodeOf(err) == connect.CodeInternal && !strings.Contains(err.Error(), "hunter2"))
	for name, bad := range map[string]*inferencev1.GenerateRequest{
		"no model": {Prompt: "p"}, "no prompt": {Model: "m"}, "both": {Model: "m", Prompt: "p", Messages: []*inferencev1.Message{{Role: "user"}}},
		"role":       {Model: "m", Messages: []*inferencev1.Message{{Role: "tool"}}},
		"stops":      {Model: "m", Prompt: "p", Parameters: &inferencev1.Parameters{Stop: []string{"a", "b", "c", "d", "e"}}},
		"empty stop": {Model: "m", Prompt: "p", Parameters: &inferencev1.Parameters{Stop: []string{""}}},
		"zero max":   {Model: "m", Prompt: "p", Parameters: &inferencev1.Parameters{MaxOutputTokens: new(uint32)}},
	} {
		_, err := c.Generate(t.Context(), bad)
		if connect.CodeOf(err) != connect.CodeInvalidArgument {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestTooLarge(t *testing.T) {
	t.Parallel()
	ts := serve(t, &fake{scopes: tenancy.ScopesTenant})
	c := inferencev1connect.NewInferenceServiceClient(ts.Client(), ts.URL, withKey("good"))
	_, err := c.Generate(t.Context(), &inferencev1.GenerateRequest{Model: "m", Prompt: strings.Repeat("x", 1<<17)})
	assert.Equal(t, connect.CodeOf(err), connect.CodeResourceExhausted)
}

func TestReceipts(t *testing.T) {
	t.Parallel()
	r := receipt.Receipt{Request: id.NewRequest(time.Now()), Tenant: id.Tenant{1}, Project: id.Project{1}, Key: id.Key{1}, Outcome: receipt.Lost}
	body, err := r.Encode()
	assert.NoError(t, err)
	ts := serve(t, &fake{scopes: tenancy.ScopeReceiptsRead, stored: audit.Stored{Body: body, Digest: receipt.DigestOf(body)}})
	c := auditv1connect.NewAuditServiceClient(ts.Client(), ts.URL, withKey("good"))
	for _, name := range []string{r.Request.String(), r.Request.Receipt().String()} {
		got, err := c.GetReceipt(t.Context(), &auditv1.GetReceiptRequest{Id: name})
		assert.NoError(t, err)
		assert.Equal(t, got.GetBody(), body)
		assert.True(t, strings.Contains(got.GetJson(), `"outcome": "lost"`))
	}
	_, err = c.GetReceipt(t.Context(), &auditv1.GetReceiptRequest{Id: "key_x"})
	assert.Equal(t, connect.CodeOf(err), connect.CodeInvalidArgument)
}

// The page map shows tags, not whole ids, and a worker that says nothing hides
// nobody.
func TestListPages(t *testing.T) {
	t.Parallel()
	ts := serve(t, &fake{scopes: tenancy.ScopePlatform})
	c := operationsv1connect.NewOperationsServiceClient(ts.Client(), ts.URL, withKey("good"))
	got, err := c.ListPages(t.Context(), &operationsv1.ListPagesRequest{})
	assert.NoError(t, err)
	assert.Equal(t, len(got.GetWorkers()), 2)
	w := got.GetWorkers()[0]
	assert.Equal(t, w.GetRole(), "prefill")
	assert.Equal(t, w.GetMaxQuarantine(), uint32(2))
	r := w.GetRuns()[0]
	assert.Equal(t, r.GetOwner(), "abcdef01")
	assert.Equal(t, r.GetLease(), "abcdef01")
	assert.Equal(t, r.GetReason(), "reader open")
	assert.Equal(t, r.GetSince().AsTime(), time.UnixMicro(1_800_000_000_000_000).UTC())
	assert.Equal(t, w.GetRuns()[1].GetScrubs(), 4)
	assert.Equal(t, w.GetRuns()[3].GetOwner(), "")
	assert.Equal(t, w.GetStates(), map[string]uint32{"quarantined": 3, "sealed": 1, "dirty": 2, "clean": 5})
	assert.Equal(t, w.GetOwners(), map[string]uint32{"abcdef01": 3, "09cdef01": 1})
	assert.Equal(t, got.GetWorkers()[1].GetError(), "the worker did not answer")

	ts = serve(t, &fake{scopes: tenancy.ScopesTenant}) // everything that a tenant's key can do
	_, err = operationsv1connect.NewOperationsServiceClient(ts.Client(), ts.URL, withKey("good")).ListPages(t.Context(), &operationsv1.ListPagesRequest{})
	assert.Equal(t, connect.CodeOf(err), connect.CodePermissionDenied)
}
