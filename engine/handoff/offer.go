package handoff

import (
	"crypto/rand"
	"crypto/subtle"
	"errors"
	"fmt"
	"sync"

	"bulkhead.dev/engine/fabric"
	"bulkhead.dev/engine/kv"
	"bulkhead.dev/infra/id"
)

// ErrRoot means that the other leg acknowledged another manifest than the one
// that was offered, or one that was no longer on offer.
var ErrRoot = errors.New("acknowledged root is not the offered one")

// Meta is what an offer binds besides the pages. Owner, lease, positions and
// extents come from the pages themselves.
type Meta struct {
	Request                   id.Request
	Transfer                  id.Transfer
	Nonce                     id.Nonce
	PrefillEpoch, DecodeEpoch id.Epoch
	Model                     [32]byte
	// TokenDigest is made of the ids that the forward passes were given.
	TokenDigest [32]byte
}

// Offer is a set of sealed pages that one decode worker may read. Ack or Abort
// it; deferring Abort and then calling Ack is right.
type Offer struct {
	server   *fabric.Server
	transfer id.Transfer
	sealed   *kv.Sealed
	encoding []byte
	root     [32]byte

	mu   sync.Mutex
	open bool // under mu
}

// NewOffer digests the pages and opens them at the page server. It takes over
// the pages, also when it fails.
func NewOffer(server *fabric.Server, sealed *kv.Sealed, meta Meta) (*Offer, error) {
	o, err := newOffer(server, sealed, meta)
	if err != nil {
		sealed.Release()
		return nil, fmt.Errorf("offer pages: %w", err)
	}
	return o, nil
}

func newOffer(server *fabric.Server, sealed *kv.Sealed, meta Meta) (*Offer, error) {
	m := Manifest{
		Request: meta.Request, Transfer: meta.Transfer, Nonce: meta.Nonce,
		Owner: sealed.Owner(), Lease: sealed.Lease(),
		PrefillEpoch: meta.PrefillEpoch, DecodeEpoch: meta.DecodeEpoch,
		Model: meta.Model, Geometry: sealed.Geometry().Fingerprint(), TokenDigest: meta.TokenDigest,
		Tokens: uint32(sealed.Tokens()), Alg: kv.GMAC, Extents: sealed.Extents(),
	}
	rand.Read(m.Seed[:])
	rand.Read(m.Secret[:])
	var err error
	if m.Sums, err = sealed.Sums(m.key()); err != nil {
		return nil, err
	}
	o := &Offer{server: server, transfer: meta.Transfer, sealed: sealed, encoding: m.Encode(), open: true}
	o.root = Root(o.encoding)
	// What the other leg would refuse is not sent.
	if _, err := DecodeManifest(o.encoding); err != nil {
		return nil, err
	}
	if err := server.Open(meta.Transfer, m.Secret, sealed); err != nil {
		return nil, err
	}
	return o, nil
}

// Manifest returns the encoding to send to the decode worker. It holds secrets:
// it goes nowhere else and into no log.
func (o *Offer) Manifest() []byte { return o.encoding }

// Root identifies the manifest.
func (o *Offer) Root() [32]byte { return o.root }

// Tokens returns the number of positions that the forward passes wrote.
func (o *Offer) Tokens() int { return o.sealed.Tokens() }

// Extents returns the pages on offer. It still answers after release.
func (o *Offer) Extents() []kv.Extent { return o.sealed.Extents() }

// Bytes returns the size of the pages on offer.
func (o *Offer) Bytes() uint64 {
	return uint64(o.sealed.Pages()) * uint64(o.sealed.Geometry().PageBytes())
}

// Ack takes the root that the decode worker says it committed, and releases the
// pages: after a commit it has its own. ErrRoot means that it is not the root of
// this offer, or that the offer was aborted before; the pages are released all
// the same, and the request must not be answered.
func (o *Offer) Ack(root [32]byte) error {
	wasOpen := o.close()
	if !wasOpen || subtle.ConstantTimeCompare(root[:], o.root[:]) != 1 {
		return ErrRoot
	}
	return nil
}

// Abort withdraws the offer and releases the pages. It may be called at any
// time, any number of times, also after Ack.
func (o *Offer) Abort() { o.close() }

func (o *Offer) close() (wasOpen bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	wasOpen = o.open
	if wasOpen {
		o.open = false
		o.server.Withdraw(o.transfer)
		o.sealed.Release()
	}
	return wasOpen
}
