package httpx

import (
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"time"
)

// Limits of every public connection. Bodies and answers have limits of their
// own: a long stream is no slow client.
const (
	readHeaderTimeout = 10 * time.Second
	idleTimeout       = 2 * time.Minute
	maxHeaderBytes    = 64 << 10
	maxStreams        = 250 // concurrent HTTP/2 requests of one connection
)

// ErrUnsafeListen means that keys and prompts would cross a network in the
// clear.
var ErrUnsafeListen = errors.New("refusing to listen without TLS")

// ServerOptions say how a public server listens.
type ServerOptions struct {
	// TLS is nil for plain HTTP, which only loopback may have unless
	// BehindProxy says that something in front terminates TLS.
	TLS         *tls.Config
	BehindProxy bool
	Log         *slog.Logger
}

// Listen opens addr after checking that it is safe to do so. The error wraps
// ErrUnsafeListen where it is not.
func Listen(addr string, o ServerOptions) (net.Listener, error) {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, fmt.Errorf("listen address: %w", err)
	}
	if o.TLS == nil && !o.BehindProxy && !loopback(host) {
		return nil, fmt.Errorf("%w on %s: give public.tls_cert and public.tls_key, or set public.behind_proxy if something in front terminates TLS", ErrUnsafeListen, addr)
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	return l, nil
}

func loopback(host string) bool {
	if host == "localhost" {
		return true
	}
	a, err := netip.ParseAddr(host)
	return err == nil && a.IsLoopback()
}

// NewServer returns a server with its limits set. It speaks HTTP/1.1 and
// HTTP/2, the latter without TLS too, for gRPC on loopback.
func NewServer(h http.Handler, o ServerOptions) *http.Server {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(o.TLS != nil)
	protocols.SetUnencryptedHTTP2(o.TLS == nil)
	return &http.Server{
		Handler: h, TLSConfig: o.TLS, Protocols: protocols,
		HTTP2:             &http.HTTP2Config{MaxConcurrentStreams: maxStreams},
		ReadHeaderTimeout: readHeaderTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeaderBytes,
		ErrorLog: slog.NewLogLogger(o.Log.Handler(), slog.LevelDebug),
	}
}

// ClientIP returns the address of the client: that of the connection, or, if
// the connection comes from a trusted proxy, the last address of
// X-Forwarded-For that is not one. Anything else in the header is a claim of
// the client.
func ClientIP(r *http.Request, trusted []netip.Prefix) netip.Addr {
	ap, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return netip.Addr{}
	}
	addr := ap.Addr().Unmap()
	hops := forwarded(r)
	for i := len(hops) - 1; i >= 0 && within(addr, trusted); i-- {
		hop, err := netip.ParseAddr(hops[i])
		if err != nil {
			break
		}
		addr = hop.Unmap()
	}
	return addr
}

func within(a netip.Addr, list []netip.Prefix) bool {
	for _, p := range list {
		if p.Contains(a) {
			return true
		}
	}
	return false
}
