package fabric

import (
	"context"
	"errors"
	"io"

	"bulkhead.dev/engine/kv"
	"bulkhead.dev/infra/id"
)

var (
	// ErrRefused means that the server does not serve this: an unknown
	// transfer, a wrong secret, or a page outside of the offer.
	ErrRefused = errors.New("fabric read refused")
	// ErrStale means that a page is no longer what the reference says.
	ErrStale = errors.New("fabric page is stale")
	// ErrProtocol means that the other side does not keep to the protocol.
	ErrProtocol = errors.New("fabric protocol violated")
	// ErrBroken means that the transport failed or stood still.
	ErrBroken = errors.New("fabric connection broken")
	// ErrDuplicate means that a transfer is already open.
	ErrDuplicate = errors.New("fabric transfer is already open")
	// ErrClosed means that the client or server was closed.
	ErrClosed = errors.New("fabric is closed")
	// ErrNotShared means that the server does not let its memory be mapped, or
	// not any more.
	ErrNotShared = errors.New("fabric memory is not shared")
	// ErrAddress means that an address is not "unix:/path" or "tcp:host:port".
	ErrAddress = errors.New("bad fabric address")
)

// Secret is what a reader shows to read the pages of an offer.
type Secret [32]byte

// String hides the secret.
func (Secret) String() string { return "REDACTED" }

// GoString hides the secret.
func (Secret) GoString() string { return "REDACTED" }

// PageRef names a page on the side that serves it.
type PageRef = kv.PageRef

// Sink is where pages go; *kv.Intake is one. Page i is the i-th that was asked
// for. Each page is stored whole and once, by either method.
type Sink interface {
	// PageBytes returns the size of every page.
	PageBytes() int
	// Copy stores a page that lies in memory, maybe that of another process. It
	// does not keep it.
	Copy(i int, page []byte) error
	// Read stores a page out of a stream, of which it takes exactly one page.
	Read(i int, stream io.Reader) error
}

// Reader reads the pages of open offers.
type Reader interface {
	// ReadPages reads refs in order and stores page i as the i-th of the sink.
	// It returns nil only if every page arrived whole. Once it has returned,
	// whatever the outcome, it does not use the sink any more.
	ReadPages(ctx context.Context, transfer id.Transfer, secret Secret, refs []PageRef, into Sink) error
	// Transport tells how the pages come. It is known, and never changes, once
	// a read has succeeded.
	Transport() Transport
}

// Transport is a way that pages come.
type Transport string

// The transports.
const (
	// Local is within one process.
	Local Transport = "local"
	// SharedMemory is out of memory that another process shares.
	SharedMemory Transport = "shm"
	// Unix is a stream over a unix socket, with or without TLS.
	Unix Transport = "unix"
	// TCP is a stream over TCP as it is.
	TCP Transport = "tcp"
	// TCPWithTLS is a stream over TCP with TLS.
	TCPWithTLS Transport = "tcp+tls"
)
