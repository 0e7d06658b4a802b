package handoff

import (
	"context"
	"fmt"
	"sync"

	"bulkhead.dev/engine/fabric"
	"bulkhead.dev/engine/kv"
	"bulkhead.dev/infra/id"
)

// maxSeen is how many transfer ids are remembered after they ended, so that
// none is used twice. Ids are 128 random bits and a manifest names the run of
// the worker; forgetting the oldest opens nothing unless the gateway repeats an
// announcement.
const maxSeen = 1 << 16

// ReceiverConfig is what a decode worker is.
type ReceiverConfig struct {
	Epoch    id.Epoch
	Geometry kv.Geometry
	Model    [32]byte // SHA-256 of the model file
}

// Receiver knows the transfers that this process expects, and those it has
// seen. All methods may be called from any goroutine.
type Receiver struct {
	conf ReceiverConfig

	mu       sync.Mutex
	expected map[id.Transfer]*Inbound // under mu
	seen     map[id.Transfer]struct{} // under mu; expected ones too
	order    []id.Transfer            // under mu; ring of seen, oldest at next
	next     int                      // under mu
}

// NewReceiver makes a receiver that expects nothing yet.
func NewReceiver(c ReceiverConfig) *Receiver {
	return &Receiver{conf: c, expected: map[id.Transfer]*Inbound{}, seen: map[id.Transfer]struct{}{}}
}

// Expect is what the gateway announces to the decode leg.
type Expect struct {
	Version      uint16 // of the hand-off
	Request      id.Request
	Transfer     id.Transfer
	Nonce        id.Nonce
	Owner        id.Owner
	Lease        id.Lease // of the decode leg
	PrefillEpoch id.Epoch
	Model        [32]byte
	TokenDigest  [32]byte
	Tokens       int // length of the prompt
}

// Expect announces a transfer whose pages will be read through from. It takes
// the credits over, also when it fails; credits beyond the prompt stay with the
// sequence for its growth. Close the Inbound on every path. Every error is a
// *Refusal.
func (r *Receiver) Expect(e Expect, credits *kv.Credits, from fabric.Reader) (*Inbound, error) {
	landing, err := credits.Land(e.Lease)
	if err != nil {
		return nil, refuse(Canceled, err)
	}
	if refusal := r.admit(e, credits, landing); refusal != nil {
		landing.Abort()
		return nil, refusal
	}
	in := &Inbound{receiver: r, want: e, landing: landing, from: from, done: make(chan struct{})}
	in.ctx, in.cancel = context.WithCancel(context.Background())

	r.mu.Lock()
	defer r.mu.Unlock()
	if _, ok := r.seen[e.Transfer]; ok {
		in.cancel()
		landing.Abort()
		return nil, refuse(Replay, nil)
	}
	r.remember(e.Transfer)
	r.expected[e.Transfer] = in
	return in, nil
}

// admit checks what is announced against what this worker is.
func (r *Receiver) admit(e Expect, credits *kv.Credits, landing *kv.Landing) *Refusal {
	geometry := landing.Geometry()
	switch {
	case e.Version < Whole || e.Version > Early:
		return refuse(WrongVersion, fmt.Errorf("version %d", e.Version))
	case e.Model != r.conf.Model:
		return refuse(WrongModel, nil)
	case geometry != r.conf.Geometry:
		return refuse(WrongGeometry, nil)
	case landing.Owner() != e.Owner:
		return refuse(WrongOwner, nil)
	case e.Tokens < 1 || e.Tokens > maxTokens:
		return refuse(Coverage, fmt.Errorf("a prompt of %d tokens", e.Tokens))
	case geometry.PagesFor(e.Tokens) > credits.Pages():
		return refuse(Exhausted, fmt.Errorf("%d credits for %d tokens", credits.Pages(), e.Tokens))
	}
	return nil
}

// remember notes an id and forgets the oldest beyond maxSeen. Callers hold mu.
func (r *Receiver) remember(t id.Transfer) {
	r.seen[t] = struct{}{}
	if len(r.order) < maxSeen {
		r.order = append(r.order, t)
		return
	}
	delete(r.seen, r.order[r.next])
	r.order[r.next] = t
	r.next = (r.next + 1) % maxSeen
}

func (r *Receiver) forget(t id.Transfer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.expected, t)
}

// Preview takes a preview of an expected transfer and reads the pages that it
// adds to those before. They stay as unreadable as any landing until Pull has
// verified all of them. Every error is a *Refusal and ends the transfer, unless
// it is a Replay.
func (r *Receiver) Preview(ctx context.Context, transfer id.Transfer, preview []byte) error {
	in, refusal := r.find(transfer)
	if refusal != nil {
		return refusal
	}
	return in.preview(ctx, preview)
}

// Pull takes the manifest of an expected transfer, reads the pages, verifies
// and commits. It returns the root for the acknowledgment. Every error is a
// *Refusal, and the one who waits for the transfer gets the same. The transfer
// cannot be pulled again, whatever came of it.
func (r *Receiver) Pull(ctx context.Context, transfer id.Transfer, manifest []byte) ([32]byte, error) {
	in, refusal := r.find(transfer)
	if refusal != nil {
		return [32]byte{}, refusal
	}
	return in.pull(ctx, manifest)
}

func (r *Receiver) find(transfer id.Transfer) (*Inbound, *Refusal) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if in, ok := r.expected[transfer]; ok {
		return in, nil
	}
	if _, seen := r.seen[transfer]; seen {
		return nil, refuse(Replay, nil)
	}
	return nil, refuse(WrongTransfer, nil)
}

// refusal compares a manifest with what was announced. nil means that every
// field that both know is equal; a preview may have fewer positions.
func (r *Receiver) refusal(m *Manifest, e Expect) *Refusal {
	switch {
	case m.Version != e.Version:
		return refuse(WrongVersion, fmt.Errorf("version %d, agreed on %d", m.Version, e.Version))
	case m.Transfer != e.Transfer:
		return refuse(WrongTransfer, nil)
	case m.Request != e.Request:
		return refuse(WrongRequest, nil)
	case m.Nonce != e.Nonce:
		return refuse(WrongNonce, nil)
	case m.Owner != e.Owner:
		return refuse(WrongOwner, nil)
	case m.PrefillEpoch != e.PrefillEpoch || m.DecodeEpoch != r.conf.Epoch:
		return refuse(WrongEpoch, nil)
	case m.Model != e.Model:
		return refuse(WrongModel, nil)
	case m.Geometry != r.conf.Geometry.Fingerprint():
		return refuse(WrongGeometry, nil)
	case int(m.Tokens) > e.Tokens || !m.Preview && int(m.Tokens) != e.Tokens:
		return refuse(Coverage, fmt.Errorf("%d positions are offered, %d announced", m.Tokens, e.Tokens))
	case m.TokenDigest != e.TokenDigest:
		return refuse(WrongTokens, nil)
	}
	return nil
}
