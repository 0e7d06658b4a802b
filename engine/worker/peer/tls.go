package peer

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
)

// Credentials are what a process proves its identity with, as PEM. They travel
// in its boot document and nowhere else.
type Credentials struct {
	CA   []byte `json:"ca"`   // certificate of the authority
	Cert []byte `json:"cert"` // certificate of the process
	Key  []byte `json:"key"`  // private key of the process
}

// Format hides the key, whatever the verb.
func (Credentials) Format(f fmt.State, _ rune) { _, _ = f.Write([]byte("REDACTED")) }

// LogValue hides the key.
func (Credentials) LogValue() slog.Value { return slog.StringValue("REDACTED") }

// Allow decides whether an identity may be at the other end.
type Allow func(Identity) bool

// Anyone allows every process of the platform. Handlers then check who calls.
func Anyone(Identity) bool { return true }

// Only allows one identity.
func Only(want Identity) Allow { return func(i Identity) bool { return i == want } }

// Role allows the workers of a role.
func (r Role) Allow(i Identity) bool { return i.IsWorker(r) }

// Identity returns the identity that the credentials prove.
func (c Credentials) Identity() (Identity, error) {
	pair, err := c.pair()
	if err != nil {
		return Identity{}, err
	}
	return FromCertificate(pair.Leaf)
}

// ServerConfig returns the TLS configuration of a listener that only those
// allowed can connect to.
func (c Credentials) ServerConfig(allow Allow) (*tls.Config, error) {
	conf, pool, err := c.config(allow)
	if err != nil {
		return nil, err
	}
	conf.ClientAuth = tls.RequireAndVerifyClientCert
	conf.ClientCAs = pool
	return conf, nil
}

// ClientConfig returns the TLS configuration of a client that talks to those
// allowed only.
func (c Credentials) ClientConfig(allow Allow) (*tls.Config, error) {
	conf, pool, err := c.config(allow)
	if err != nil {
		return nil, err
	}
	conf.RootCAs = pool
	conf.ServerName = serverName
	return conf, nil
}

func (c Credentials) config(allow Allow) (*tls.Config, *x509.CertPool, error) {
	pair, err := c.pair()
	if err != nil {
		return nil, nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(c.CA) {
		return nil, nil, errors.New("peer credentials: no certificate of the authority")
	}
	return &tls.Config{
		Certificates: []tls.Certificate{pair},
		MinVersion:   tls.VersionTLS13,
		// A resumed session would skip the exchange of certificates. There are
		// few connections and they are long.
		SessionTicketsDisabled: true,
		VerifyConnection: func(s tls.ConnectionState) error {
			// The chain was verified before this is called.
			who, err := ofState(&s)
			if err != nil {
				return err
			}
			if !allow(who) {
				return fmt.Errorf("%w: %v", ErrIdentity, who)
			}
			return nil
		},
	}, pool, nil
}

func (c Credentials) pair() (tls.Certificate, error) {
	pair, err := tls.X509KeyPair(c.Cert, c.Key)
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("peer credentials: %w", err)
	}
	return pair, nil
}

// ofState returns the identity of the verified peer of a connection.
func ofState(s *tls.ConnectionState) (Identity, error) {
	if s == nil || len(s.VerifiedChains) == 0 || len(s.VerifiedChains[0]) == 0 {
		return Identity{}, fmt.Errorf("%w: no verified certificate", ErrIdentity)
	}
	return FromCertificate(s.VerifiedChains[0][0])
}
