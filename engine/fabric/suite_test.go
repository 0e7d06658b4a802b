package fabric_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"math/big"
	"net"
	"path/filepath"
	"testing"
	"time"

	"bulkhead.dev/engine/fabric"
	"bulkhead.dev/engine/fabric/fabrictest"
	"bulkhead.dev/infra/assert"
)

func TestLocal(t *testing.T) {
	t.Parallel()
	fabrictest.Suite(t, fabric.Local, func(_ *testing.T, s *fabric.Server) fabric.Reader { return s.Local() })
}

// The fault injector must be a good fabric itself when it injects nothing.
func TestFaultyWithoutFault(t *testing.T) {
	t.Parallel()
	fabrictest.Suite(t, fabric.Local, func(_ *testing.T, s *fabric.Server) fabric.Reader {
		return fabrictest.Faulty{Reader: s.Local()}
	})
}

func TestUnix(t *testing.T) {
	t.Parallel()
	fabrictest.Suite(t, fabric.Unix, func(t *testing.T, s *fabric.Server) fabric.Reader {
		return connect(t, s, socket(t), nil, fabric.ClientOptions{StreamOnly: true})
	})
}

func TestTCP(t *testing.T) {
	t.Parallel()
	fabrictest.Suite(t, fabric.TCP, func(t *testing.T, s *fabric.Server) fabric.Reader {
		return connect(t, s, "tcp:127.0.0.1:0", nil, fabric.ClientOptions{})
	})
}

func TestTLS(t *testing.T) {
	t.Parallel()
	server, client := tlsPair(t)
	fabrictest.Suite(t, fabric.TCPWithTLS, func(t *testing.T, s *fabric.Server) fabric.Reader {
		return connect(t, s, "tcp:127.0.0.1:0", server, fabric.ClientOptions{TLS: client})
	})
}

func TestSharedMemory(t *testing.T) {
	t.Parallel()
	fabrictest.Suite(t, fabric.SharedMemory, func(t *testing.T, s *fabric.Server) fabric.Reader {
		return connect(t, s, socket(t), nil, fabric.ClientOptions{})
	})
}

// As workers do it.
func TestSharedMemoryWithTLS(t *testing.T) {
	t.Parallel()
	server, client := tlsPair(t)
	client.ServerName = "127.0.0.1"
	fabrictest.Suite(t, fabric.SharedMemory, func(t *testing.T, s *fabric.Server) fabric.Reader {
		return connect(t, s, socket(t), server, fabric.ClientOptions{TLS: client})
	})
}

// Without the certificate there is no exchange.
func TestTLSRefusesStrangers(t *testing.T) {
	t.Parallel()
	conf, _ := tlsPair(t)
	addr := serve(t, fabric.NewServer(fabric.ServerOptions{}), "tcp:127.0.0.1:0", conf)
	for _, c := range []*tls.Config{nil, {RootCAs: x509.NewCertPool()}} {
		r, err := fabric.Dial(addr, c)
		assert.NoError(t, err)
		defer r.Close()
		err = r.ReadPages(t.Context(), [16]byte{}, fabric.Secret{}, make([]fabric.PageRef, 1), fabrictest.Memory{{0}})
		if err == nil {
			t.Fatal("served a stranger")
		}
	}
}

func serve(t *testing.T, s *fabric.Server, addr string, conf *tls.Config) string {
	t.Helper()
	l, err := fabric.Listen(addr, conf)
	assert.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- s.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	return fabric.Address(l)
}

func socket(t *testing.T) string { return "unix:" + filepath.Join(t.TempDir(), "s") }

func connect(t *testing.T, s *fabric.Server, addr string, server *tls.Config, o fabric.ClientOptions) fabric.Reader {
	t.Helper()
	c, err := fabric.NewClient(serve(t, s, addr, server), o)
	assert.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func tlsPair(t *testing.T) (server, client *tls.Config) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	assert.NoError(t, err)
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	assert.NoError(t, err)
	cert, err := x509.ParseCertificate(der)
	assert.NoError(t, err)
	pool := x509.NewCertPool()
	pool.AddCert(cert)
	pair := []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}
	return &tls.Config{Certificates: pair, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool},
		&tls.Config{Certificates: pair, RootCAs: pool}
}
