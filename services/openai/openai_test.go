package openai

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"go.uber.org/goleak"

	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/services/gateway"
	"bulkhead.dev/services/httpx"
	"bulkhead.dev/tenancy"
	"bulkhead.dev/tenancy/quota"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fake is a backend that answers what the test wants and keeps what it was
// asked.
type fake struct {
	pieces    []string
	generate  error // of Generate
	next      error // after the pieces
	finish    error
	pause     time.Duration // before the end of the text
	keyErr    error
	scopes    tenancy.Scopes
	mu        sync.Mutex
	requests  []gateway.Request
	log       bytes.Buffer
	closed    int
	panicking bool
}

const goodKey = "good"

func (f *fake) Authenticate(_ context.Context, bearer string) (tenancy.Principal, error) {
	if f.keyErr != nil {
		return tenancy.Principal{}, f.keyErr
	}
	if bearer != goodKey {
		return tenancy.Principal{}, apperr.New(apperr.Unauthenticated, "invalid_api_key", "The API key is not valid.").WithNoRetry()
	}
	return tenancy.Principal{Tenant: id.Tenant{1}, Scopes: f.scopes}, nil
}

func (f *fake) Models(context.Context, tenancy.Principal) ([]tenancy.Model, error) {
	return []tenancy.Model{{Name: "tiny", Created: time.Unix(1_700_000_000, 0)}}, nil
}

func (f *fake) Model(_ context.Context, _ tenancy.Principal, name string) (tenancy.Model, error) {
	if name != "tiny" {
		return tenancy.Model{}, apperr.New(apperr.NotFound, "model_not_found", "There is no such model.").WithParam("model")
	}
	return tenancy.Model{Name: "tiny", Created: time.Unix(1_700_000_000, 0)}, nil
}

func (f *fake) Generate(_ context.Context, _ tenancy.Principal, r gateway.Request) (Stream, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.requests = append(f.requests, r)
	if f.panicking {
		panic("the prompt was hunter2")
	}
	if f.generate != nil {
		return nil, f.generate
	}
	return &fakeStream{f: f, id: r.ID, left: f.pieces}, nil
}

func (f *fake) last(t *testing.T) gateway.Request {
	t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.requests) == 0 {
		t.Fatal("the backend was not asked")
	}
	return f.requests[len(f.requests)-1]
}

func (f *fake) asked() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.requests)
}

type fakeStream struct {
	f    *fake
	id   id.Request
	left []string
}

func (s *fakeStream) Model() string      { return "tiny" }
func (s *fakeStream) Created() time.Time { return time.Unix(1_800_000_000, 0) }
func (s *fakeStream) PromptTokens() int  { return 7 }
func (s *fakeStream) Limits() quota.Status {
	return quota.Status{Requests: quota.Rate{Limit: 60, Remaining: 59, Reset: time.Second}, Tokens: quota.Rate{Limit: 1000, Remaining: 0, Reset: time.Minute}}
}
func (s *fakeStream) ReceiptID() id.Receipt { return s.id.Receipt() }
func (s *fakeStream) Next(ctx context.Context) (string, error) {
	if len(s.left) > 0 {
		p := s.left[0]
		s.left = s.left[1:]
		return p, nil
	}
	select {
	case <-time.After(s.f.pause):
	case <-ctx.Done():
		return "", apperr.From(ctx.Err())
	}
	if s.f.next != nil {
		return "", s.f.next
	}
	return "", io.EOF
}

func (s *fakeStream) Finish(context.Context) (gateway.Final, error) {
	if s.f.finish != nil {
		return gateway.Final{}, s.f.finish
	}
	return gateway.Final{FinishReason: "stop", PromptTokens: 7, CompletionTokens: len(s.f.pieces), Receipt: s.id.Receipt()}, nil
}

func (s *fakeStream) Close() {
	s.f.mu.Lock()
	defer s.f.mu.Unlock()
	s.f.closed++
}

type nobody struct{}

func (nobody) Request(string, string, time.Duration) {}
func (nobody) Unauthenticated()                      {}

func serve(t *testing.T, f *fake) *httptest.Server {
	t.Helper()
	if f.scopes == 0 {
		f.scopes = tenancy.ScopesTenant
	}
	edge := &httpx.Edge{Log: slog.New(slog.NewJSONHandler(&lockedWriter{f: f}, nil)), Now: time.Now, Observer: nobody{}}
	ts := httptest.NewServer(newServer(Options{Backend: f, Keys: f, Edge: edge, BodyLimit: 1 << 16}, 20*time.Millisecond))
	t.Cleanup(ts.Close)
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	return ts
}

type lockedWriter struct{ f *fake }

func (w *lockedWriter) Write(b []byte) (int, error) {
	w.f.mu.Lock()
	defer w.f.mu.Unlock()
	return w.f.log.Write(b)
}

func post(t *testing.T, ts *httptest.Server, path, body string) (*http.Response, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, ts.URL+path, strings.NewReader(body))
	assert.NoError(t, err)
	req.Header.Set("Authorization", "Bearer "+goodKey)
	return do(t, req)
}

func do(t *testing.T, req *http.Request) (*http.Response, string) {
	t.Helper()
	res, err := http.DefaultClient.Do(req)
	assert.NoError(t, err)
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	assert.NoError(t, err)
	return res, string(b)
}

const hello = `{"model":"tiny","messages":[{"role":"user","content":"hello"}]`

func TestWholeAnswer(t *testing.T) {
	t.Parallel()
	f := &fake{pieces: []string{"Hé", "llo"}}
	ts := serve(t, f)
	res, body := post(t, ts, "/v1/chat/completions", hello+"}")
	assert.Equal(t, res.StatusCode, 200)
	reqID := res.Header.Get("X-Request-Id")
	assert.Equal(t, res.Header.Get("X-Bulkhead-Receipt"), "rcp_"+reqID[4:])
	want := `{"id":"chatcmpl-` + reqID[4:] + `","object":"chat.completion","created":1800000000,"model":"tiny","choices":[{"index":0,"message":{"role":"assistant","content":"Héllo","refusal":null},"logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":7,"completion_tokens":2,"total_tokens":9,"prompt_tokens_details":{"cached_tokens":0}}}`
	assert.Equal(t, body, want)

	res, body = post(t, ts, "/v1/completions", `{"model":"tiny","prompt":["hello"],"max_tokens":3}`)
	want = `{"id":"cmpl-` + res.Header.Get("X-Request-Id")[4:] + `","object":"text_completion","created":1800000000,"model":"tiny","choices":[{"text":"Héllo","index":0,"logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":7,"completion_tokens":2,"total_tokens":9,"prompt_tokens_details":{"cached_tokens":0}}}`
	assert.Equal(t, body, want)
	assert.Equal(t, f.last(t).Text, "hello")
	assert.Equal(t, f.last(t).MaxTokens, 3)
	assert.Equal(t, f.closed, 2)
}

// Encoders and buffers are shared by all requests of the process. What an answer
// holds does not depend on what was answered before or is answered beside it: it
// is the same to the byte, and nothing of another tenant is in it.
func TestAnswersShareNothing(t *testing.T) {
	t.Parallel()
	const canary = "canary-7f3a9c1e"
	mine := serve(t, &fake{pieces: []string{"He", "llo"}})
	bodies := []string{hello + "}", hello + `,"stream":true}`, hello + `,"stream":true,"stream_options":{"include_usage":true}}`, `{"model":"none"}`}
	ask := func(ts *httptest.Server, body string) string {
		res, text := post(t, ts, "/v1/chat/completions", body)
		return strings.ReplaceAll(golden(res, text), ": keep-alive\n\n", "")
	}
	want := make([]string, len(bodies))
	for i, b := range bodies {
		want[i] = ask(mine, b)
	}
	// Another tenant, with answers and errors that are shorter and much longer.
	var wg sync.WaitGroup
	for _, n := range []int{1, 5, 200, 4000} {
		text := strings.Repeat(canary, n)
		theirs := serve(t, &fake{pieces: []string{text, text}})
		broken := serve(t, &fake{pieces: []string{text}, next: apperr.New(apperr.Unavailable, "worker_lost", "%s", text)})
		wg.Go(func() {
			for i := range 12 {
				if b := bodies[i%3]; !strings.Contains(ask(theirs, b), canary) || !strings.Contains(ask(broken, b), canary) {
					t.Error("the other tenant does not get its own text")
				}
				ask(theirs, `{"model":"`+canary+`","messages":"`+canary+`"}`)
			}
		})
	}
	for range 3 {
		wg.Go(func() {
			for i := range 60 {
				got := ask(mine, bodies[i%len(bodies)])
				if got != want[i%len(bodies)] || strings.Contains(got, canary[:6]) {
					t.Errorf("the answer is %q, want %q", got, want[i%len(bodies)])
				}
			}
		})
	}
	wg.Wait()
}

// golden replaces what differs between runs.
func golden(res *http.Response, body string) string {
	return strings.ReplaceAll(body, res.Header.Get("X-Request-Id")[4:], "ID")
}

const head = `data: {"id":"chatcmpl-ID","object":"chat.completion.chunk","created":1800000000,"model":"tiny","choices":[`

func TestStream(t *testing.T) {
	t.Parallel()
	ts := serve(t, &fake{pieces: []string{"He", "llo"}})
	res, body := post(t, ts, "/v1/chat/completions", hello+`,"stream":true}`)
	assert.Equal(t, res.Header.Get("Content-Type"), "text/event-stream; charset=utf-8")
	assert.Equal(t, golden(res, body), head+`{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}

`+head+`{"index":0,"delta":{"content":"He"},"logprobs":null,"finish_reason":null}]}

`+head+`{"index":0,"delta":{"content":"llo"},"logprobs":null,"finish_reason":null}]}

`+head+`{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}]}

data: [DONE]

`)
}

func TestStreamUsage(t *testing.T) {
	t.Parallel()
	ts := serve(t, &fake{pieces: []string{"x"}})
	res, body := post(t, ts, "/v1/chat/completions", hello+`,"stream":true,"stream_options":{"include_usage":true}}`)
	lines := strings.Split(strings.TrimSpace(golden(res, body)), "\n\n")
	assert.Equal(t, len(lines), 5)
	for _, l := range lines[:3] {
		assert.True(t, strings.HasSuffix(l, `,"usage":null}`))
	}
	assert.Equal(t, lines[3], head+`],"usage":{"prompt_tokens":7,"completion_tokens":1,"total_tokens":8,"prompt_tokens_details":{"cached_tokens":0}}}`)
	assert.Equal(t, lines[4], "data: [DONE]")
}

func TestObfuscation(t *testing.T) {
	t.Parallel()
	ts := serve(t, &fake{pieces: []string{"a", strings.Repeat("b", 30)}})
	_, body := post(t, ts, "/v1/chat/completions", hello+`,"stream":true,"stream_options":{"include_obfuscation":true}}`)
	var sizes []int
	for line := range strings.SplitSeq(body, "\n\n") {
		if strings.Contains(line, `"content":"a"`) || strings.Contains(line, `"content":"b`) {
			sizes = append(sizes, len(line))
		}
	}
	assert.Equal(t, len(sizes), 2)
	assert.Equal(t, sizes[0], sizes[1])
}

func TestErrorInStream(t *testing.T) {
	t.Parallel()
	for name, f := range map[string]*fake{
		"leg fails":   {pieces: []string{"quux"}, next: apperr.New(apperr.Unavailable, "worker_lost", "A worker went away.")},
		"no evidence": {pieces: []string{"quux"}, finish: apperr.New(apperr.Unavailable, "evidence_unavailable", "No.").WithNoRetry()},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ts := serve(t, f)
			_, body := post(t, ts, "/v1/chat/completions", hello+`,"stream":true}`)
			assert.True(t, strings.Contains(body, `"content":"quux"`))
			assert.True(t, strings.Contains(body, `data: {"error":{"message":`))
			assert.False(t, strings.Contains(body, "[DONE]"))
			assert.False(t, strings.Contains(body, `"finish_reason":"`))

			_, body = post(t, ts, "/v1/chat/completions", hello+`}`)
			assert.False(t, strings.Contains(body, "quux"))
		})
	}
}

func TestKeepAlive(t *testing.T) {
	t.Parallel()
	ts := serve(t, &fake{pieces: []string{"x"}, pause: 100 * time.Millisecond})
	_, body := post(t, ts, "/v1/chat/completions", hello+`,"stream":true}`)
	assert.True(t, strings.Contains(body, ": keep-alive\n\n"))
	assert.True(t, strings.HasSuffix(body, "data: [DONE]\n\n"))
}

func TestDisconnectEndsTheStream(t *testing.T) {
	t.Parallel()
	f := &fake{pieces: []string{"x"}, pause: time.Hour}
	ts := serve(t, f)
	ctx, cancel := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, ts.URL+"/v1/chat/completions", strings.NewReader(hello+`,"stream":true}`))
	assert.NoError(t, err)
	req.Header.Set("Authorization", "Bearer "+goodKey)
	res, err := http.DefaultClient.Do(req)
	assert.NoError(t, err)
	_, err = res.Body.Read(make([]byte, 10))
	assert.NoError(t, err)
	cancel()
	_ = res.Body.Close()
	for range 500 {
		f.mu.Lock()
		closed := f.closed
		f.mu.Unlock()
		if closed == 1 {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
	t.Fatal("the stream of a client that left is still open")
}

func TestErrors(t *testing.T) {
	t.Parallel()
	for code, c := range map[string]struct {
		err     *apperr.Error
		status  int
		kind    string
		headers map[string]string
	}{
		"context_length_exceeded": {apperr.New(apperr.Invalid, "context_length_exceeded", "m").WithParam("messages"), 400, "invalid_request_error", nil},
		"model_not_found":         {apperr.New(apperr.NotFound, "model_not_found", "m"), 404, "invalid_request_error", nil},
		"rate_limit_exceeded":     {apperr.New(apperr.TooMany, "rate_limit_exceeded", "m").WithRetryAfter(1500 * time.Millisecond), 429, "requests", map[string]string{"Retry-After": "2", "Retry-After-Ms": "1500"}},
		"long_wait":               {apperr.New(apperr.TooMany, "long_wait", "m").WithRetryAfter(5 * time.Minute), 429, "requests", map[string]string{"Retry-After": "300", "Retry-After-Ms": "", "X-Should-Retry": "false"}},
		"rate of tokens": {apperr.Wrap(&quota.Refusal{Limit: &quota.Limit{Meter: quota.Tokens}, Status: quota.Status{Tokens: quota.Rate{Limit: 1000, Remaining: 4, Reset: 59*time.Second + 760*time.Millisecond}}},
			apperr.TooMany, "rate_limit_exceeded", "m").WithRetryAfter(2 * time.Second), 429, "tokens",
			map[string]string{"Retry-After": "2", "X-Ratelimit-Limit-Tokens": "1000", "X-Ratelimit-Remaining-Tokens": "4", "X-Ratelimit-Reset-Tokens": "59.76s", "X-Ratelimit-Limit-Requests": "", "X-Should-Retry": ""}},
		"too many at once": {apperr.Wrap(&quota.Refusal{Limit: &quota.Limit{Meter: quota.Concurrent}}, apperr.TooMany, "rate_limit_exceeded", "m"), 429, "requests", nil},
		"money": {apperr.Wrap(&quota.Refusal{Limit: &quota.Limit{Meter: quota.Money}}, apperr.TooMany, "project_spend_limit_exceeded", "m").WithRetryAfter(time.Second).WithNoRetry(), 429, "insufficient_quota",
			map[string]string{"X-Should-Retry": "false"}},
		"server_is_overloaded": {apperr.New(apperr.Unavailable, "server_is_overloaded", "m").WithRetryAfter(time.Second), 503, "service_unavailable_error", map[string]string{"Retry-After": "1"}},
		"response_withheld":    {apperr.New(apperr.Internal, "response_withheld", "m").WithNoRetry(), 500, "server_error", map[string]string{"X-Should-Retry": "false"}},
		"handoff_timeout":      {apperr.New(apperr.Unavailable, "handoff_timeout", "m"), 503, "server_error", nil},
	} {
		t.Run(code, func(t *testing.T) {
			t.Parallel()
			ts := serve(t, &fake{generate: c.err})
			res, body := post(t, ts, "/v1/chat/completions", hello+"}")
			assert.Equal(t, res.StatusCode, c.status)
			assert.True(t, strings.HasPrefix(res.Header.Get("X-Request-Id"), "req_"))
			for k, v := range c.headers {
				assert.Equal(t, res.Header.Get(k), v)
			}
			var e struct {
				Error map[string]any `json:"error"`
			}
			assert.NoError(t, json.Unmarshal([]byte(body), &e))
			assert.Equal(t, len(e.Error), 4)
			assert.Equal(t, e.Error["code"], any(c.err.Code))
			assert.Equal(t, e.Error["type"], any(c.kind))
		})
	}
}

func TestPanicIsAnErrorWithoutContent(t *testing.T) {
	t.Parallel()
	f := &fake{panicking: true}
	ts := serve(t, f)
	res, body := post(t, ts, "/v1/chat/completions", hello+"}")
	assert.Equal(t, res.StatusCode, 500)
	assert.True(t, strings.Contains(body, `"code":"internal_error"`))
	f.mu.Lock()
	defer f.mu.Unlock()
	assert.False(t, strings.Contains(f.log.String()+body, "hunter2"))
}

func TestKeyIsCheckedBeforeAnythingElse(t *testing.T) {
	t.Parallel()
	f := &fake{}
	ts := serve(t, f)
	s := &server{}
	for _, r := range s.routes() {
		path := strings.ReplaceAll(r.path, "{id}", "x")
		for _, auth := range []string{"", "Bearer", "Bearer ", "Basic good", "Bearer wrong"} {
			req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, ts.URL+path, strings.NewReader("\x1f\x8b not gzip"))
			assert.NoError(t, err)
			req.Header.Set("Authorization", auth)
			req.Header.Set("Content-Encoding", "gzip")
			res, body := do(t, req)
			assert.Equal(t, res.StatusCode, 401)
			assert.True(t, strings.Contains(body, `"code":"invalid_api_key"`))
		}
	}
	assert.Equal(t, f.asked(), 0)

	f = &fake{keyErr: apperr.New(apperr.Unavailable, "key_check_unavailable", "m").WithRetryAfter(time.Second)}
	res, _ := post(t, serve(t, f), "/v1/chat/completions", hello+"}")
	assert.Equal(t, res.StatusCode, 503)
	assert.Equal(t, res.Header.Get("Retry-After"), "1")

	f = &fake{scopes: tenancy.ScopeKeysRead}
	res, _ = post(t, serve(t, f), "/v1/chat/completions", hello+"}")
	assert.Equal(t, res.StatusCode, 403)
	assert.Equal(t, f.asked(), 0)
}

func TestRoutes(t *testing.T) {
	t.Parallel()
	ts := serve(t, &fake{})
	for path, want := range map[string]string{
		"/v1/embeddings":          "unsupported_endpoint",
		"/v1/responses":           "unsupported_endpoint",
		"/v1/responses/x/cancel":  "unsupported_endpoint",
		"/v1/audio/speech":        "unsupported_endpoint",
		"/v1/nothing":             "unknown_url",
		"/":                       "unknown_url",
		"/v1/chat/completions/id": "unsupported_endpoint",
	} {
		res, body := post(t, ts, path, "{}")
		assert.True(t, res.StatusCode == 404 || res.StatusCode == 400)
		assert.True(t, strings.Contains(body, want))
	}
	res, body := post(t, ts, "/v1/models", "{}")
	assert.Equal(t, res.StatusCode, 405)
	assert.Equal(t, res.Header.Get("Allow"), "GET")
	assert.True(t, strings.Contains(body, `"error"`))
}

func TestRefusedBodies(t *testing.T) {
	t.Parallel()
	f := &fake{}
	ts := serve(t, f)
	for _, c := range []struct{ body, code, param string }{
		{``, "invalid_json", ""},
		{`[]`, "invalid_type", ""},
		{`{"model":"tiny"}`, "missing_required_parameter", "messages"},
		{hello + `,"model":"tiny"}`, "duplicate_field", "model"},
		{hello + `,"temperature":1,"temperature":2}`, "duplicate_field", "temperature"},
		{`{"messages":[{"role":"user","content":"x","content":"y"}],"model":"tiny"}`, "duplicate_field", "messages[0].content"},
		{hello + `,"temperature":"hunter2"}`, "invalid_type", "temperature"},
		{hello + `,"temperature":3}`, "invalid_value", "temperature"},
		{hello + `,"top_p":-0.5}`, "invalid_value", "top_p"},
		{hello + `,"max_tokens":0}`, "invalid_value", "max_tokens"},
		{hello + `,"max_tokens":1.5}`, "invalid_type", "max_tokens"},
		{hello + `,"max_completion_tokens":-1}`, "invalid_value", "max_completion_tokens"},
		{hello + `,"n":2}`, "unsupported_parameter", "n"},
		{hello + `,"logprobs":true}`, "unsupported_parameter", "logprobs"},
		{hello + `,"tools":[{"type":"function"}]}`, "unsupported_parameter", "tools"},
		{hello + `,"response_format":{"type":"json_object"}}`, "unsupported_parameter", "response_format"},
		{hello + `,"store":true}`, "unsupported_parameter", "store"},
		{hello + `,"stop":["a","b","c","d","e"]}`, "invalid_value", "stop"},
		{hello + `,"stop":[""]}`, "invalid_value", "stop[0]"},
		{hello + `,"stop":7}`, "invalid_type", "stop"},
		{hello + `,"stream_options":{"include_usage":true}}`, "invalid_value", "stream_options"},
		{`{"model":"tiny","messages":[{"role":"root","content":"x"}]}`, "invalid_value", "messages[0].role"},
		{`{"model":"tiny","messages":[{"role":"user","content":"x"},{"role":"tool","content":"x"}]}`, "unsupported_value", "messages[1].role"},
		{`{"model":"tiny","messages":[{"role":"user"}]}`, "invalid_type", "messages[0].content"},
		{`{"model":"tiny","messages":[{"role":"user","content":[{"type":"image_url"}]}]}`, "unsupported_value", "messages[0].content[0].type"},
		{`{"model":"","messages":[{"role":"user","content":"x"}]}`, "missing_required_parameter", "model"},
		{`{"model":"tiny","messages":[{"role":"user","content":"` + "\xff" + `"}]}`, "invalid_json", ""},
		{`{"model":"tiny","messages":[{"role":"user","content":"` + strings.Repeat("x", 1<<16) + `"}]}`, "request_too_large", ""},
	} {
		res, body := post(t, ts, "/v1/chat/completions", c.body)
		assert.True(t, res.StatusCode == 400 || res.StatusCode == 413)
		var e errorBody
		assert.NoError(t, json.Unmarshal([]byte(body), &e))
		param := ""
		if e.Error.Param != nil {
			param = *e.Error.Param
		}
		if *e.Error.Code != c.code || param != c.param || strings.Contains(body, "hunter2") {
			t.Errorf("%.80s: got %s", c.body, body)
		}
	}
	for _, c := range []string{
		`{"model":"tiny"}`, `{"model":"tiny","prompt":[1,2]}`, `{"model":"tiny","prompt":["a","b"]}`, `{"model":"tiny","prompt":7}`,
		`{"model":"tiny","prompt":"x","echo":true}`, `{"model":"tiny","prompt":"x","best_of":2}`, `{"model":"tiny","prompt":"x","suffix":"y"}`,
	} {
		res, _ := post(t, ts, "/v1/completions", c)
		assert.Equal(t, res.StatusCode, 400)
	}
	assert.Equal(t, f.asked(), 0)
}

func TestAcceptedFields(t *testing.T) {
	t.Parallel()
	f := &fake{}
	ts := serve(t, f)
	res, _ := post(t, ts, "/v1/chat/completions", `{"model":"tiny","messages":[{"role":"system","content":"s"},{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}],
		"temperature":0,"top_p":0.5,"top_k":7,"min_p":0.1,"frequency_penalty":1,"presence_penalty":-1,"seed":-3,"stop":"END","max_completion_tokens":9,
		"n":1,"user":"u","metadata":{"a":"b"},"logprobs":false,"tools":[],"tool_choice":"auto","response_format":{"type":"text"},"store":false,"parallel_tool_calls":true,"logit_bias":{}}`)
	assert.Equal(t, res.StatusCode, 200)
	r := f.last(t)
	assert.Equal(t, r.Messages[1].Content, "ab")
	assert.Equal(t, r.Params.TopK, 7)
	assert.Equal(t, r.Params.Temperature, 0)
	assert.Equal(t, r.Params.Seed, ^uint64(2))
	assert.True(t, r.SeedSet)
	assert.Equal(t, r.Stop, []string{"END"})
	assert.Equal(t, r.MaxTokens, 9)
	assert.Equal(t, r.Surface, "openai.chat")
}

// The control fields of engines have no effect, wherever and however they are
// written: the request that reaches the backend is the same.
func TestEngineControlFieldsHaveNoEffect(t *testing.T) {
	t.Parallel()
	f := &fake{}
	ts := serve(t, f)
	post(t, ts, "/v1/chat/completions", hello+"}")
	plain := f.last(t)
	fields := []string{"bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank", "routed_dp_rank", "kv_transfer_params",
		"ec_transfer_params", "extra_key", "cache_salt", "rid", "request_id", "lora_path", "session_params", "custom_logit_processor", "uuid",
		"previous_response_id", "Model", "MESSAGES", "Temperature", "max_Tokens", "owner", "tenant"}
	for _, name := range fields {
		for _, value := range []string{`"2.2.2.2"`, `1`, `{"do_remote_prefill":true}`, `null`} {
			for _, body := range []string{
				fmt.Sprintf(`%s,%q:%s}`, hello, name, value),
				fmt.Sprintf(`%s,%q:%s}`, hello, strings.ToUpper(name), value),
				fmt.Sprintf(`%s,"extra_body":{%q:%s}}`, hello, name, value),
				fmt.Sprintf(`%s,"metadata":{%q:%s}}`, hello, name, value),
				fmt.Sprintf(`{"model":"tiny","messages":[{"role":"user","content":"hello",%q:%s}]}`, name, value),
			} {
				res, out := post(t, ts, "/v1/chat/completions", body)
				if res.StatusCode != 200 {
					t.Fatalf("%s: %s", body, out)
				}
				got := f.last(t)
				got.ID, got.Received = plain.ID, plain.Received
				assert.Equal(t, got, plain)
			}
		}
	}
	// The same goes for headers.
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, ts.URL+"/v1/chat/completions", strings.NewReader(hello+"}"))
	assert.NoError(t, err)
	req.Header.Set("Authorization", "Bearer "+goodKey)
	req.Header.Set("X-Request-Id", plain.ID.String())
	req.Header.Set("X-Data-Parallel-Rank", "1")
	res, _ := do(t, req)
	assert.True(t, res.Header.Get("X-Request-Id") != plain.ID.String())
}

func TestGoSDK(t *testing.T) {
	t.Parallel()
	f := &fake{pieces: []string{"He", "llo"}}
	ts := serve(t, f)
	client := openai.NewClient(option.WithBaseURL(ts.URL+"/v1"), option.WithAPIKey(goodKey), option.WithMaxRetries(0), option.WithHTTPClient(ts.Client()))
	params := openai.ChatCompletionNewParams{Model: "tiny", Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage("hi")}}
	res, err := client.Chat.Completions.New(t.Context(), params)
	assert.NoError(t, err)
	assert.Equal(t, res.Choices[0].Message.Content, "Hello")
	assert.Equal(t, res.Usage.TotalTokens, int64(9))

	params.StreamOptions.IncludeUsage = openai.Bool(true)
	stream := client.Chat.Completions.NewStreaming(t.Context(), params)
	acc := openai.ChatCompletionAccumulator{}
	for stream.Next() {
		assert.True(t, acc.AddChunk(stream.Current()))
	}
	assert.NoError(t, stream.Err())
	assert.Equal(t, acc.Choices[0].Message.Content, "Hello")
	assert.Equal(t, acc.Choices[0].FinishReason, "stop")
	assert.Equal(t, acc.Usage.TotalTokens, int64(9))

	list, err := client.Models.List(t.Context())
	assert.NoError(t, err)
	assert.Equal(t, list.Data[0].ID, "tiny")
	_, err = client.Models.Get(t.Context(), "nope")
	assert.Equal(t, assert.ErrorAs[*openai.Error](t, err).StatusCode, 404)

	f2 := &fake{generate: apperr.New(apperr.TooMany, "rate_limit_exceeded", "Slow down.")}
	client = openai.NewClient(option.WithBaseURL(serve(t, f2).URL+"/v1"), option.WithAPIKey(goodKey), option.WithMaxRetries(0))
	params.StreamOptions = openai.ChatCompletionStreamOptionsParam{}
	_, err = client.Chat.Completions.New(t.Context(), params)
	e := assert.ErrorAs[*openai.Error](t, err)
	assert.Equal(t, e.StatusCode, 429)
	assert.Equal(t, e.Code, "rate_limit_exceeded")
	assert.Equal(t, e.Message, "Slow down.")

	f3 := &fake{pieces: []string{"x"}, next: apperr.New(apperr.Unavailable, "worker_lost", "Gone.")}
	client = openai.NewClient(option.WithBaseURL(serve(t, f3).URL+"/v1"), option.WithAPIKey(goodKey), option.WithMaxRetries(0))
	stream = client.Chat.Completions.NewStreaming(t.Context(), params)
	for stream.Next() {
	}
	assert.True(t, stream.Err() != nil && strings.Contains(stream.Err().Error(), "Gone."))
}

func FuzzBodies(f *testing.F) {
	f.Add(hello + "}")
	f.Add(hello + `,"stop":["a"],"stream":true,"stream_options":{}}`)
	f.Add(`{"model":"tiny","prompt":["x"]}`)
	f.Fuzz(func(t *testing.T, s string) {
		check := func(r gateway.Request, err error) {
			if err != nil {
				if _, ok := errors.AsType[*apperr.Error](err); !ok {
					t.Fatalf("untyped error %v", err)
				}
				return
			}
			if r.Model == "" || r.Surface == "" {
				t.Fatal("an incomplete request was accepted")
			}
		}
		var c chatBody
		if err := unmarshal([]byte(s), &c); err == nil {
			check(c.request())
		}
		var p completionBody
		if err := unmarshal([]byte(s), &p); err == nil {
			check(p.request())
		}
	})
}
