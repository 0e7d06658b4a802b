package pgdb

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Error is a failed operation on the database. Its text never has the message,
// detail or context lines of the server, which may quote values.
type Error struct {
	Op    string // what was being done, for people
	State string // SQLSTATE, "" when the server did not answer with one
	cause error
}

// Wrap makes an *Error out of what pgx returned. It returns nil for nil and
// leaves an *Error as it is. Values that are not the database's own, such as
// pgx.ErrNoRows, stay reachable with errors.Is.
func Wrap(op string, err error) error {
	if err == nil {
		return nil
	}
	if _, ok := errors.AsType[*Error](err); ok {
		return err
	}
	return &Error{Op: op, State: State(err), cause: err}
}

func (e *Error) Error() string {
	switch {
	case e.State != "":
		return fmt.Sprintf("%s: SQLSTATE %s", e.Op, e.State)
	case errors.Is(e.cause, pgx.ErrNoRows):
		return e.Op + ": no row"
	case errors.Is(e.cause, context.DeadlineExceeded):
		return e.Op + ": deadline exceeded"
	case errors.Is(e.cause, context.Canceled):
		return e.Op + ": canceled"
	case IsUnavailable(e.cause):
		return e.Op + ": the database cannot be reached"
	}
	return e.Op + ": failed in the driver"
}

// Unwrap returns what pgx returned. Do not print it.
func (e *Error) Unwrap() error { return e.cause }

// State returns the SQLSTATE inside err, or "".
func State(err error) string {
	if pg, ok := errors.AsType[*pgconn.PgError](err); ok {
		return pg.Code
	}
	return ""
}

// The states that are told apart by name.
const (
	StateUniqueViolation = "23505"
	StateForeignKey      = "23503"
)

// IsUnavailable reports that the database could not be asked, or not now: the
// answer to the question is unknown, and asking again later may help. It is
// false for everything that the database did answer.
func IsUnavailable(err error) bool {
	if err == nil {
		return false
	}
	if state := State(err); state != "" {
		switch state[:2] {
		case "08", // connection exceptions
			"53", // insufficient resources: too many connections, disk full, memory
			"58": // system errors of the server
			return true
		}
		switch state {
		case "57P01", "57P02", "57P03", "57P05", // shutdown, crash, starting up, idle session ended
			"57014",          // statement_timeout or a cancel of ours
			"55P03",          // lock_timeout
			"40001", "40P01", // serialization failure, deadlock
			"25006": // read only: a standby after a fail-over
			return true
		}
		return false
	}
	if errors.Is(err, pgx.ErrNoRows) {
		return false
	}
	var connect *pgconn.ConnectError
	var network net.Error
	switch {
	case errors.As(err, &connect), errors.As(err, &network),
		errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled),
		errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, net.ErrClosed),
		pgconn.SafeToRetry(err), pgconn.Timeout(err):
		return true
	}
	// The pool and the connection have no exported value for being closed, and
	// the text of an Error leaves theirs out.
	if e, ok := errors.AsType[*Error](err); ok {
		err = e.cause
	}
	return strings.Contains(err.Error(), "closed pool") || strings.Contains(err.Error(), "conn closed")
}

// IsData reports that the values of a statement are at fault: trying it again
// as it is cannot help, and a batch without the row at fault may succeed.
func IsData(err error) bool {
	if err == nil || errors.Is(err, pgx.ErrNoRows) {
		return false
	}
	if state := State(err); state != "" {
		switch state[:2] {
		case "21", "22", "23", "54": // cardinality, data, integrity, program limits
			return true
		}
		return false
	}
	return !IsUnavailable(err) // the driver could not encode a value
}
