package fabric

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"path/filepath"
	"testing"
	"time"

	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/kv/kvtest"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
)

// server answers one connection after the other with a script, in place of a
// page server.
func server(t *testing.T, script func(c net.Conn)) *Client {
	t.Helper()
	l, err := Listen("unix:"+filepath.Join(t.TempDir(), "s"), nil)
	assert.NoError(t, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			script(c)
			_ = c.Close()
		}
	}()
	c, err := NewClient(Address(l), ClientOptions{StallTimeout: 2 * time.Second, StreamOnly: true})
	assert.NoError(t, err)
	t.Cleanup(func() {
		_ = c.Close()
		_ = l.Close()
		<-done
	})
	return c
}

const testPage = 64

func readReadRequest(from io.Reader) (readRequest, error) {
	kind, err := readPreamble(from)
	if err != nil {
		return readRequest{}, err
	}
	r, err := readBody(from, kind)
	return r.read, err
}

// memory is a sink; package fabrictest, which has a better one, imports this
// package.
type memory [][]byte

func (m memory) PageBytes() int                { return len(m[0]) }
func (m memory) Copy(i int, page []byte) error { copy(m[i], page); return nil }
func (m memory) Read(i int, stream io.Reader) error {
	_, err := io.ReadFull(stream, m[i])
	return err
}

// Every deviation of a server from the protocol, and what it is called. After
// each the connection must be gone, and the pages must not count as read.
func TestClientRefusesBadServers(t *testing.T) {
	t.Parallel()
	refs := []PageRef{{Index: 4, Generation: 9}, {Index: 5, Generation: 9}}
	page := bytes.Repeat([]byte{1}, testPage)
	ok := answerHeader{pageBytes: testPage, count: 2}.append(nil)
	pageAs := func(r PageRef, st status) []byte { return pageHeader{status: st, ref: r}.append(nil) }
	full := bytes.Join([][]byte{ok, pageAs(refs[0], 0), page, pageAs(refs[1], 0), page}, nil)
	version := bytes.Clone(full)
	version[4]++
	padding := bytes.Clone(full)
	padding[answerHeaderBytes+2]++
	for _, tc := range []struct {
		name   string
		answer []byte
		want   error
	}{
		{"good", full, nil},
		{"nothing", nil, ErrBroken},
		{"half a header", full[:7], ErrBroken},
		{"not a page stream", append([]byte("HTTP/1.1 400 Bad Request\r\n\r\n"), full...), ErrProtocol},
		{"other version", version, ErrProtocol},
		{"unknown status", answerHeader{status: numStatus}.append(nil), ErrProtocol},
		{"bad request", answerHeader{status: statusBad}.append(nil), ErrProtocol},
		{"refused", answerHeader{status: statusRefused}.append(nil), ErrRefused},
		{"refused with pages", answerHeader{status: statusRefused, count: 2, pageBytes: testPage}.append(nil), ErrProtocol},
		{"fewer pages", answerHeader{pageBytes: testPage, count: 1}.append(nil), ErrProtocol},
		{"more pages", answerHeader{pageBytes: testPage, count: 3}.append(nil), ErrProtocol},
		{"too many pages", answerHeader{pageBytes: testPage, count: maxRefs + 1}.append(nil), ErrProtocol},
		{"other page size", append(answerHeader{pageBytes: testPage * 2, count: 2}.append(nil), full[answerHeaderBytes:]...), ErrProtocol},
		{"nothing is lent here", answerHeader{status: statusNotShared}.append(nil), ErrNotShared},
		{"huge page size", answerHeader{pageBytes: maxPageBytes + 1, count: 2}.append(nil), ErrProtocol},
		{"died in the first page", full[:answerHeaderBytes+pageHeaderBytes+testPage/2], ErrBroken},
		{"died before the second page", full[:answerHeaderBytes+pageHeaderBytes+testPage], ErrBroken},
		{"died one byte early", full[:len(full)-1], ErrBroken},
		{"wrong page", bytes.Join([][]byte{ok, pageAs(refs[1], 0), page}, nil), ErrProtocol},
		{"wrong generation", bytes.Join([][]byte{ok, pageAs(PageRef{Index: 4, Generation: 10}, 0), page}, nil), ErrProtocol},
		{"stale page", bytes.Join([][]byte{ok, pageAs(refs[0], 0), page, pageAs(refs[1], statusStale)}, nil), ErrStale},
		{"refused page", bytes.Join([][]byte{ok, pageAs(refs[0], statusRefused)}, nil), ErrRefused},
		{"padding", padding, ErrProtocol},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			c := server(t, func(c net.Conn) {
				if _, err := readReadRequest(c); err == nil {
					_, _ = c.Write(tc.answer)
				}
			})
			memory := memory{make([]byte, testPage), make([]byte, testPage)}
			err := c.ReadPages(t.Context(), id.Transfer{1}, Secret{2}, refs, memory)
			if tc.want == nil {
				assert.NoError(t, err)
				assert.Equal(t, [][]byte(memory), [][]byte{page, page})
				return
			}
			assert.ErrorIs(t, err, tc.want)
			if len(c.idle) > 0 && tc.name != "refused" && tc.name != "nothing is lent here" {
				t.Error("a connection was kept after an exchange that did not end as it should")
			}
		})
	}
}

// A server that stands still is given up, and so is a read whose caller gives
// up; both leave no connection behind.
func TestClientGivesUp(t *testing.T) {
	t.Parallel()
	c := server(t, func(c net.Conn) {
		_, _ = readReadRequest(c)
		_, _ = c.Write(answerHeader{pageBytes: testPage, count: 1}.append(nil))
		_, _ = io.Copy(io.Discard, c) // until the client goes
	})
	refs := []PageRef{{Index: 1, Generation: 1}}
	into := memory{make([]byte, testPage)}
	c.opts.StallTimeout = 20 * time.Millisecond
	assert.ErrorIs(t, c.ReadPages(t.Context(), id.Transfer{}, Secret{}, refs, into), ErrBroken)
	c.opts.StallTimeout = time.Minute
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	assert.ErrorIs(t, c.ReadPages(ctx, id.Transfer{}, Secret{}, refs, into), context.DeadlineExceeded)
	assert.Equal(t, len(c.idle), 0)
	assert.NoError(t, c.Close())
	assert.ErrorIs(t, c.ReadPages(t.Context(), id.Transfer{}, Secret{}, refs, into), ErrClosed)
}

// A connection that the server closed while it was idle costs a new one, not an
// error. One that broke in the middle of an answer is not tried again.
func TestClientReconnects(t *testing.T) {
	t.Parallel()
	conns := 0
	page := make([]byte, testPage)
	c := server(t, func(c net.Conn) {
		conns++
		r, err := readReadRequest(c)
		if err != nil {
			return
		}
		_, _ = c.Write(append(pageHeader{ref: r.refs[0]}.append(answerHeader{pageBytes: testPage, count: 1}.append(nil)), page...))
	})
	for range 3 {
		assert.NoError(t, c.ReadPages(t.Context(), id.Transfer{}, Secret{}, make([]PageRef, 1), memory{page}))
	}
	assert.Equal(t, conns, 3)
}

func TestConnectionsAreReused(t *testing.T) {
	t.Parallel()
	p := kvtest.Pool(t, kv.Config{})
	s := kvtest.Sealed(t, p, kvtest.Owner(1), 30, 1)
	defer s.Release()
	srv := NewServer(ServerOptions{})
	assert.NoError(t, srv.Open(id.Transfer{1}, Secret{2}, s))
	l, err := Listen("unix:"+filepath.Join(t.TempDir(), "s"), nil)
	assert.NoError(t, err)
	counted := &countingListener{Listener: l}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- srv.Serve(ctx, counted) }()
	c, err := Dial(Address(l), nil)
	assert.NoError(t, err)
	defer c.Close()
	size := p.Geometry().PageBytes()
	into := memory{make([]byte, size), make([]byte, size)}
	for range 5 {
		assert.NoError(t, c.ReadPages(t.Context(), id.Transfer{1}, Secret{2}, kvtest.Refs(s.Extents()), into))
		// A refusal is an exchange that ended as it should.
		assert.ErrorIs(t, c.ReadPages(t.Context(), id.Transfer{1}, Secret{3}, kvtest.Refs(s.Extents()), into), ErrRefused)
	}
	cancel()
	assert.NoError(t, <-done)
	assert.Equal(t, counted.n, 1)
}

type countingListener struct {
	net.Listener
	n int
}

func (l *countingListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err == nil {
		l.n++
	}
	return c, err
}

// A peer that asks and then does not read holds a page open: that page is
// quarantined when its owner goes, and free when the exchange is ended.
func TestStalledPeerHoldsAPage(t *testing.T) {
	t.Parallel()
	// Bigger than what the socket buffers.
	p := kvtest.Pool(t, kv.Config{Pages: 1, Geometry: kv.Geometry{Layers: 64, KVHeads: 8, HeadDim: 64, PageTokens: 16, DType: kv.F32, Layout: 1}})
	s := kvtest.Sealed(t, p, kvtest.Owner(1), 1, 1)
	srv := NewServer(ServerOptions{StallTimeout: time.Minute})
	assert.NoError(t, srv.Open(id.Transfer{1}, Secret{2}, s))
	l, err := Listen("unix:"+filepath.Join(t.TempDir(), "s"), nil)
	assert.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- srv.Serve(ctx, slowListener{l}) }()
	c, err := net.Dial("unix", l.Addr().String())
	assert.NoError(t, err)
	defer c.Close()
	_, err = c.Write(readRequest{transfer: id.Transfer{1}, secret: Secret{2}, refs: kvtest.Refs(s.Extents())}.append(nil))
	assert.NoError(t, err)
	for p.Page(0).Readers == 0 {
		time.Sleep(time.Millisecond)
	}
	srv.Withdraw(id.Transfer{1})
	s.Release()
	assert.Equal(t, p.Page(0).State, kv.StateQuarantined)
	assert.Equal(t, p.Page(0).Reason, kv.ReaderOpen)
	cancel() // closes the connection; Serve returns when nobody serves any more
	assert.NoError(t, <-done)
	assert.Equal(t, p.Page(0).State, kv.StateDirty)
}

// slowListener gives connections on which a write that fails takes its time to
// say so.
type slowListener struct{ net.Listener }

func (l slowListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	return slowConn{c}, err
}

type slowConn struct{ net.Conn }

func (c slowConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	if err != nil {
		time.Sleep(50 * time.Millisecond)
	}
	return n, err
}

// What clients can send that is not a request gets a refusal and the end of the
// connection.
func TestServerRefusesBadRequests(t *testing.T) {
	t.Parallel()
	good := readRequest{refs: make([]PageRef, 2)}.append(nil)
	mutate := func(at int, v byte) []byte {
		b := bytes.Clone(good)
		b[at] = v
		return b
	}
	for name, b := range map[string][]byte{
		"magic": mutate(0, 'X'), "version": mutate(4, 9), "kind": mutate(6, 9), "done with nothing": mutate(6, kindDone),
		"no pages": mutate(56, 0), "too many pages": mutate(58, 9),
	} {
		_, err := readReadRequest(bytes.NewReader(b))
		if !errors.Is(err, ErrProtocol) {
			t.Errorf("%s: %v", name, err)
		}
	}
	_, err := readReadRequest(bytes.NewReader(good[:len(good)-1]))
	assert.ErrorIs(t, err, io.ErrUnexpectedEOF)
	_, err = readReadRequest(bytes.NewReader(good[:readHeaderBytes]))
	assert.ErrorIs(t, err, io.ErrUnexpectedEOF)

	srv := NewServer(ServerOptions{})
	here, there := net.Pipe()
	done := make(chan struct{})
	go func() { srv.serveConn(&line{Conn: there}); _ = there.Close(); close(done) }()
	go func() { _, _ = here.Write(mutate(4, 9)) }()
	head, err := readAnswerHeader(here)
	assert.NoError(t, err)
	assert.Equal(t, head.status, statusBad)
	<-done
	_ = here.Close()
}

func TestAddresses(t *testing.T) {
	t.Parallel()
	for _, a := range []string{"", "unix", "unix:", "unix:relative", "udp:1.2.3.4:5", "/path", "tcp:"} {
		_, err := Dial(a, nil)
		assert.ErrorIs(t, err, ErrAddress)
		_, err = Listen(a, nil)
		assert.ErrorIs(t, err, ErrAddress)
	}
}

// Whatever arrives, parsing ends, and what parses is what would be sent for it.
func FuzzReadRequest(f *testing.F) {
	f.Add(readRequest{transfer: id.Transfer{1}, secret: Secret{2}, refs: []PageRef{{Index: 3, Generation: 4}, {Index: 5, Generation: 6}}}.append(nil))
	f.Add([]byte("BHKF"))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := readReadRequest(bytes.NewReader(b))
		if err != nil {
			return
		}
		if out := r.append(nil); !bytes.Equal(out, b[:len(out)]) {
			t.Fatalf("read %x, would write %x", b, out)
		}
	})
}

func FuzzReadAnswer(f *testing.F) {
	f.Add(pageHeader{ref: PageRef{Index: 3, Generation: 4}}.append(answerHeader{pageBytes: 1, count: 1}.append(nil)))
	f.Fuzz(func(t *testing.T, b []byte) {
		from := bytes.NewReader(b)
		h, err := readAnswerHeader(from)
		if err != nil {
			return
		}
		out := h.append(nil)
		if p, err := readPageHeader(from); err == nil {
			out = p.append(out)
		}
		if !bytes.Equal(out, b[:len(out)]) {
			t.Fatalf("read %x, would write %x", b, out)
		}
	})
}
