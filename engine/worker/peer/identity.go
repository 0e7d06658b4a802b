package peer

import (
	"crypto/x509"
	"errors"
	"fmt"
	"net/url"
	"strings"

	"bulkhead.dev/infra/id"
)

// Role is the leg that a worker serves.
type Role string

// The legs.
const (
	Prefill Role = "prefill"
	Decode  Role = "decode"
)

// Identity is who a process is. The zero value is nobody.
type Identity struct {
	// Gateway is true for the process with the API and the registry; the other
	// fields are then zero.
	Gateway bool
	Role    Role
	Epoch   id.Epoch
}

// Gateway is the identity of the gateway.
func Gateway() Identity { return Identity{Gateway: true} }

// Worker is the identity of one run of a worker.
func Worker(role Role, epoch id.Epoch) Identity { return Identity{Role: role, Epoch: epoch} }

// IsWorker reports whether the identity is that of a worker with the role.
func (i Identity) IsWorker(role Role) bool {
	return !i.Gateway && i.Role == role && i.Epoch != id.Epoch{}
}

const (
	scheme      = "bulkhead"
	hostGateway = "gateway"
	hostWorker  = "worker"
)

// String returns the identity as it stands in a certificate.
func (i Identity) String() string {
	switch {
	case i == Identity{}:
		return scheme + "://nobody"
	case i.Gateway:
		return scheme + "://" + hostGateway
	}
	return scheme + "://" + hostWorker + "/" + string(i.Role) + "/" + i.Epoch.String()
}

// ErrIdentity means that a certificate names no identity, more than one, or
// another than was wanted.
var ErrIdentity = errors.New("peer identity refused")

// Parse reads the text form. Only what String writes is accepted.
func Parse(s string) (Identity, error) {
	bad := func() (Identity, error) { return Identity{}, fmt.Errorf("%w: malformed", ErrIdentity) }
	rest, ok := strings.CutPrefix(s, scheme+"://")
	if !ok {
		return bad()
	}
	if rest == hostGateway {
		return Gateway(), nil
	}
	rest, ok = strings.CutPrefix(rest, hostWorker+"/")
	if !ok {
		return bad()
	}
	role, text, ok := strings.Cut(rest, "/")
	if !ok || Role(role) != Prefill && Role(role) != Decode {
		return bad()
	}
	epoch, err := id.ParseEpoch(text)
	if err != nil || epoch == (id.Epoch{}) {
		return bad()
	}
	return Worker(Role(role), epoch), nil
}

// FromCertificate returns the one identity that a verified certificate names.
func FromCertificate(c *x509.Certificate) (Identity, error) {
	if len(c.URIs) != 1 {
		return Identity{}, fmt.Errorf("%w: %d URIs in the certificate", ErrIdentity, len(c.URIs))
	}
	return Parse(c.URIs[0].String())
}

// uri returns the identity for a certificate.
func (i Identity) uri() (*url.URL, error) {
	if p, err := Parse(i.String()); err != nil || p != i {
		return nil, fmt.Errorf("%w: not a gateway and not a worker with role and epoch", ErrIdentity)
	}
	u, err := url.Parse(i.String())
	if err != nil {
		return nil, fmt.Errorf("identity as URI: %w", err)
	}
	return u, nil
}
