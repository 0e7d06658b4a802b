package openai

import (
	"errors"
	"math"
	"net/http"
	"strconv"
	"time"

	"github.com/go-json-experiment/json"

	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/services/httpx"
	"bulkhead.dev/tenancy/quota"
)

// errorBody is the body of every error. SDKs need all four keys.
type errorBody struct {
	Error errorObject `json:"error"`
}

type errorObject struct {
	Message string  `json:"message"`
	Type    string  `json:"type"`
	Param   *string `json:"param"`
	Code    *string `json:"code"`
}

// maxRetryAfter is the longest wait that both official SDKs obey; for a longer
// one they are told not to try again by themselves.
const maxRetryAfter = time.Minute

// status returns the HTTP status of an error; SDKs choose their exception by it.
func status(k apperr.Kind) int {
	switch k {
	case apperr.Invalid:
		return http.StatusBadRequest
	case apperr.Unauthenticated:
		return http.StatusUnauthorized
	case apperr.Forbidden:
		return http.StatusForbidden
	case apperr.NotFound:
		return http.StatusNotFound
	case apperr.Conflict:
		return http.StatusConflict
	case apperr.TooLarge:
		return http.StatusRequestEntityTooLarge
	case apperr.TooMany:
		return http.StatusTooManyRequests
	case apperr.Canceled:
		return statusClientGone
	case apperr.Unavailable:
		return http.StatusServiceUnavailable
	case apperr.Deadline:
		return http.StatusGatewayTimeout
	}
	return http.StatusInternalServerError
}

// statusClientGone is for the log: nobody is there to read it.
const statusClientGone = 499

// object makes the error object, which also goes into streams.
func object(e *apperr.Error) errorObject {
	o := errorObject{Message: e.Message, Type: "invalid_request_error", Code: &e.Code}
	switch s := status(e.Kind); {
	case e.Code == "server_is_overloaded":
		o.Type = "service_unavailable_error"
	case s >= http.StatusInternalServerError:
		o.Type = "server_error"
	case s == http.StatusTooManyRequests:
		o.Type = limitType(e)
	}
	if e.Param != "" {
		o.Param = &e.Param
	}
	return o
}

// limitType tells SDKs what is limited: requests and tokens come back by
// themselves, a quota does not.
func limitType(e *apperr.Error) string {
	refusal, ok := errors.AsType[*quota.Refusal](e)
	switch {
	case !ok, e.Code == "rate_limit_exceeded" && refusal.Limit.Meter != quota.Tokens:
		return "requests"
	case e.Code == "rate_limit_exceeded":
		return "tokens"
	}
	return "insufficient_quota"
}

// WriteError writes an error with the headers that tell SDKs whether and when
// to try again.
func WriteError(w http.ResponseWriter, r *http.Request, e *apperr.Error) {
	httpx.InfoFrom(r.Context()).Code = e.Code
	h := w.Header()
	if refusal, ok := errors.AsType[*quota.Refusal](e); ok {
		rateLimits(h, refusal.Status)
	}
	noRetry := e.NoRetry
	if e.RetryAfter > 0 {
		h.Set("Retry-After", strconv.Itoa(int(math.Ceil(e.RetryAfter.Seconds()))))
		if e.RetryAfter <= maxRetryAfter {
			h.Set("Retry-After-Ms", strconv.FormatInt(e.RetryAfter.Milliseconds(), 10))
		} else {
			noRetry = true
		}
	}
	if noRetry {
		h.Set("X-Should-Retry", "false")
	}
	writeJSON(w, status(e.Kind), errorBody{object(e)})
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	b, err := json.Marshal(v, json.Deterministic(true))
	if err != nil { // only types of this package, which always encode
		panic(err)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(b) // an error means that the client is gone
}
