package peer

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net/url"
	"time"
)

const (
	// serverName is in every certificate, because the TLS library wants a name
	// to verify. It means nothing; the identity is the URI.
	serverName = "peer.bulkhead.internal"
	// backdate allows for clocks of other hosts.
	backdate = 5 * time.Minute
	// validity is far longer than a process lives. A certificate ends with the
	// process that holds its key, and with the authority, which is in memory.
	validity = 10 * 365 * 24 * time.Hour
	// serialBits of randomness name a certificate, as the CA rules of the web
	// ask for at least 64.
	serialBits = 127
)

// Authority issues certificates for the processes of one platform. It lives in
// memory only. It is safe for concurrent use.
type Authority struct {
	now  func() time.Time
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
}

// NewAuthority makes an authority with a new key.
func NewAuthority(now func() time.Time) (*Authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make authority key: %w", err)
	}
	t := template(now(), "Bulkhead authority")
	t.IsCA, t.BasicConstraintsValid, t.MaxPathLenZero = true, true, true
	t.KeyUsage = x509.KeyUsageCertSign
	der, err := x509.CreateCertificate(rand.Reader, t, t, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("make authority certificate: %w", err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("make authority certificate: %w", err)
	}
	return &Authority{now: now, cert: cert, key: key, pem: encode("CERTIFICATE", der)}, nil
}

// Issue makes a key and a certificate for a process.
func (a *Authority) Issue(who Identity) (Credentials, error) {
	u, err := who.uri()
	if err != nil {
		return Credentials{}, err
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return Credentials{}, fmt.Errorf("make key: %w", err)
	}
	t := template(a.now(), who.String())
	t.URIs, t.DNSNames = []*url.URL{u}, []string{serverName}
	t.KeyUsage = x509.KeyUsageDigitalSignature
	t.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	der, err := x509.CreateCertificate(rand.Reader, t, a.cert, key.Public(), a.key)
	if err != nil {
		return Credentials{}, fmt.Errorf("make certificate: %w", err)
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return Credentials{}, fmt.Errorf("encode key: %w", err)
	}
	return Credentials{CA: a.pem, Cert: encode("CERTIFICATE", der), Key: encode("PRIVATE KEY", pkcs8)}, nil
}

func template(now time.Time, name string) *x509.Certificate {
	// crypto/rand does not return an error.
	serial, _ := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), serialBits))
	return &x509.Certificate{
		SerialNumber: serial.Add(serial, big.NewInt(1)),
		Subject:      pkix.Name{CommonName: name},
		NotBefore:    now.Add(-backdate),
		NotAfter:     now.Add(validity),
	}
}

func encode(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}
