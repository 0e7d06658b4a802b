package rpc

import (
	"context"
	"net/http"
	"strings"

	"connectrpc.com/connect"
	"connectrpc.com/grpchealth"
	"connectrpc.com/grpcreflect"

	"bulkhead.dev/audit"
	"bulkhead.dev/engine/pool"
	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/infra/secret"
	"bulkhead.dev/services/gateway"
	"bulkhead.dev/services/gen/bulkhead/audit/v1/auditv1connect"
	"bulkhead.dev/services/gen/bulkhead/catalog/v1/catalogv1connect"
	"bulkhead.dev/services/gen/bulkhead/inference/v1/inferencev1connect"
	"bulkhead.dev/services/gen/bulkhead/limits/v1/limitsv1connect"
	"bulkhead.dev/services/gen/bulkhead/operations/v1/operationsv1connect"
	"bulkhead.dev/services/gen/bulkhead/tenancy/v1/tenancyv1connect"
	"bulkhead.dev/services/httpx"
	"bulkhead.dev/tenancy"
)

// Stream is an answer that is being computed; see gateway.Stream.
type Stream interface {
	Model() string
	PromptTokens() int
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

// Tenants keeps tenants, projects and keys; *tenancy.Store.
type Tenants interface {
	CreateTenant(ctx context.Context, p tenancy.Principal, name string) (tenancy.Tenant, tenancy.Project, error)
	ListTenants(ctx context.Context, p tenancy.Principal, page tenancy.Page) ([]tenancy.Tenant, string, error)
	CreateProject(ctx context.Context, p tenancy.Principal, name string) (tenancy.Project, error)
	ListProjects(ctx context.Context, p tenancy.Principal, page tenancy.Page) ([]tenancy.Project, string, error)
	CreateKey(ctx context.Context, p tenancy.Principal, n tenancy.NewKey) (tenancy.Key, secret.String, error)
	ListKeys(ctx context.Context, p tenancy.Principal, page tenancy.Page) ([]tenancy.Key, string, error)
	RevokeKey(ctx context.Context, p tenancy.Principal, key id.Key) (tenancy.Key, error)
}

// Receipts reads evidence; *audit.Reader.
type Receipts interface {
	Get(ctx context.Context, tenant id.Tenant, request id.Request) (audit.Stored, error)
}

// Workers knows the live workers; *pool.Registry.
type Workers interface {
	PageMaps(ctx context.Context) []pool.PageMap
}

// Options wire the services. All fields are required.
type Options struct {
	Backend   Backend
	Tenants   Tenants
	Limits    Limits
	Receipts  Receipts
	Workers   Workers
	Keys      httpx.Authenticator
	Edge      *httpx.Edge
	ReadLimit int         // bytes of the largest message
	Ready     func() bool // for the health service
}

// ErrorCodeHeader carries the platform's code of an error.
const ErrorCodeHeader = "Bulkhead-Error-Code"

// New returns the handler of all procedures.
func New(o Options) http.Handler {
	opts := []connect.HandlerOption{
		connect.WithReadMaxBytes(o.ReadLimit), connect.WithInterceptors(errorInterceptor{}),
		connect.WithRecover(func(context.Context, connect.Spec, http.Header, any) error {
			// The value of a panic may hold content.
			return connect.NewError(connect.CodeInternal, apperr.New(apperr.Internal, "internal_error", "The platform failed to handle the request."))
		}),
	}
	mux := http.NewServeMux()
	mux.Handle(inferencev1connect.NewInferenceServiceHandler(&inference{o}, opts...))
	mux.Handle(tenancyv1connect.NewTenancyServiceHandler(&tenants{o}, opts...))
	mux.Handle(catalogv1connect.NewCatalogServiceHandler(&catalog{o}, opts...))
	mux.Handle(limitsv1connect.NewLimitServiceHandler(&limits{o}, opts...))
	mux.Handle(auditv1connect.NewAuditServiceHandler(&receipts{o}, opts...))
	mux.Handle(operationsv1connect.NewOperationsServiceHandler(&operations{o}, opts...))
	names := []string{operationsv1connect.OperationsServiceName, inferencev1connect.InferenceServiceName, tenancyv1connect.TenancyServiceName, limitsv1connect.LimitServiceName, catalogv1connect.CatalogServiceName, auditv1connect.AuditServiceName}
	mux.Handle(grpchealth.NewHandler(health{ready: o.Ready, names: names}, opts...))
	reflector := grpcreflect.NewStaticReflector(append(names, grpchealth.HealthV1ServiceName)...)
	mux.Handle(grpcreflect.NewHandlerV1(reflector, opts...))
	mux.Handle(grpcreflect.NewHandlerV1Alpha(reflector, opts...))

	errors := connect.NewErrorWriter(opts...)
	fail := func(w http.ResponseWriter, r *http.Request, e *apperr.Error) {
		httpx.InfoFrom(r.Context()).Code = e.Code
		if !errors.IsSupported(r) { // not one of the three protocols
			http.Error(w, e.Message, http.StatusUnsupportedMediaType)
			return
		}
		_ = errors.Write(w, r, wireError(e)) // an error means that the client is gone
	}
	return o.Edge.Wrap(guard(o, mux, fail), fail)
}

// guard checks the key, and what it may do, before a handler sees the request.
func guard(o Options, next http.Handler, fail func(http.ResponseWriter, *http.Request, *apperr.Error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		info := httpx.InfoFrom(r.Context())
		if strings.HasPrefix(r.URL.Path, "/"+grpchealth.HealthV1ServiceName+"/") {
			info.Route = "health"
			next.ServeHTTP(w, r) // orchestrators have no key, and it tells nothing
			return
		}
		if err := o.Edge.Authenticate(r, o.Keys); err != nil {
			fail(w, r, apperr.From(err))
			return
		}
		want, known := scopes[r.URL.Path]
		if strings.HasPrefix(r.URL.Path, "/grpc.reflection.") {
			info.Route = "reflection"
			next.ServeHTTP(w, r)
			return
		}
		if !known {
			fail(w, r, apperr.New(apperr.NotFound, "unknown_procedure", "There is no such procedure."))
			return
		}
		info.Route = r.URL.Path[1:]
		if err := info.Principal.Require(want); err != nil {
			fail(w, r, apperr.From(err))
			return
		}
		next.ServeHTTP(w, r)
	})
}

// health answers for the platform as a whole, and for each service by name.
type health struct {
	ready func() bool
	names []string
}

// Check implements grpchealth.Checker.
func (h health) Check(_ context.Context, req *grpchealth.CheckRequest) (*grpchealth.CheckResponse, error) {
	known := req.Service == ""
	for _, n := range h.names {
		known = known || n == req.Service
	}
	if !known {
		return nil, connect.NewError(connect.CodeNotFound, apperr.New(apperr.NotFound, "unknown_service", "There is no such service."))
	}
	if !h.ready() {
		return &grpchealth.CheckResponse{Status: grpchealth.StatusNotServing}, nil
	}
	return &grpchealth.CheckResponse{Status: grpchealth.StatusServing}, nil
}
