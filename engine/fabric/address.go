package fabric

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
)

// Listen listens on "unix:/path" or "tcp:host:port" (port 0 picks one; see
// Address). A unix socket can be reached by its user only; the folder should be
// private as well, since the socket exists before its mode is set. With a TLS
// configuration the stream is encrypted and authenticated by it.
func Listen(addr string, conf *tls.Config) (net.Listener, error) {
	network, where, err := split(addr)
	if err != nil {
		return nil, err
	}
	l, err := net.Listen(network, where)
	if err != nil {
		return nil, fmt.Errorf("listen for page reads: %w", err)
	}
	if network == "unix" {
		if err := os.Chmod(where, 0o600); err != nil {
			return nil, errors.Join(fmt.Errorf("protect the page socket: %w", err), l.Close())
		}
	}
	if conf != nil {
		l = tls.NewListener(l, conf)
	}
	return l, nil
}

// Address returns the address that Dial takes to reach a listener.
func Address(l net.Listener) string {
	return l.Addr().Network() + ":" + l.Addr().String()
}

func split(addr string) (network, where string, err error) {
	network, where, ok := strings.Cut(addr, ":")
	if !ok || where == "" || (network != "unix" && network != "tcp") {
		return "", "", fmt.Errorf("%w: %q", ErrAddress, addr)
	}
	if network == "unix" && !strings.HasPrefix(where, "/") {
		return "", "", fmt.Errorf("%w: %q is not an absolute path", ErrAddress, addr)
	}
	return network, where, nil
}
