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
	Version                   uint16
	Request                   id.Request
	Transfer                  id.Transfer
	Nonce                     id.Nonce
	PrefillEpoch, DecodeEpoch id.Epoch
	Model                     [32]byte
	// TokenDigest is made of the ids that the forward passes were given.
	TokenDigest [32]byte
}

// Offer is what one decode worker may read of a prompt. Its pages are put on
// offer by Preview, as they are finished, and by Complete. Ack or Abort it;
// deferring Abort and then calling Ack is right. Preview and Complete are not
// called at the same time; Abort may be, at any time.
type Offer struct {
	server   *fabric.Server
	m        Manifest
	key      kv.DigestKey
	encoding []byte
	root     [32]byte

	mu     sync.Mutex
	state  offerState   // under mu
	sealed []*kv.Sealed // under mu; the last one has all pages on offer
}

type offerState uint8

const (
	offerNew offerState = iota // the page server does not know it yet
	offerOpen
	offerClosed
)

// ErrWithdrawn means that an offer was aborted meanwhile.
var ErrWithdrawn = errors.New("offer was withdrawn")

// NewOffer makes an offer without pages.
func NewOffer(server *fabric.Server, meta Meta) *Offer {
	o := &Offer{server: server, m: Manifest{
		Version: meta.Version,
		Request: meta.Request, Transfer: meta.Transfer, Nonce: meta.Nonce,
		PrefillEpoch: meta.PrefillEpoch, DecodeEpoch: meta.DecodeEpoch,
		Model: meta.Model, TokenDigest: meta.TokenDigest, Alg: algOf(meta.Version),
	}}
	rand.Read(o.m.Seed[:])
	rand.Read(o.m.Secret[:])
	o.key = o.m.key()
	return o
}

// Preview digests the pages, of which all are full, opens them at the page
// server and returns what to tell the decode worker. It takes the handle over,
// also when it fails. Each preview has more pages than the one before. ErrManifest
// means that the version of the hand-off has no previews.
func (o *Offer) Preview(sealed *kv.Sealed) ([]byte, error) {
	return o.put(sealed, true)
}

// Complete digests the rest of the pages, opens all of them at the page server
// and makes the manifest. It takes the handle over, also when it fails.
func (o *Offer) Complete(sealed *kv.Sealed) error {
	encoding, err := o.put(sealed, false)
	if err != nil {
		return err
	}
	o.encoding, o.root = encoding, Root(encoding)
	return nil
}

func (o *Offer) put(sealed *kv.Sealed, preview bool) ([]byte, error) {
	o.m.Owner, o.m.Lease, o.m.Geometry = sealed.Owner(), sealed.Lease(), sealed.Geometry().Fingerprint()
	o.m.Tokens, o.m.Extents = uint32(sealed.Tokens()), sealed.Extents()
	sums, err := sealed.Sums(o.key, len(o.m.Sums))
	if err != nil {
		sealed.Release()
		return nil, fmt.Errorf("offer pages: %w", err)
	}
	o.m.Sums = append(o.m.Sums, sums...)
	m := o.m
	if m.Preview = preview; preview {
		m.Sums = nil
	}
	encoding := m.Encode()
	// What the other leg would refuse is not sent.
	if _, err := DecodeManifest(encoding); err != nil {
		sealed.Release()
		return nil, fmt.Errorf("offer pages: %w", err)
	}
	if err := o.open(sealed); err != nil {
		return nil, fmt.Errorf("offer pages: %w", err)
	}
	return encoding, nil
}

// open lets the page server serve the pages.
func (o *Offer) open(sealed *kv.Sealed) (err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch o.state {
	case offerNew:
		err = o.server.Open(o.m.Transfer, o.m.Secret, sealed)
	case offerOpen:
		o.server.Extend(o.m.Transfer, sealed)
	case offerClosed:
		err = ErrWithdrawn
	}
	if err != nil {
		sealed.Release()
		return err
	}
	// The handles before stay until the end: reads may be under way on them.
	o.state = offerOpen
	o.sealed = append(o.sealed, sealed)
	return nil
}

// Manifest returns the encoding to send to the decode worker, once the offer is
// complete. It holds secrets: it goes nowhere else and into no log.
func (o *Offer) Manifest() []byte { return o.encoding }

// Root identifies the manifest.
func (o *Offer) Root() [32]byte { return o.root }

// Tokens returns the number of positions that the forward passes wrote.
func (o *Offer) Tokens() int { return int(o.m.Tokens) }

// Extents returns the pages on offer. It still answers after release.
func (o *Offer) Extents() []kv.Extent { return o.m.Extents }

// Bytes returns the size of the pages on offer.
func (o *Offer) Bytes() (n uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.sealed) > 0 {
		n = uint64(len(o.m.Sums)) * uint64(o.sealed[0].Geometry().PageBytes())
	}
	return n
}

// Ack takes the root that the decode worker says it committed, and releases the
// pages: after a commit it has its own. ErrRoot means that it is not the root of
// this offer, or that the offer was aborted before; the pages are released all
// the same, and the request must not be answered.
func (o *Offer) Ack(root [32]byte) error { return o.AckThen(root, nil) }

// AckThen is Ack, and calls verified with the pages before it releases them, if
// the root is that of this offer: then, and only then, the other leg has proof
// that they hold what the manifest says.
func (o *Offer) AckThen(root [32]byte, verified func(*kv.Sealed)) error {
	return o.close(func() error {
		if o.state != offerOpen || o.encoding == nil || subtle.ConstantTimeCompare(root[:], o.root[:]) != 1 {
			return ErrRoot
		}
		if verified != nil {
			verified(o.sealed[len(o.sealed)-1])
		}
		return nil
	})
}

// Abort withdraws the offer and releases the pages. It may be called at any
// time, any number of times, also after Ack.
func (o *Offer) Abort() { _ = o.close(func() error { return nil }) }

// close releases everything, after it did what is to be done first.
func (o *Offer) close(first func() error) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	err := first()
	if o.state == offerOpen {
		o.server.Withdraw(o.m.Transfer)
		for _, s := range o.sealed {
			s.Release()
		}
	}
	o.state = offerClosed
	return err
}
