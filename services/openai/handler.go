package openai

import (
	"context"
	"net/http"
	"strconv"
	"strings"
	"time"

	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/services/gateway"
	"bulkhead.dev/services/httpx"
	"bulkhead.dev/tenancy"
	"bulkhead.dev/tenancy/quota"
)

// Stream is an answer that is being computed; see gateway.Stream.
type Stream interface {
	Model() string
	Created() time.Time
	PromptTokens() int
	Limits() quota.Status
	ReceiptID() id.Receipt
	Next(ctx context.Context) (string, error)
	Finish(ctx context.Context) (gateway.Final, error)
	Close()
}

// Backend is the pipeline behind the surface; see gateway.Gateway.
type Backend interface {
	Generate(ctx context.Context, p tenancy.Principal, r gateway.Request) (Stream, error)
	Models(ctx context.Context, p tenancy.Principal) ([]tenancy.Model, error)
	Model(ctx context.Context, p tenancy.Principal, name string) (tenancy.Model, error)
}

// Options wire the surface. All fields are required.
type Options struct {
	Backend   Backend
	Keys      httpx.Authenticator
	Edge      *httpx.Edge
	BodyLimit int64 // bytes of the largest request body
}

type server struct {
	Options
	keepAlive time.Duration // between comments in a silent stream
}

// keepAlive is shorter than the idle timeouts of common proxies (30 s and up).
const keepAlive = 15 * time.Second

// writeTimeout is how long a client may take to accept one piece of a stream.
const writeTimeout = 30 * time.Second

// New returns the handler of everything below /v1/.
func New(o Options) http.Handler { return newServer(o, keepAlive) }

func newServer(o Options, beat time.Duration) http.Handler {
	s := &server{Options: o, keepAlive: beat}
	mux := http.NewServeMux()
	for _, r := range s.routes() {
		mux.Handle(r.path, s.route(r))
	}
	return o.Edge.Wrap(mux, WriteError)
}

// route is one line of the table that New serves and tests walk.
type route struct {
	path    string
	method  string // "" answers every method
	name    string // for logs and metrics
	handler func(*server, http.ResponseWriter, *http.Request) error
}

func (s *server) routes() []route {
	rs := []route{
		{"/v1/chat/completions", http.MethodPost, "chat", (*server).chat},
		{"/v1/completions", http.MethodPost, "completions", (*server).completions},
		{"/v1/models", http.MethodGet, "models", (*server).models},
		{"/v1/models/{id}", http.MethodGet, "model", (*server).model},
		{"/", "", "unknown", func(_ *server, _ http.ResponseWriter, _ *http.Request) error {
			return apperr.New(apperr.NotFound, "unknown_url", "There is nothing at this address. %s", served).WithNoRetry()
		}},
	}
	for _, path := range unserved {
		rs = append(rs, route{path, "", "unsupported", func(_ *server, _ http.ResponseWriter, _ *http.Request) error {
			return apperr.New(apperr.Invalid, "unsupported_endpoint", "This endpoint of the OpenAI API is not supported. %s", served).WithNoRetry()
		}})
	}
	return rs
}

const served = "Supported are POST /v1/chat/completions, POST /v1/completions, GET /v1/models and GET /v1/models/{id}."

// unserved are routes of the OpenAI API that exist there and not here. They get
// a clearer answer than an address that exists nowhere.
var unserved = []string{
	"/v1/responses", "/v1/responses/", "/v1/conversations", "/v1/conversations/", "/v1/embeddings", "/v1/moderations",
	"/v1/audio/", "/v1/images/", "/v1/videos", "/v1/videos/", "/v1/files", "/v1/files/", "/v1/uploads", "/v1/uploads/",
	"/v1/batches", "/v1/batches/", "/v1/fine_tuning/", "/v1/assistants", "/v1/assistants/", "/v1/threads", "/v1/threads/",
	"/v1/vector_stores", "/v1/vector_stores/", "/v1/evals", "/v1/evals/", "/v1/realtime", "/v1/realtime/", "/v1/containers",
	"/v1/containers/", "/v1/organization/", "/v1/edits", "/v1/chat/completions/",
}

// route authenticates before it looks at the method or the body, so that a
// stranger learns nothing but that a key is needed.
func (s *server) route(r route) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		info := httpx.InfoFrom(req.Context())
		info.Route = r.name
		w.Header().Set("Openai-Version", "2020-10-01")
		err := s.Edge.Authenticate(req, s.Keys)
		if err == nil && r.method != "" && req.Method != r.method {
			w.Header().Set("Allow", r.method)
			info.Code = "method_not_allowed"
			e := apperr.New(apperr.Invalid, "method_not_allowed", "This address answers %s only.", r.method)
			writeJSON(w, http.StatusMethodNotAllowed, errorBody{object(e)})
			return
		}
		if err == nil {
			err = r.handler(s, w, req)
		}
		if err != nil {
			WriteError(w, req, apperr.From(err))
		}
	})
}

// processing sets the header that says how long the answer took to make.
func processing(w http.ResponseWriter, info *httpx.Info, now time.Time) {
	w.Header().Set("Openai-Processing-Ms", strconv.FormatInt(now.Sub(info.Received).Milliseconds(), 10))
}

// ReceiptHeader names the receipt of a response.
const ReceiptHeader = "X-Bulkhead-Receipt"

func itoa(i int) string { return strconv.Itoa(i) }

// responseID is the id that clients see in bodies: that of the request, with
// the prefix they expect.
func responseID(prefix string, r id.Request) string {
	_, ulid, _ := strings.Cut(r.String(), "_")
	return prefix + ulid
}
