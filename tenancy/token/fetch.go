package token

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"syscall"

	"github.com/coreos/go-oidc/v3/oidc"
)

var (
	errURL       = errors.New("the URL is not https, or not one that an issuer can have")
	errRedirect  = errors.New("the issuer answered with a redirect, which is not followed")
	errInternal  = errors.New("the issuer is at an internal address, which is not allowed")
	errDiscovery = errors.New("the issuer has no discovery document that can be used")
	errKeySet    = errors.New("the issuer has no key set that can be used")
)

// special are networks of the public address space that do not belong to anybody on the
// Internet, or that lead elsewhere (RFC 6890).
var special = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"), netip.MustParsePrefix("100.64.0.0/10"), netip.MustParsePrefix("192.0.0.0/24"),
	netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("192.88.99.0/24"), netip.MustParsePrefix("198.18.0.0/15"),
	netip.MustParsePrefix("198.51.100.0/24"), netip.MustParsePrefix("203.0.113.0/24"), netip.MustParsePrefix("240.0.0.0/4"),
	netip.MustParsePrefix("2001::/23"), netip.MustParsePrefix("2001:db8::/32"), netip.MustParsePrefix("2002::/16"),
}

// globalV6 is all of the IPv6 address space that is in use on the Internet.
var globalV6 = netip.MustParsePrefix("2000::/3")

// public reports whether an address can be on the Internet.
func public(a netip.Addr) bool {
	if a.Is6() && !globalV6.Contains(a) || !a.IsGlobalUnicast() || a.IsPrivate() {
		return false
	}
	return !slices.ContainsFunc(special, func(p netip.Prefix) bool { return p.Contains(a) })
}

// loopback reports whether a host of a URL is this machine.
func loopback(host string) bool {
	a, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && a.IsLoopback()
}

// newClient makes a client that talks to issuers and nobody else: no redirects, no proxy, no internal
// addresses but those of the given networks, whatever the name resolves to, and bounded answers.
func newClient(internal []netip.Prefix, roots *x509.CertPool) *http.Client {
	dialer := &net.Dialer{Control: func(_, address string, _ syscall.RawConn) error {
		ap, err := netip.ParseAddrPort(address)
		if err != nil {
			return errInternal
		}
		a := ap.Addr().Unmap().WithZone("")
		if public(a) || slices.ContainsFunc(internal, func(p netip.Prefix) bool { return p.Contains(a) }) {
			return nil
		}
		return errInternal
	}}
	return &http.Client{
		CheckRedirect: func(*http.Request, []*http.Request) error { return errRedirect },
		Transport: bounded{&http.Transport{
			DialContext:            dialer.DialContext,
			TLSClientConfig:        &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12},
			ForceAttemptHTTP2:      true,
			DisableKeepAlives:      true, // fetches are minutes apart
			MaxResponseHeaderBytes: maxResponseHeader,
		}},
	}
}

// bounded ends a body that is too long with an error.
type bounded struct{ http.RoundTripper }

func (b bounded) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := b.RoundTripper.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	resp.Body = http.MaxBytesReader(nil, resp.Body, maxDocument)
	return resp, nil
}

// fetchKeys asks an issuer for its keys. Its errors hold nothing of what the issuer
// answered.
func fetchKeys(ctx context.Context, client *http.Client, issuer string) ([]*publicKey, error) {
	from, err := issuerURL(issuer)
	if err != nil {
		return nil, err
	}
	// The library compares the issuer in the document with ours.
	provider, err := oidc.NewProvider(oidc.ClientContext(ctx, client), issuer)
	if err != nil {
		return nil, cause(ctx, err, errDiscovery)
	}
	var document struct {
		Keys string `json:"jwks_uri"`
	}
	if provider.Claims(&document) != nil {
		return nil, errDiscovery
	}
	to, err := url.Parse(document.Keys)
	if err != nil || to.Scheme == "http" && from.Scheme != "http" || to.Hostname() == "" ||
		to.Scheme != "https" && (to.Scheme != "http" || !loopback(to.Hostname())) {
		return nil, fmt.Errorf("%w: %w", errDiscovery, errURL)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, to.String(), nil)
	if err != nil {
		return nil, errDiscovery
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, cause(ctx, err, errKeySet)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%w: status %d", errKeySet, resp.StatusCode)
	}
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, cause(ctx, err, errKeySet)
	}
	return parseKeys(b)
}

// cause says what went wrong without the texts of errors that may quote an answer.
func cause(ctx context.Context, err, what error) error {
	if ctx.Err() != nil {
		return fmt.Errorf("%w: %w", what, ctx.Err())
	}
	for _, known := range []error{errRedirect, errInternal} {
		if errors.Is(err, known) {
			return fmt.Errorf("%w: %w", what, known)
		}
	}
	if e, ok := errors.AsType[*net.OpError](err); ok {
		return fmt.Errorf("%w: %w", what, e)
	}
	if e, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return fmt.Errorf("%w: longer than %d bytes", what, e.Limit)
	}
	return what
}
