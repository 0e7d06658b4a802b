package fabric

import (
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"bulkhead.dev/engine/kv"
	"bulkhead.dev/infra/id"
)

// ServerOptions may be left zero.
type ServerOptions struct {
	// Now is the clock of deadlines on sockets; nil is the system clock.
	Now func() time.Time
	// StallTimeout ends an exchange in which a peer neither reads nor writes
	// for so long; 0 is DefaultStallTimeout.
	StallTimeout time.Duration
	// Arena, if set, is a Memfd pool that all offers come from: clients over a
	// unix socket may map its memory and copy pages out of it themselves.
	Arena *kv.Pool
}

// DefaultStallTimeout bounds how long a peer that stands still can hold a page
// open. A page takes milliseconds on any network that can serve at all.
const DefaultStallTimeout = 30 * time.Second

// Server serves the pages of open offers. It is the prefill side.
type Server struct {
	now   func() time.Time
	stall time.Duration
	arena *kv.Pool
	// uid tells who is at the other end of a socket, and grace is returnGrace;
	// tests replace them.
	uid   func(*net.UnixConn) (int, error)
	grace time.Duration

	mu     sync.Mutex
	offers map[id.Transfer]offer // under mu
	lent   int                   // under mu
}

type offer struct {
	secret Secret
	sealed *kv.Sealed
}

// NewServer makes a server without offers.
func NewServer(o ServerOptions) *Server {
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.StallTimeout == 0 {
		o.StallTimeout = DefaultStallTimeout
	}
	return &Server{now: o.Now, stall: o.StallTimeout, arena: o.Arena, uid: peerUID, grace: returnGrace, offers: map[id.Transfer]offer{}}
}

// Open lets whoever shows the secret read the pages until Withdraw. The caller
// keeps the handle and releases it after Withdraw.
func (s *Server) Open(transfer id.Transfer, secret Secret, sealed *kv.Sealed) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.offers[transfer]; ok {
		return ErrDuplicate
	}
	s.offers[transfer] = offer{secret, sealed}
	return nil
}

// Extend puts more pages on an open offer: sealed has those of before, too. The
// caller keeps all handles and releases them after Withdraw. Extending what is
// not open does nothing.
func (s *Server) Extend(transfer id.Transfer, sealed *kv.Sealed) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if o, ok := s.offers[transfer]; ok {
		s.offers[transfer] = offer{o.secret, sealed}
	}
}

// Withdraw ends an offer. Reads of single pages and loans that are in flight end
// by themselves and hold those pages meanwhile. Withdrawing what is not open does
// nothing.
func (s *Server) Withdraw(transfer id.Transfer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.offers, transfer)
}

// Offers returns the number of open offers.
func (s *Server) Offers() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.offers)
}

// find returns the pages of an offer to somebody who knows its secret.
func (s *Server) find(transfer id.Transfer, secret Secret) (*kv.Sealed, error) {
	s.mu.Lock()
	o, ok := s.offers[transfer]
	s.mu.Unlock()
	// An unknown transfer compares with the zero secret, so that the answer
	// takes as long. It is refused even if that is what was shown.
	same := subtle.ConstantTimeCompare(o.secret[:], secret[:]) == 1
	if !ok || !same {
		return nil, ErrRefused
	}
	return o.sealed, nil
}

// view is Sealed.View with the errors of this package.
func view(sealed *kv.Sealed, ref PageRef, f func(page []byte) error) error {
	return translate(sealed.View(ref, f))
}

// translate gives errors of package kv the names that they have here, and only
// those: kv.ErrStale is for handles that are one's own.
func translate(err error) error {
	switch {
	case errors.Is(err, kv.ErrRange):
		return fmt.Errorf("%w: not in the offer: %s", ErrRefused, err.Error())
	case errors.Is(err, kv.ErrStale):
		return fmt.Errorf("%w: %s", ErrStale, err.Error())
	}
	return err
}

// Local returns a reader in the same process.
func (s *Server) Local() Reader { return local{s} }

type local struct{ s *Server }

// Transport implements Reader.
func (local) Transport() Transport { return Local }

func (l local) ReadPages(ctx context.Context, transfer id.Transfer, secret Secret, refs []PageRef, into Sink) error {
	for i, ref := range refs {
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("read page %d of %d: %w", i, len(refs), err)
		}
		sealed, err := l.s.find(transfer, secret)
		if err != nil {
			return err
		}
		if err := view(sealed, ref, func(page []byte) error {
			if size := into.PageBytes(); size != len(page) {
				return fmt.Errorf("%w: a page of %d bytes for %d bytes of memory", ErrProtocol, len(page), size)
			}
			return into.Copy(i, page)
		}); err != nil {
			return err
		}
	}
	return nil
}
