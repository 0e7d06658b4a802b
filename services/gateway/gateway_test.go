package gateway

import (
	"context"
	"errors"
	"io"
	"math"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"bulkhead.dev/audit/receipt"
	"bulkhead.dev/engine/model/chat"
	"bulkhead.dev/engine/pool"
	"bulkhead.dev/engine/sample"
	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
	workerv1 "bulkhead.dev/services/gen/bulkhead/worker/v1"
	"bulkhead.dev/tenancy"
	"bulkhead.dev/tenancy/quota"
)

func principal() tenancy.Principal {
	return tenancy.Principal{Tenant: id.Tenant{1}, Project: id.Project{2}, Key: id.Key{3}, Owner: id.Owner{4}, Scopes: tenancy.ScopesTenant}
}

func request() Request {
	return Request{
		ID: id.NewRequest(time.Now()), Received: time.Now(), Model: "tiny", Messages: []chat.Message{{Role: "user", Content: "hi"}},
		Params: sample.Params{Temperature: 1, TopP: 1}, Surface: "openai.chat",
	}
}

// answer runs a request to its end.
func (b *bundle) answer() (text string, f Final, err error) {
	b.t.Helper()
	s, err := b.Generate(b.t.Context(), principal(), request())
	if err != nil {
		return "", Final{}, err
	}
	defer s.Close()
	for {
		piece, err := s.Next(b.t.Context())
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return text, Final{}, err
		}
		text += piece
	}
	f, err = s.Finish(b.t.Context())
	return text, f, err
}

func TestAnswer(t *testing.T) {
	t.Parallel()
	b := setup(t, script{text: []string{"He", "", "llo"}})
	text, f, err := b.answer()
	assert.NoError(t, err)
	assert.Equal(t, text, "Hello")
	assert.Equal(t, f.FinishReason, "stop")
	assert.Equal(t, f.CompletionTokens, 3)
	r := b.receipt()
	assert.Equal(t, r.Outcome, receipt.Completed)
	assert.True(t, int(*r.EdgeTokens) == f.PromptTokens && *r.Prefill.Tokens == *r.EdgeTokens && *r.Decode.Tokens == *r.EdgeTokens)
	want := receipt.NewHasher("d1", [32]byte{1})
	want.IDs([]uint32{0, 1, 2})
	want.Text("Hello")
	assert.Equal(t, r.Response, want.Response())
	assert.Equal(t, b.intents[0].Reserved, int64(f.PromptTokens+64))
	p := principal()
	assert.Equal(t, b.asks, []quota.Ask{{Tenant: p.Tenant, Project: p.Project, Key: p.Key, Model: "tiny", Input: f.PromptTokens, Output: 64}})
}

// Each leg lies in turn. No text leaves, the caller learns that the answer was
// withheld, and the receipt says why.
func TestLyingLegs(t *testing.T) {
	t.Parallel()
	tokens := func(d int) func(*workerv1.LegFacts) {
		return func(f *workerv1.LegFacts) { f.Tokens = uint32(int(f.Tokens) + d) }
	}
	one := func(f *workerv1.LegFacts) { f.Tokens = 1 }
	for name, c := range map[string]struct {
		script
		leg, reason string
	}{
		"prefill counts one less":    {script{prefill: tokens(-1)}, legGateway, reasonCounts},
		"prefill counts one more":    {script{prefill: tokens(1)}, legGateway, reasonCounts},
		"prefill saw a placeholder":  {script{prefill: one}, legGateway, reasonCounts},
		"decode counts one less":     {script{commit: tokens(-1)}, legGateway, reasonCounts},
		"decode counts one more":     {script{commit: tokens(1)}, legGateway, reasonCounts},
		"both saw a placeholder":     {script{prefill: one, commit: one}, legGateway, reasonCounts},
		"prefill names another root": {script{prefill: func(f *workerv1.LegFacts) { f.ManifestRoot = append([]byte{9}, root[1:]...) }}, legGateway, reasonManifest},
		"no root at all":             {script{prefill: func(f *workerv1.LegFacts) { f.ManifestRoot = nil }, commit: func(f *workerv1.LegFacts) { f.ManifestRoot = nil }}, legGateway, reasonManifest},
		"prefill is somebody else":   {script{prefill: func(f *workerv1.LegFacts) { f.Epoch = make([]byte, 16) }}, legGateway, reasonProtocol},
		"decode is somebody else":    {script{commit: func(f *workerv1.LegFacts) { f.Epoch = nil }}, legGateway, reasonProtocol},
		"text before the commit": {script{event: func() *workerv1.GenerateResponse {
			return &workerv1.GenerateResponse{Event: &workerv1.GenerateResponse_Delta{Delta: &workerv1.Delta{Text: "leak"}}}
		}}, legGateway, reasonProtocol},
		"commit without measurements": {script{event: func() *workerv1.GenerateResponse {
			return &workerv1.GenerateResponse{Event: &workerv1.GenerateResponse_Committed{Committed: &workerv1.Committed{}}}
		}}, legGateway, reasonProtocol},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c.text = []string{"leak"}
			b := setup(t, c.script)
			text, _, err := b.answer()
			assert.Equal(t, text, "")
			e := assert.ErrorAs[*apperr.Error](t, err)
			assert.Equal(t, e.Code, "response_withheld")
			assert.Equal(t, e.Kind, apperr.Internal)
			assert.True(t, LeftReceipt(err))
			r := b.receipt()
			assert.True(t, r.Outcome == receipt.Failed || r.Outcome == receipt.Refused)
			assert.Equal(t, *r.Refusal, receipt.Refusal{Leg: c.leg, Reason: c.reason})
			assert.Equal(t, r.Finish, "")
			select {
			case <-b.ended:
			case <-time.After(5 * time.Second):
				t.Fatal("decode goes on")
			}
		})
	}
}

// Ends that are not on the list, or claim what was not sent, are no success.
func TestLyingEnds(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		script
		reason string
	}{
		"abort passes for length": {script{finish: func(f *workerv1.Finished) { f.FinishReason, f.Detail = "length", "aborted" }}, reasonFinish},
		"reason of another end":   {script{finish: func(f *workerv1.Finished) { f.FinishReason = "length" }}, reasonFinish},
		"length before the limit": {script{finish: func(f *workerv1.Finished) { f.FinishReason, f.Detail = "length", "max_tokens" }}, reasonOutput},
		"more tokens than sent":   {script{finish: func(f *workerv1.Finished) { f.OutputTokens++ }}, reasonOutput},
		"fewer tokens than sent":  {script{finish: func(f *workerv1.Finished) { f.OutputTokens-- }}, reasonOutput},
		"no end":                  {script{early: true}, reasonProtocol},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c.text = []string{"some", "text"}
			b := setup(t, c.script)
			_, _, err := b.answer()
			assert.Equal(t, assert.ErrorAs[*apperr.Error](t, err).Code, "response_withheld")
			r := b.receipt()
			assert.Equal(t, r.Outcome, receipt.Failed)
			assert.Equal(t, r.Refusal.Reason, c.reason)
		})
	}
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		reason string
		code   connect.Code
		kind   apperr.Kind
		public string
	}{
		"queue":       {"queue_full", connect.CodeResourceExhausted, apperr.Unavailable, "server_is_overloaded"},
		"pages":       {"exhausted", connect.CodeResourceExhausted, apperr.Unavailable, "server_is_overloaded"},
		"concurrency": {"tenant_concurrency", connect.CodeResourceExhausted, apperr.TooMany, "rate_limit_exceeded"},
		"draining":    {"draining", connect.CodeUnavailable, apperr.Unavailable, "worker_lost"},
		"digest":      {"digest", connect.CodeDataLoss, apperr.Internal, "response_withheld"},
		"recompute":   {"recompute_mismatch", connect.CodeDataLoss, apperr.Internal, "response_withheld"},
		"nan":         {"not_finite", connect.CodeDataLoss, apperr.Internal, "response_withheld"},
		"new reason":  {"never_heard_of", connect.CodeUnknown, apperr.Internal, "response_withheld"},
	} {
		refused := refusal(t, c.code, c.reason)
		for leg, s := range map[string]script{
			"decode at once": {reserve: refused}, "decode at the commit": {refuse2: refused}, "prefill": {refuse: refused},
		} {
			t.Run(name+" "+leg, func(t *testing.T) {
				t.Parallel()
				s.text = []string{"leak"}
				b := setup(t, s)
				text, _, err := b.answer()
				e := assert.ErrorAs[*apperr.Error](t, err)
				assert.Equal(t, text, "")
				assert.Equal(t, e.Kind, c.kind)
				assert.Equal(t, e.Code, c.public)
				assert.Equal(t, e.RetryAfter > 0, c.kind != apperr.Internal)
				r := b.receipt()
				assert.Equal(t, r.Outcome, receipt.Refused)
				assert.Equal(t, r.Refusal.Reason, c.reason)
				assert.Equal(t, r.Refusal.Leg, strings.Fields(leg)[0])
				select { // the other leg is told
				case <-b.ended:
				case <-time.After(5 * time.Second):
					t.Fatal("decode goes on")
				}
			})
		}
	}
}

func TestWorkerReapedInMidStream(t *testing.T) {
	t.Parallel()
	b := setup(t, script{text: []string{"a"}, hang: true})
	s, err := b.Generate(t.Context(), principal(), request())
	assert.NoError(t, err)
	defer s.Close()
	_, err = s.Next(t.Context())
	assert.NoError(t, err)
	lost := time.Now()
	b.registry.Lost(b.epochs[pool.Decode])
	_, err = s.Next(t.Context())
	assert.Equal(t, assert.ErrorAs[*apperr.Error](t, err).Code, "worker_lost")
	assert.True(t, time.Since(lost) < time.Second)
	r := b.receipt()
	assert.Equal(t, *r.Refusal, receipt.Refusal{Leg: legDecode, Reason: reasonLost})
	assert.Equal(t, r.Output, uint32(1))
}

func TestClientLeaves(t *testing.T) {
	t.Parallel()
	b := setup(t, script{text: []string{"a"}, hang: true})
	ctx, cancel := context.WithCancel(t.Context())
	s, err := b.Generate(ctx, principal(), request())
	assert.NoError(t, err)
	cancel()
	for err == nil {
		_, err = s.Next(ctx)
	}
	assert.Equal(t, assert.ErrorAs[*apperr.Error](t, err).Kind, apperr.Canceled)
	s.Close()
	assert.Equal(t, b.receipt().Outcome, receipt.Canceled)

	b = setup(t, script{text: []string{"a"}, hang: true})
	s, err = b.Generate(t.Context(), principal(), request())
	assert.NoError(t, err)
	s.Close()
	s.Close()
	assert.Equal(t, b.receipt().Outcome, receipt.Canceled)
}

// The receipt of a request that was given up has what the legs measured in the
// end, or says that they did not say.
func TestEndOfTheLegs(t *testing.T) {
	t.Parallel()
	for name, s := range map[string]script{
		"acknowledged": {quarantined: 3, last: &workerv1.LegFacts{Tokens: 5, OutputTokens: 7, ComputeUs: 11}},
		"silent":       {silent: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s.text, s.hang = []string{"a"}, true
			b := setup(t, s)
			b.ackWithin = 50 * time.Millisecond
			if !s.silent {
				b.ackWithin = time.Minute
			}
			stream, err := b.Generate(t.Context(), principal(), request())
			assert.NoError(t, err)
			_, err = stream.Next(t.Context())
			assert.NoError(t, err)
			stream.Close()
			r := b.receipt()
			assert.Equal(t, r.Outcome, receipt.Canceled)
			for _, leg := range []*receipt.Leg{r.Prefill, r.Decode} {
				assert.Equal(t, leg.Unacknowledged, s.silent)
				assert.Equal(t, leg.Quarantined, s.quarantined)
				if !s.silent {
					assert.Equal(t, *leg.Tokens, uint32(5))
					assert.Equal(t, leg.ComputeUS, uint64(11))
				}
			}
			want := int64(7)
			if s.silent {
				want = 1 // what was received
			}
			assert.Equal(t, b.usage.DecodeTokens, want)
		})
	}
}

func TestNoSuccessWithoutEvidence(t *testing.T) {
	t.Parallel()
	b := setup(t, script{text: []string{"a"}})
	b.settle = apperr.New(apperr.Unavailable, "evidence_unavailable", "Late.")
	text, _, err := b.answer()
	assert.Equal(t, text, "a")
	assert.Equal(t, assert.ErrorAs[*apperr.Error](t, err).Code, "evidence_unavailable")
	b.receipt()

	b = setup(t, script{text: []string{"a"}})
	s, err := b.Generate(t.Context(), principal(), request())
	assert.NoError(t, err)
	_, err = s.Finish(t.Context()) // before the end of the text
	assert.True(t, err != nil)
	assert.Equal(t, b.receipt().Outcome, receipt.Failed)
}

// What is refused before admission touches no worker and leaves no receipt.
// narrow is a pool whose legs hold less than the window of the model.
type narrow struct{ Workers }

func (narrow) EffectiveContext([32]byte) int { return 100 }

// What the legs hold decides, not the window that the model was made for, up to
// the last token.
func TestWhatLegsHoldDecides(t *testing.T) {
	t.Parallel()
	generate := func(prompt string, out int) error {
		b := setup(t, script{})
		b.Pool = narrow{b.Pool}
		r := request()
		r.Messages[0].Content, r.MaxTokens = prompt, out
		s, err := b.Generate(t.Context(), principal(), r)
		if s != nil {
			s.Close()
		}
		if err != nil {
			assert.Equal(t, len(b.intents)+len(b.receipts)+b.calls, 0)
		}
		return err
	}
	long := strings.Repeat("x", 90) // and the marks of a turn
	for _, err := range []error{generate(long, 1), generate(long, 0), generate("x", 100), generate(strings.Repeat("x", 900_000), 1)} {
		e := assert.ErrorAs[*apperr.Error](t, err)
		assert.Equal(t, e.Code, "context_length_exceeded")
		assert.True(t, strings.Contains(e.Message, "100"))
	}
	assert.NoError(t, generate("x", 20))
}

func TestRefusedBeforeAdmission(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		change func(*Request)
		code   string
		says   []string
	}{
		"unknown model":  {func(r *Request) { r.Model = "x" }, "model_not_found", nil},
		"long prompt":    {func(r *Request) { r.Messages[0].Content = strings.Repeat("x", 300) }, "context_length_exceeded", []string{"256", "3"}},
		"huge prompt":    {func(r *Request) { r.Messages[0].Content = strings.Repeat("x", 900_000) }, "context_length_exceeded", []string{"256", "at least"}},
		"long answer":    {func(r *Request) { r.MaxTokens = 256 }, "context_length_exceeded", []string{"256"}},
		"endless answer": {func(r *Request) { r.MaxTokens = math.MaxInt }, "context_length_exceeded", []string{"256"}},
		"bad parameter":  {func(r *Request) { r.Params.TopP = 7 }, "", nil},
		"bad role":       {func(r *Request) { r.Messages[0].Role = "tool" }, "", nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t, script{})
			r := request()
			c.change(&r)
			s, err := b.Generate(t.Context(), principal(), r)
			if s != nil {
				s.Close() // or its end would be waited for
			}
			e := assert.ErrorAs[*apperr.Error](t, err)
			assert.False(t, LeftReceipt(err))
			if c.code != "" {
				assert.Equal(t, e.Code, c.code)
			}
			assert.True(t, e.Kind == apperr.Invalid || e.Kind == apperr.NotFound)
			for _, s := range c.says {
				assert.True(t, strings.Contains(e.Message, s))
			}
			assert.Equal(t, len(b.intents)+len(b.receipts)+b.calls, 0)
		})
	}
	b := setup(t, script{})
	b.full = apperr.New(apperr.TooMany, "rate_limit_exceeded", "No.")
	_, err := b.Generate(t.Context(), principal(), request())
	assert.Equal(t, assert.ErrorAs[*apperr.Error](t, err).Kind, apperr.TooMany)
	assert.Equal(t, len(b.intents)+len(b.receipts)+b.calls, 0)
	b.full = nil
	p := principal()
	p.Scopes = tenancy.ScopeKeysRead
	_, err = b.Generate(t.Context(), p, request())
	assert.Equal(t, assert.ErrorAs[*apperr.Error](t, err).Kind, apperr.Forbidden)
	b.registry.Lost(b.epochs[pool.Decode])
	_, err = b.Generate(t.Context(), principal(), request())
	assert.Equal(t, assert.ErrorAs[*apperr.Error](t, err).Code, "no_workers")
}
