package handoff

import (
	"context"

	"bulkhead.dev/engine/fabric"
	"bulkhead.dev/engine/kv"
	"bulkhead.dev/infra/id"
)

// TokenDigest identifies exact token ids.
func TokenDigest(ids []int32) [32]byte { panic("unfinished") }

// Prefill leg.

// Meta is what an offer binds besides the pages.
type Meta struct {
	Request                   id.Request
	Transfer                  id.Transfer
	Nonce                     id.Nonce
	PrefillEpoch, DecodeEpoch id.Epoch
	Model                     [32]byte
	TokenDigest               [32]byte
}

// Offer holds sealed pages open for one reader.
type Offer struct{}

// NewOffer digests the pages, registers them with the page server and takes
// ownership of sealed, also when it fails.
func NewOffer(srv *fabric.Server, sealed *kv.Sealed, m Meta) (*Offer, error) { panic("unfinished") }

func (o *Offer) Manifest() []byte        { panic("unfinished") }
func (o *Offer) Root() [32]byte          { panic("unfinished") }
func (o *Offer) Tokens() int             { panic("unfinished") }
func (o *Offer) Extents() []kv.Extent    { panic("unfinished") }
func (o *Offer) Bytes() uint64           { panic("unfinished") } // page bytes on offer
func (o *Offer) Ack(root [32]byte) error { panic("unfinished") } // decode committed root: releases the pages; ErrRoot when root is another one (released too)
func (o *Offer) Abort()                  { panic("unfinished") } // idempotent, safe after Ack

// Decode leg.

type ReceiverConfig struct {
	Epoch    id.Epoch
	Geometry kv.Geometry
	Model    [32]byte
}

// Receiver knows the transfers that this process expects and those it has seen.
type Receiver struct{}

func NewReceiver(ReceiverConfig) *Receiver { panic("unfinished") }

// Expect is what the gateway said will come.
type Expect struct {
	Request      id.Request
	Transfer     id.Transfer
	Nonce        id.Nonce
	Owner        id.Owner
	Lease        id.Lease // of the decode leg
	PrefillEpoch id.Epoch
	Model        [32]byte
	TokenDigest  [32]byte
	Tokens       int
}

// Expect registers a transfer. It takes the credits, also when it fails, and
// reads pages through from. Close the Inbound on every path.
func (r *Receiver) Expect(e Expect, credits *kv.Credits, from fabric.Reader) (*Inbound, error) {
	panic("unfinished")
}

// Pull is the Offer call: it verifies, reads and commits, and returns the root for the ack. Every error is a *Refusal.
func (r *Receiver) Pull(ctx context.Context, transfer id.Transfer, manifest []byte) ([32]byte, error) {
	panic("unfinished")
}

// Inbound is one expected transfer.
type Inbound struct{}

// Wait blocks until the transfer is committed or refused. Every error is a *Refusal.
func (in *Inbound) Wait(ctx context.Context) (*Committed, error) { panic("unfinished") }
func (in *Inbound) Close()                                       { panic("unfinished") } // idempotent; cancels a pull in flight; the Sequence once taken is not touched

// Committed is the proof that a sequence may be decoded.
type Committed struct{}

func (c *Committed) Sequence() (*kv.Sequence, error) { panic("unfinished") } // once; the caller Releases it
func (c *Committed) Tokens() int                     { panic("unfinished") } // measured in the verified pages
func (c *Committed) Root() [32]byte                  { panic("unfinished") }
func (c *Committed) Extents() []kv.Extent            { panic("unfinished") } // of this leg
func (c *Committed) Bytes() uint64                   { panic("unfinished") }

// Reason is one of a closed list.
type Reason string

// Refusal is every way in which a hand-off does not happen.
type Refusal struct {
	Reason Reason
	Err    error
}

func (r *Refusal) Error() string { panic("unfinished") }
func (r *Refusal) Unwrap() error { panic("unfinished") }

const (
	BadManifest   Reason = "bad_manifest"
	WrongTransfer Reason = "wrong_transfer"
	WrongRequest  Reason = "wrong_request"
	WrongNonce    Reason = "wrong_nonce"
	WrongOwner    Reason = "wrong_owner"
	WrongEpoch    Reason = "wrong_epoch"
	WrongModel    Reason = "wrong_model"
	WrongGeometry Reason = "wrong_geometry"
	WrongTokens   Reason = "wrong_tokens"
	Coverage      Reason = "coverage"
	Digest        Reason = "digest"
	Generation    Reason = "generation"
	Replay        Reason = "replay"
	Exhausted     Reason = "exhausted"
	Fabric        Reason = "fabric"
	Canceled      Reason = "canceled"
)
