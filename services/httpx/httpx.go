// Package httpx is the edge that all surfaces share: it mints the request id,
// authenticates before anything of the body is read, keeps one log line per
// request, and builds servers whose limits are set.
package httpx

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/netip"
	"runtime/debug"
	"strings"
	"time"

	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/tenancy"
)

// Info is what the edge knows of a request. The edge makes one per request;
// handlers add what they learn, for the log line and the metrics. It belongs to
// the goroutine of the request.
type Info struct {
	ID        id.Request
	Received  time.Time
	Principal tenancy.Principal

	Route        string // a fixed name out of the route table, never a client's path
	Model        string // set once the catalogue knows it
	PromptTokens int
	OutputTokens int
	Streamed     bool
	Code         string // error code, "" for success
}

type contextKey struct{}

// InfoFrom returns the Info of a request that came through Edge.Wrap. It panics
// outside of one: a handler without the edge in front of it has no principal.
func InfoFrom(ctx context.Context) *Info {
	return ctx.Value(contextKey{}).(*Info)
}

// WithInfo returns a context that holds i; for tests of handlers.
func WithInfo(ctx context.Context, i *Info) context.Context {
	return context.WithValue(ctx, contextKey{}, i)
}

// Observer is told of every request; *telemetry.Metrics.
type Observer interface {
	Request(route, code string, d time.Duration)
	Unauthenticated()
}

// Edge stands in front of every surface.
type Edge struct {
	Log      *slog.Logger
	Now      func() time.Time
	Observer Observer
	// TrustedProxies are the networks whose X-Forwarded-For is believed.
	TrustedProxies []netip.Prefix
	// BodyTimeout bounds the reading of a body; 0 is DefaultBodyTimeout.
	BodyTimeout time.Duration
}

// RequestIDHeader carries the id of a request in its response. A client's own
// header of that name is never read.
const RequestIDHeader = "X-Request-Id"

// Wrap gives each request an id and an Info, catches panics, and writes one log
// line and the metrics when the request ends. fail writes an error in the form
// of the surface.
func (e *Edge) Wrap(next http.Handler, fail func(http.ResponseWriter, *http.Request, *apperr.Error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		now := e.Now()
		info := &Info{ID: id.NewRequest(now), Received: now, Route: "other"}
		r = r.WithContext(WithInfo(r.Context(), info))
		h := w.Header()
		h.Set(RequestIDHeader, info.ID.String())
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Cache-Control", "no-store")
		rec := &recorder{ResponseWriter: w}
		within := e.BodyTimeout
		if within == 0 {
			within = DefaultBodyTimeout
		}
		r.Body = timed(w, r, within)
		defer func() {
			if p := recover(); p != nil {
				if err, ok := p.(error); ok && errors.Is(err, http.ErrAbortHandler) {
					e.done(r, info, rec)
					panic(p) // the server closes the connection; it logs nothing
				}
				// The value of a panic may hold content; its stack does not.
				e.Log.ErrorContext(r.Context(), "handler panicked", "request_id", info.ID.String(), "stack", string(debug.Stack()))
				if rec.status != 0 {
					e.done(r, info, rec)
					panic(http.ErrAbortHandler) // a broken body must not look whole
				}
				fail(rec, r, apperr.New(apperr.Internal, "internal_error", "The platform failed to handle the request."))
			}
			e.done(r, info, rec)
		}()
		next.ServeHTTP(rec, r)
	})
}

func (e *Edge) done(r *http.Request, info *Info, rec *recorder) {
	took := e.Now().Sub(info.Received)
	status := rec.status
	if status == 0 {
		status = statusClientGone // nothing was written: nobody was there
	}
	e.Observer.Request(info.Route, statusText(status), took)
	attrs := []slog.Attr{
		slog.String("request_id", info.ID.String()), slog.String("route", info.Route), slog.Int("status", status),
		slog.Duration("duration", took.Round(time.Microsecond)), slog.String("client", ClientIP(r, e.TrustedProxies).String()),
	}
	if info.Principal.Tenant != (id.Tenant{}) {
		attrs = append(attrs, slog.String("tenant", info.Principal.Tenant.String()), slog.String("key", info.Principal.Key.String()))
	}
	if info.Model != "" {
		attrs = append(attrs, slog.String("model", info.Model), slog.Int("prompt_tokens", info.PromptTokens),
			slog.Int("output_tokens", info.OutputTokens), slog.Bool("streamed", info.Streamed))
	}
	if info.Code != "" {
		attrs = append(attrs, slog.String("code", info.Code))
	}
	e.Log.LogAttrs(r.Context(), slog.LevelInfo, "request", attrs...)
}

// statusClientGone is what the log says when the client left before there was
// a status; the number is the custom of proxies.
const statusClientGone = 499

func statusText(status int) string {
	const digits = "0123456789"
	if status < 100 || status > 999 {
		return "other"
	}
	return string([]byte{digits[status/100], digits[status/10%10], digits[status%10]})
}

// Authenticator checks keys; *tenancy.Authenticator.
type Authenticator interface {
	Authenticate(ctx context.Context, bearer string) (tenancy.Principal, error)
}

// Authenticate checks the key of a request and puts the principal into its
// Info. It reads nothing of the body. The error is an *apperr.Error.
func (e *Edge) Authenticate(r *http.Request, keys Authenticator) error {
	scheme, key, ok := strings.Cut(r.Header.Get("Authorization"), " ")
	key = strings.TrimSpace(key)
	if !ok || !strings.EqualFold(scheme, "Bearer") || key == "" {
		e.Observer.Unauthenticated()
		return apperr.New(apperr.Unauthenticated, "invalid_api_key", "No API key was given. Send it in the header Authorization: Bearer KEY.").WithNoRetry()
	}
	p, err := keys.Authenticate(r.Context(), key)
	if err != nil {
		if apperr.From(err).Kind == apperr.Unauthenticated {
			e.Observer.Unauthenticated()
		}
		return err
	}
	InfoFrom(r.Context()).Principal = p
	return nil
}

// recorder remembers the status for the log.
type recorder struct {
	http.ResponseWriter
	status int
}

// WriteHeader implements http.ResponseWriter.
func (r *recorder) WriteHeader(status int) {
	if r.status == 0 {
		r.status = status
	}
	r.ResponseWriter.WriteHeader(status)
}

// Write implements http.ResponseWriter.
func (r *recorder) Write(b []byte) (int, error) {
	if r.status == 0 {
		r.status = http.StatusOK
	}
	return r.ResponseWriter.Write(b)
}

// Flush implements http.Flusher, which Connect looks for.
func (r *recorder) Flush() {
	if r.status == 0 {
		r.status = http.StatusOK
	}
	if f, ok := r.ResponseWriter.(http.Flusher); ok {
		f.Flush()
	}
}

// Unwrap lets http.ResponseController reach the connection.
func (r *recorder) Unwrap() http.ResponseWriter { return r.ResponseWriter }
