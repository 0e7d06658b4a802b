package httpx

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/tenancy"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type counts struct{ routes []string }

func (c *counts) Request(route, code string, _ time.Duration) {
	c.routes = append(c.routes, route+" "+code)
}
func (c *counts) Unauthenticated() {}

func fail(w http.ResponseWriter, _ *http.Request, e *apperr.Error) { http.Error(w, e.Message, 500) }

func TestSlowBody(t *testing.T) {
	t.Parallel()
	e := &Edge{Log: slog.New(slog.DiscardHandler), Now: time.Now, Observer: &counts{}, BodyTimeout: 100 * time.Millisecond}
	after := make(chan error, 1)
	ts := httptest.NewServer(e.Wrap(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, err := io.ReadAll(r.Body)
		if err != nil {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		// The deadline of the body is not one of the answer.
		select {
		case <-r.Context().Done():
			after <- r.Context().Err()
		case <-time.After(300 * time.Millisecond):
			after <- nil
		}
	}), fail))
	defer ts.Close()
	c, err := net.Dial("tcp", ts.Listener.Addr().String())
	assert.NoError(t, err)
	defer c.Close()
	_, err = io.WriteString(c, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nabc")
	assert.NoError(t, err)
	b := make([]byte, 100)
	assert.NoError(t, c.SetReadDeadline(time.Now().Add(5*time.Second)))
	n, err := c.Read(b)
	assert.NoError(t, err)
	assert.True(t, strings.Contains(string(b[:n]), "400"))

	res, err := http.Post(ts.URL, "", strings.NewReader("abc"))
	assert.NoError(t, err)
	_ = res.Body.Close()
	assert.NoError(t, <-after)
	http.DefaultClient.CloseIdleConnections()
}

func TestListenIsSafe(t *testing.T) {
	t.Parallel()
	for addr, ok := range map[string]bool{"127.0.0.1:0": true, "[::1]:0": true, "localhost:0": true, "0.0.0.0:0": false, ":0": false} {
		l, err := Listen(addr, ServerOptions{})
		if l != nil {
			_ = l.Close()
		}
		if strings.HasPrefix(addr, "[::1]") && err != nil && !errors.Is(err, ErrUnsafeListen) {
			continue // a machine without IPv6
		}
		assert.Equal(t, err == nil, ok)
		assert.Equal(t, errors.Is(err, ErrUnsafeListen), !ok)
	}
	l, err := Listen("0.0.0.0:0", ServerOptions{BehindProxy: true})
	assert.NoError(t, err)
	_ = l.Close()
}

func TestClientIP(t *testing.T) {
	t.Parallel()
	proxies := []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}
	for name, c := range map[string]struct{ remote, header, want string }{
		"direct":                {"192.0.2.1:5", "", "192.0.2.1"},
		"a claim of the client": {"192.0.2.1:5", "203.0.113.9", "192.0.2.1"},
		"behind a proxy":        {"10.0.0.1:5", "203.0.113.9", "203.0.113.9"},
		"two proxies":           {"10.0.0.1:5", "203.0.113.9, 10.0.0.2", "203.0.113.9"},
		"a claim, then a proxy": {"10.0.0.1:5", "1.1.1.1, 203.0.113.9", "203.0.113.9"},
		"nonsense":              {"10.0.0.1:5", "unknown", "10.0.0.1"},
	} {
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.RemoteAddr = c.remote
		if c.header != "" {
			r.Header.Set("X-Forwarded-For", c.header)
		}
		if got := ClientIP(r, proxies).String(); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}

type keys struct{ err error }

func (k keys) Authenticate(context.Context, string) (tenancy.Principal, error) {
	return tenancy.Principal{}, k.err
}

func TestEdge(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	c := &counts{}
	e := &Edge{Log: slog.New(slog.NewJSONHandler(&log, nil)), Now: time.Now, Observer: c}
	h := e.Wrap(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		InfoFrom(r.Context()).Route = "x"
		panic("hunter2")
	}), fail)
	rec := httptest.NewRecorder()
	r := httptest.NewRequest(http.MethodPost, "/hunter2", nil)
	r.Header.Set("X-Request-Id", "mine")
	h.ServeHTTP(rec, r)
	assert.Equal(t, rec.Code, 500)
	assert.True(t, strings.HasPrefix(rec.Header().Get("X-Request-Id"), "req_"))
	assert.False(t, strings.Contains(log.String()+rec.Body.String(), "hunter2"))
	assert.Equal(t, c.routes, []string{"x 500"})
	down := apperr.New(apperr.Unavailable, "x", "y")
	h = e.Wrap(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		assert.ErrorIs(t, e.Authenticate(r, keys{down}), down)
	}), fail)
	r.Header.Set("Authorization", "bearer k")
	h.ServeHTTP(httptest.NewRecorder(), r)
}
