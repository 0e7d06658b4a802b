package rpc

import (
	"context"
	"errors"
	"math"
	"strconv"

	"connectrpc.com/connect"

	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/services/httpx"
)

// codes maps what went wrong to the codes of Connect and gRPC.
var codes = map[apperr.Kind]connect.Code{
	apperr.Internal:        connect.CodeInternal,
	apperr.Invalid:         connect.CodeInvalidArgument,
	apperr.Unauthenticated: connect.CodeUnauthenticated,
	apperr.Forbidden:       connect.CodePermissionDenied,
	apperr.NotFound:        connect.CodeNotFound,
	apperr.Conflict:        connect.CodeAlreadyExists,
	apperr.TooLarge:        connect.CodeResourceExhausted,
	apperr.TooMany:         connect.CodeResourceExhausted,
	apperr.Canceled:        connect.CodeCanceled,
	apperr.Unavailable:     connect.CodeUnavailable,
	apperr.Deadline:        connect.CodeDeadlineExceeded,
}

// wireError makes the error that a caller sees: the public message, and codes.
func wireError(e *apperr.Error) *connect.Error {
	out := connect.NewError(codes[e.Kind], errors.New(e.Message))
	out.Meta().Set(ErrorCodeHeader, e.Code)
	if e.RetryAfter > 0 {
		out.Meta().Set("Retry-After", strconv.Itoa(int(math.Ceil(e.RetryAfter.Seconds()))))
	}
	return out
}

// errorInterceptor is where errors of handlers become public. What Connect
// refuses before it (a unary message that does not decode, or is too large)
// goes back to its sender as Connect words it, and nowhere else.
type errorInterceptor struct{}

// WrapUnary implements connect.Interceptor.
func (errorInterceptor) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		res, err := next(ctx, req)
		return res, public(ctx, err)
	}
}

// WrapStreamingClient implements connect.Interceptor; there are no clients here.
func (errorInterceptor) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

// WrapStreamingHandler implements connect.Interceptor.
func (errorInterceptor) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		return public(ctx, next(ctx, conn))
	}
}

func public(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	e, ok := errors.AsType[*apperr.Error](err)
	if !ok {
		if ce, isConnect := errors.AsType[*connect.Error](err); isConnect {
			e = apperr.Wrap(err, apperr.Invalid, "invalid_message", "The message cannot be read.")
			if ce.Code() == connect.CodeNotFound || ce.Code() == connect.CodeUnimplemented {
				return ce // of health and reflection
			}
		} else {
			e = apperr.From(err)
		}
	}
	httpx.InfoFrom(ctx).Code = e.Code
	return wireError(e)
}
