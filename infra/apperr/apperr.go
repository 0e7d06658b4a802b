// Package apperr is the one error type that crosses from the platform to its
// callers: a kind, a stable code, a message that is safe to show, and a cause
// that is not. Only the edge turns it into an HTTP status, an OpenAI error body
// or a Connect code; a tenant never sees the cause.
package apperr

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Kind says what went wrong in the terms of a caller; the edge maps it to a
// status. The zero Kind is Internal, so an error that nobody classified is
// never taken for the caller's fault.
type Kind uint8

// The kinds, with the HTTP status that the edge gives them.
const (
	Internal        Kind = iota // 500: a bug or a broken invariant
	Invalid                     // 400: the request can never succeed
	Unauthenticated             // 401: no key, or a key that is not ours
	Forbidden                   // 403: known, but not allowed
	NotFound                    // 404
	Conflict                    // 409
	TooLarge                    // 413
	TooMany                     // 429: a limit of the caller
	Canceled                    // 499: the caller went away
	Unavailable                 // 503: the platform cannot do it now
	Deadline                    // 504: the platform took too long
)

var kindNames = [...]string{"internal", "invalid", "unauthenticated", "forbidden", "not_found", "conflict",
	"too_large", "too_many", "canceled", "unavailable", "deadline"}

func (k Kind) String() string {
	if int(k) < len(kindNames) {
		return kindNames[k]
	}
	return fmt.Sprintf("kind(%d)", uint8(k))
}

// Error is an outcome that a caller may see. Code and Message are public; the
// cause stays inside the platform and is reached with errors.Unwrap.
type Error struct {
	Kind    Kind
	Code    string // stable, snake case: "context_length_exceeded"
	Message string // one sentence for a person, with the remedy where there is one
	Param   string // the field at fault, "" when none is

	// RetryAfter tells the caller how long to wait; 0 says nothing about it.
	RetryAfter time.Duration
	// NoRetry tells the caller that trying again cannot help.
	NoRetry bool

	cause error
}

// New makes an error with a public message.
func New(kind Kind, code, format string, args ...any) *Error {
	return &Error{Kind: kind, Code: code, Message: fmt.Sprintf(format, args...)}
}

// Wrap makes an error with a public message and a private cause.
func Wrap(cause error, kind Kind, code, format string, args ...any) *Error {
	e := New(kind, code, format, args...)
	e.cause = cause
	return e
}

// Error returns the public part only: the text of a cause may hold a client's
// content, and errors end up in logs.
func (e *Error) Error() string { return e.Code + ": " + e.Message }

// Unwrap returns the private cause.
func (e *Error) Unwrap() error { return e.cause }

// WithParam returns the error with the name of the field at fault.
func (e *Error) WithParam(p string) *Error { e.Param = p; return e }

// WithRetryAfter returns the error with a hint when to try again.
func (e *Error) WithRetryAfter(d time.Duration) *Error { e.RetryAfter = d; return e }

// WithNoRetry returns the error with the hint that trying again cannot help.
func (e *Error) WithNoRetry() *Error { e.NoRetry = true; return e }

// From returns the *Error inside err, classifies a context error, or wraps
// anything else as Internal. It returns nil for nil.
func From(err error) *Error {
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*Error](err); ok {
		return e
	}
	switch {
	case errors.Is(err, context.Canceled):
		return Wrap(err, Canceled, "request_canceled", "The request was canceled.")
	case errors.Is(err, context.DeadlineExceeded):
		return Wrap(err, Deadline, "deadline_exceeded", "The request took too long.")
	}
	return Wrap(err, Internal, "internal_error", "The platform failed to handle the request.")
}
