package fabric

import (
	"context"
	"errors"

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

// Reader reads the pages of open offers.
type Reader interface {
	// ReadPages reads refs in order; page i goes to land(i), which must have
	// exactly the size of a page. It returns nil only if every page arrived
	// whole. Once it has returned, whatever the outcome, nothing writes into
	// the memory that land gave.
	ReadPages(ctx context.Context, transfer id.Transfer, secret Secret, refs []PageRef, land func(i int) []byte) error
}
