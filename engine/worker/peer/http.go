package peer

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"time"

	"connectrpc.com/connect"
)

// Unpacked is an option for every client of an API between processes. Without it
// Connect packs each message, which for small ones, and ids, costs much more than it
// saves.
var Unpacked = connect.WithAcceptCompression("gzip", nil, nil)

// BaseURL is the URL under which every worker API is reached; where the
// connection goes is up to the client.
const BaseURL = "https://" + serverName

const (
	// dialTimeout bounds connecting; both ends are in one data center.
	dialTimeout = 5 * time.Second
	// pingAfter and pingTimeout find a connection whose other end is gone
	// without a word, which happens between hosts.
	pingAfter   = 15 * time.Second
	pingTimeout = 15 * time.Second
)

// ErrAddress means that an address is not "unix:/path" or "tcp:host:port".
var ErrAddress = errors.New("bad peer address")

// SplitAddress takes apart "unix:/path" and "tcp:host:port" for package net.
func SplitAddress(addr string) (network, where string, err error) {
	network, where, _ = strings.Cut(addr, ":")
	switch {
	case network == "unix" && strings.HasPrefix(where, "/"), network == "tcp" && strings.Contains(where, ":"):
		return network, where, nil
	}
	return "", "", fmt.Errorf("%w: %q", ErrAddress, addr)
}

// NewClient returns an HTTP/2 client whose requests all go to the address, and
// only to a server that is allowed there. Use it with BaseURL, and close its
// idle connections when done.
func NewClient(addr string, c Credentials, allow Allow) (*http.Client, error) {
	network, where, err := SplitAddress(addr)
	if err != nil {
		return nil, err
	}
	conf, err := c.ClientConfig(allow)
	if err != nil {
		return nil, err
	}
	var d net.Dialer
	return &http.Client{
		Transport: &http.Transport{
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				ctx, cancel := context.WithTimeout(ctx, dialTimeout)
				defer cancel()
				return d.DialContext(ctx, network, where)
			},
			TLSClientConfig:     conf,
			TLSHandshakeTimeout: dialTimeout,
			ForceAttemptHTTP2:   true,
			HTTP2:               &http.HTTP2Config{SendPingTimeout: pingAfter, PingTimeout: pingTimeout},
		},
		// A redirect would leave the address that was asked for.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}, nil
}

type contextKey struct{}

// Middleware puts the identity of the caller into the context of each request.
// A request without one is refused.
func Middleware(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		who, err := ofState(r.TLS)
		if err != nil {
			http.Error(w, "no peer identity", http.StatusForbidden)
			return
		}
		next.ServeHTTP(w, r.WithContext(NewContext(r.Context(), who)))
	})
}

// NewContext returns a context that carries an identity.
func NewContext(ctx context.Context, who Identity) context.Context {
	return context.WithValue(ctx, contextKey{}, who)
}

// FromContext returns the identity of the caller, if there is one.
func FromContext(ctx context.Context) (Identity, bool) {
	who, ok := ctx.Value(contextKey{}).(Identity)
	return who, ok
}

// Require returns the identity of the caller if it is allowed, and a Connect
// error with the code permission_denied otherwise.
func Require(ctx context.Context, allow Allow) (Identity, error) {
	who, ok := FromContext(ctx)
	if !ok || !allow(who) {
		return Identity{}, connect.NewError(connect.CodePermissionDenied, fmt.Errorf("%w: %v may not call this", ErrIdentity, who))
	}
	return who, nil
}

// IsGateway allows the gateway.
func IsGateway(i Identity) bool { return i == Gateway() }
