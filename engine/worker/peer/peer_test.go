package peer

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"go.uber.org/goleak"

	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var epoch = id.NewEpoch(time.UnixMilli(1_800_000_000_000))

func TestIdentityText(t *testing.T) {
	t.Parallel()
	for _, i := range []Identity{Gateway(), Worker(Prefill, epoch), Worker(Decode, epoch)} {
		got, err := Parse(i.String())
		assert.NoError(t, err)
		assert.Equal(t, got, i)
	}
	e := epoch.String()
	for _, s := range []string{
		"", "bulkhead://", "bulkhead://nobody", "bulkhead://gateway/", "bulkhead://gateway/x", "http://gateway", "BULKHEAD://gateway",
		"bulkhead://worker", "bulkhead://worker/prefill", "bulkhead://worker/prefill/", "bulkhead://worker/other/" + e,
		"bulkhead://worker/prefill/" + e + "/", "bulkhead://worker/prefill/" + strings.ToLower(e), "bulkhead://worker/prefill/" + id.Epoch{}.String(),
		"bulkhead://worker//" + e, "bulkhead://gateway?x", "bulkhead://gateway#x", "bulkhead://user@gateway",
	} {
		_, err := Parse(s)
		assert.ErrorIs(t, err, ErrIdentity)
	}
}

func FuzzParse(f *testing.F) {
	f.Add("bulkhead://gateway")
	f.Add("bulkhead://worker/decode/" + epoch.String())
	f.Fuzz(func(t *testing.T, s string) {
		i, err := Parse(s)
		if err == nil && i.String() != s {
			t.Fatalf("two texts for one identity: %q and %q", s, i.String())
		}
	})
}

func TestAuthorityRefusesNobody(t *testing.T) {
	t.Parallel()
	a := authority(t)
	for _, i := range []Identity{{}, {Role: Prefill}, {Epoch: epoch}, {Role: "x", Epoch: epoch}, {Gateway: true, Role: Prefill}} {
		_, err := a.Issue(i)
		assert.ErrorIs(t, err, ErrIdentity)
	}
}

func authority(t *testing.T) *Authority {
	t.Helper()
	a, err := NewAuthority(time.Now)
	assert.NoError(t, err)
	return a
}

func issue(t *testing.T, a *Authority, i Identity) Credentials {
	t.Helper()
	c, err := a.Issue(i)
	assert.NoError(t, err)
	return c
}

// serve runs a server that answers with the identity of the caller.
func serve(t *testing.T, c Credentials, allow Allow) string {
	t.Helper()
	addr := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", addr)
	assert.NoError(t, err)
	conf, err := c.ServerConfig(allow)
	assert.NoError(t, err)
	s := &http.Server{TLSConfig: conf, Handler: Middleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		who, _ := FromContext(r.Context())
		_, _ = fmt.Fprintf(w, "%v over HTTP/%d", who, r.ProtoMajor)
	})), ErrorLog: nil}
	done := make(chan struct{})
	go func() { defer close(done); _ = s.ServeTLS(l, "", "") }()
	t.Cleanup(func() { _ = s.Close(); <-done })
	return "unix:" + addr
}

func get(t *testing.T, addr string, c Credentials, allow Allow) (string, error) {
	t.Helper()
	hc, err := NewClient(addr, c, allow)
	assert.NoError(t, err)
	defer hc.CloseIdleConnections()
	resp, err := hc.Get(BaseURL + "/")
	if err != nil {
		return "", err
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	return string(b), err
}

func TestBothEndsProveWhoTheyAre(t *testing.T) {
	t.Parallel()
	a := authority(t)
	decode, gateway := Worker(Decode, epoch), Gateway()
	addr := serve(t, issue(t, a, decode), func(i Identity) bool { return i.Gateway || i.IsWorker(Prefill) })

	got, err := get(t, addr, issue(t, a, gateway), Only(decode))
	assert.NoError(t, err)
	assert.Equal(t, got, "bulkhead://gateway over HTTP/2")
	got, err = get(t, addr, issue(t, a, Worker(Prefill, epoch)), Only(decode))
	assert.NoError(t, err)
	assert.Equal(t, got, "bulkhead://worker/prefill/"+epoch.String()+" over HTTP/2")

	for name, c := range map[string]struct {
		creds Credentials
		want  Allow
	}{
		"another authority":    {issue(t, authority(t), gateway), Anyone},
		"role not allowed":     {issue(t, a, Worker(Decode, id.NewEpoch(time.Now()))), Anyone},
		"another epoch wanted": {issue(t, a, gateway), Only(Worker(Decode, id.NewEpoch(time.Now())))},
		"another role wanted":  {issue(t, a, gateway), Prefill.Allow},
	} {
		if _, err := get(t, addr, c.creds, c.want); err == nil {
			t.Errorf("%s: connected", name)
		}
	}
}

// Without a certificate, and over plain HTTP, nothing is served.
func TestStrangersAreRefused(t *testing.T) {
	t.Parallel()
	a := authority(t)
	addr := serve(t, issue(t, a, Gateway()), Anyone)
	_, where, err := SplitAddress(addr)
	assert.NoError(t, err)
	conn, err := tls.Dial("unix", where, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}})
	if err == nil {
		_, err = conn.Read(make([]byte, 1)) // TLS 1.3 tells after the handshake
		_ = conn.Close()
	}
	assert.True(t, err != nil)

	rec := &recorder{header: http.Header{}}
	Middleware(http.NotFoundHandler()).ServeHTTP(rec, &http.Request{})
	assert.Equal(t, rec.status, http.StatusForbidden)
}

type recorder struct {
	header http.Header
	status int
}

func (r *recorder) Header() http.Header         { return r.header }
func (r *recorder) Write(b []byte) (int, error) { return len(b), nil }
func (r *recorder) WriteHeader(status int)      { r.status = status }

func TestRequire(t *testing.T) {
	t.Parallel()
	ctx := NewContext(context.Background(), Worker(Prefill, epoch))
	who, err := Require(ctx, Prefill.Allow)
	assert.NoError(t, err)
	assert.Equal(t, who.Epoch, epoch)
	for _, ctx := range []context.Context{ctx, context.Background()} {
		_, err = Require(ctx, IsGateway)
		assert.Equal(t, connect.CodeOf(err), connect.CodePermissionDenied)
		assert.True(t, errors.Is(err, ErrIdentity))
	}
}

func TestCredentialsDoNotPrint(t *testing.T) {
	t.Parallel()
	c := issue(t, authority(t), Gateway())
	for _, f := range []string{"%v", "%+v", "%#v", "%s", "%d", "%x"} {
		assert.Equal(t, fmt.Sprintf(f, c), "REDACTED")
		assert.True(t, len(fmt.Sprintf(f, struct{ C Credentials }{c})) < 60)
	}
	who, err := c.Identity()
	assert.NoError(t, err)
	assert.Equal(t, who, Gateway())
}

func TestSplitAddress(t *testing.T) {
	t.Parallel()
	for in, want := range map[string][2]string{
		"unix:/a/b":        {"unix", "/a/b"},
		"tcp:127.0.0.1:80": {"tcp", "127.0.0.1:80"},
		"tcp:[::1]:80":     {"tcp", "[::1]:80"},
	} {
		n, w, err := SplitAddress(in)
		assert.NoError(t, err)
		assert.Equal(t, [2]string{n, w}, want)
	}
	for _, in := range []string{"", "unix:", "unix:a", "tcp:", "tcp:host", "udp:a:1", "/a", "http://x:1"} {
		_, _, err := SplitAddress(in)
		assert.ErrorIs(t, err, ErrAddress)
	}
}
