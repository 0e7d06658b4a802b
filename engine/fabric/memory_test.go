package fabric

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/kv/kvtest"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
)

// shop is a server that lends the pages of one offer, and a client.
type shop struct {
	pool   *kv.Pool
	sealed *kv.Sealed
	refs   []PageRef
	server *Server
	addr   string
	client *Client
	stop   func() error // ends Serve and waits for it
}

var (
	theTransfer = id.Transfer{1}
	theSecret   = Secret{2}
)

type shopOptions struct {
	wrap   func(net.Listener) net.Listener
	server func(*Server) // before it serves
}

func newShop(t *testing.T, tokens int, o shopOptions) *shop {
	t.Helper()
	s := &shop{pool: kvtest.Pool(t, kv.Config{Pages: 160, Memory: kv.Memfd})}
	s.sealed = kvtest.Sealed(t, s.pool, kvtest.Owner(1), tokens, 1)
	t.Cleanup(s.sealed.Release)
	s.refs = kvtest.Refs(s.sealed.Extents())
	s.server = NewServer(ServerOptions{Arena: s.pool, StallTimeout: time.Minute})
	assert.NoError(t, s.server.Open(theTransfer, theSecret, s.sealed))
	l, err := Listen("unix:"+filepath.Join(t.TempDir(), "s"), nil)
	assert.NoError(t, err)
	s.addr = Address(l)
	if o.wrap != nil {
		l = o.wrap(l)
	}
	if o.server != nil {
		o.server(s.server)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done, over := make(chan error, 1), false
	go func() { done <- s.server.Serve(ctx, l) }()
	s.stop = func() error {
		cancel()
		if over {
			return nil
		}
		over = true
		return <-done
	}
	t.Cleanup(func() { assert.NoError(t, s.stop()) })
	s.client, err = Dial(s.addr, nil)
	assert.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, s.client.Close()) })
	return s
}

func (s *shop) read(ctx context.Context, into Sink) error {
	return s.client.ReadPages(ctx, theTransfer, theSecret, s.refs, into)
}

func (s *shop) memory() memory {
	m := make(memory, len(s.refs))
	for i := range m {
		m[i] = make([]byte, s.pool.Geometry().PageBytes())
	}
	return m
}

// release ends the offer, as a leg does that needs its pages no more.
func (s *shop) release() {
	s.server.Withdraw(theTransfer)
	s.sealed.Release()
}

// freed waits until the first page is free; it was held before.
func (s *shop) freed(t *testing.T) {
	t.Helper()
	for !s.pool.Page(s.refs[0].Index).State.Free() {
		if t.Context().Err() != nil {
			t.Fatal("the page is still held")
		}
		time.Sleep(time.Millisecond)
	}
}

// held checks that the first page is in quarantine because of a reader.
func (s *shop) held(t *testing.T) {
	t.Helper()
	page := s.pool.Page(s.refs[0].Index)
	assert.Equal(t, page.State, kv.StateQuarantined)
	assert.Equal(t, page.Reason, kv.ReaderOpen)
}

// each is a sink that calls a function with every page.
type each struct {
	memory
	f func(i int, page []byte) error
}

func (e each) Copy(i int, page []byte) error { return e.f(i, page) }

// borrow does what a client does up to the copy, over a plain connection.
func (s *shop) borrow(t *testing.T, refs []PageRef) (net.Conn, answerHeader) {
	t.Helper()
	c, err := net.Dial("unix", s.addr[len("unix:"):])
	assert.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	_, err = c.Write(appendPreamble(nil, kindMap))
	assert.NoError(t, err)
	g, err := readGrant(c)
	assert.NoError(t, err)
	_, err = c.Write(appendLend(nil, g.mem, readRequest{transfer: theTransfer, secret: theSecret, refs: refs}))
	assert.NoError(t, err)
	head, err := readAnswerHeader(c)
	assert.NoError(t, err)
	if head.status == statusOK {
		_, err = readOffsets(c, int(head.count), int(head.pageBytes), s.pool.Arena().Bytes)
		assert.NoError(t, err)
	}
	return c, head
}

// More pages than may be lent at once, and no more are.
func TestLoansAreBounded(t *testing.T) {
	t.Parallel()
	s := newShop(t, 150*kv.PageTokens, shopOptions{})
	into, most := s.memory(), 0
	assert.NoError(t, s.read(t.Context(), each{into, func(i int, page []byte) error {
		most = max(most, s.server.Lent())
		return into.Copy(i, page)
	}}))
	assert.Equal(t, most, maxLent)
	assert.Equal(t, s.client.Transport(), SharedMemory)
	assert.NoError(t, s.client.WhyNotShared())
	for i, r := range s.refs {
		assert.NoError(t, s.sealed.View(r, func(page []byte) error {
			if !bytes.Equal(page, into[i]) {
				return fmt.Errorf("page %d differs", i)
			}
			return nil
		}))
	}
	_, err := readBody(bytes.NewReader(appendLend(nil, memoryID{}, readRequest{refs: make([]PageRef, maxLent+1)})[preambleBytes:]), kindLend)
	assert.ErrorIs(t, err, ErrProtocol)
}

// What ends a loan, and what does not.
func TestLoanEndsByProofOnly(t *testing.T) {
	t.Parallel()
	one := func(t *testing.T, o shopOptions) (*shop, net.Conn) {
		s := newShop(t, 1, o)
		c, head := s.borrow(t, s.refs)
		assert.Equal(t, head.status, statusOK)
		s.release()
		s.held(t)
		assert.Equal(t, s.server.Lent(), 1)
		return s, c
	}
	t.Run("done", func(t *testing.T) {
		t.Parallel()
		s, c := one(t, shopOptions{})
		_, err := c.Write(appendPreamble(nil, kindDone))
		assert.NoError(t, err)
		st, err := readPreamble(c)
		assert.NoError(t, err)
		assert.Equal(t, status(st), statusOK)
		assert.Equal(t, s.server.Lent(), 0)
		assert.True(t, s.pool.Page(s.refs[0].Index).State.Free())
		// The connection is good for more.
		_, err = c.Write(appendPreamble(nil, kindMap))
		assert.NoError(t, err)
		_, err = readGrant(c)
		assert.NoError(t, err)
	})
	t.Run("the reader closes", func(t *testing.T) {
		t.Parallel()
		s, c := one(t, shopOptions{})
		assert.NoError(t, c.Close())
		s.freed(t)
	})
	t.Run("the reader dies in the middle of a word", func(t *testing.T) {
		t.Parallel()
		s, c := one(t, shopOptions{})
		_, err := c.Write([]byte("BH"))
		assert.NoError(t, err)
		assert.NoError(t, c.Close())
		s.freed(t)
	})
	t.Run("not by time", func(t *testing.T) {
		t.Parallel()
		spy := &spyListener{conns: make(chan *spyConn, 8)}
		s, c := one(t, shopOptions{wrap: func(l net.Listener) net.Listener { spy.Listener = l; return spy }})
		assert.True(t, (<-spy.conns).lastRead().IsZero())
		assert.NoError(t, c.Close())
		s.freed(t)
	})
	t.Run("not by noise", func(t *testing.T) {
		t.Parallel()
		for _, noise := range [][]byte{[]byte("what is this"), appendPreamble(nil, kindMap), readRequest{refs: make([]PageRef, 1)}.append(nil)} {
			s, c := one(t, shopOptions{})
			// More than the socket buffers, so that the server must have read.
			_, err := c.Write(bytes.Repeat(noise, 1<<20/len(noise)))
			assert.NoError(t, err)
			s.held(t)
			_, err = c.Write(appendPreamble(nil, kindDone)) // too late to be believed
			assert.NoError(t, err)
			s.held(t)
			assert.NoError(t, c.Close())
			s.freed(t)
		}
	})
	t.Run("not by the end of the server", func(t *testing.T) {
		t.Parallel()
		// A pool of its own, because it will never be empty again.
		pool, err := kv.New(kv.Config{Geometry: kvtest.Geometry(), Pages: 1, Memory: kv.Memfd})
		assert.NoError(t, err)
		sealed := kvtest.Sealed(t, pool, kvtest.Owner(1), 1, 1)
		srv := NewServer(ServerOptions{Arena: pool})
		srv.grace = 10 * time.Millisecond
		assert.NoError(t, srv.Open(theTransfer, theSecret, sealed))
		l, err := Listen("unix:"+filepath.Join(t.TempDir(), "s"), nil)
		assert.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- srv.Serve(ctx, l) }()
		s := &shop{pool: pool, sealed: sealed, server: srv, refs: kvtest.Refs(sealed.Extents()), addr: Address(l)}
		c, _ := s.borrow(t, s.refs)
		s.release()
		cancel()
		assert.NoError(t, <-done)
		s.held(t)
		assert.NoError(t, c.Close())
		s.held(t)
		assert.Equal(t, srv.Lent(), 1)
		assert.ErrorIs(t, pool.Close(), kv.ErrBusy)
	})
	t.Run("given back while the server ends", func(t *testing.T) {
		t.Parallel()
		s, c := one(t, shopOptions{server: func(s *Server) { s.grace = time.Minute }})
		ended := make(chan error)
		go func() { ended <- s.stop() }()
		for { // until the server has begun to end
			other, err := net.Dial("unix", s.addr[len("unix:"):])
			if err != nil {
				break
			}
			_ = other.Close()
		}
		_, err := c.Write(appendPreamble(nil, kindDone))
		assert.NoError(t, err)
		assert.NoError(t, <-ended)
		s.freed(t)
	})
}

// spyListener gives unix connections that remember their read deadline.
type spyListener struct {
	net.Listener
	conns chan *spyConn
}

func (l *spyListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	s := &spyConn{Conn: c, last: make(chan time.Time, 64)}
	l.conns <- s
	return s, nil
}

type spyConn struct {
	net.Conn
	last chan time.Time
}

func (c *spyConn) NetConn() net.Conn { return c.Conn }

func (c *spyConn) SetDeadline(t time.Time) error {
	c.last <- t
	return c.Conn.SetDeadline(t)
}

func (c *spyConn) SetReadDeadline(t time.Time) error {
	c.last <- t
	return c.Conn.SetReadDeadline(t)
}

func (c *spyConn) lastRead() (t time.Time) {
	for {
		select {
		case t = <-c.last:
		default:
			return t
		}
	}
}

// Whoever is refused a loan holds nothing.
func TestLendRefuses(t *testing.T) {
	t.Parallel()
	s := newShop(t, 20, shopOptions{})
	_, head := s.borrow(t, []PageRef{s.refs[0], {Index: s.refs[1].Index, Generation: 77}})
	assert.Equal(t, head.status, statusStale)
	_, head = s.borrow(t, []PageRef{s.refs[0], {Index: 9, Generation: s.refs[0].Generation}})
	assert.Equal(t, head.status, statusRefused)
	assert.Equal(t, s.server.Lent(), 0)
	assert.Equal(t, s.pool.Page(s.refs[0].Index).Readers, 0)
	// Offsets into another memory would be offsets into anything.
	assert.NoError(t, s.read(t.Context(), s.memory()))
	s.client.mapped.id[3]++
	assert.ErrorIs(t, s.read(t.Context(), s.memory()), ErrNotShared)
	// Pages of another pool are not in this memory.
	other := kvtest.Pool(t, kv.Config{Memory: kv.Memfd})
	foreign := kvtest.Sealed(t, other, kvtest.Owner(1), 20, 1)
	defer foreign.Release()
	s.server.Withdraw(theTransfer)
	assert.NoError(t, s.server.Open(theTransfer, theSecret, foreign))
	_, head = s.borrow(t, kvtest.Refs(foreign.Extents()))
	assert.Equal(t, head.status, statusRefused)
}

// When a read has returned nothing of it is held: who releases the pages then
// gets them at once.
func TestReadLeavesNothingHeld(t *testing.T) {
	t.Parallel()
	for range 50 {
		s := newShop(t, 20, shopOptions{})
		assert.NoError(t, s.read(t.Context(), s.memory()))
		s.release()
		assert.Equal(t, s.pool.Stats().Free, s.pool.Stats().Pages)
		assert.NoError(t, s.stop())
	}
}

// A context that ends does not end the loan under a copy.
func TestCancelWaitsForTheCopy(t *testing.T) {
	t.Parallel()
	s := newShop(t, 20, shopOptions{})
	ctx, cancel := context.WithCancel(t.Context())
	copies := 0
	err := s.read(ctx, each{s.memory(), func(int, []byte) error {
		copies++
		s.release()
		cancel()
		// Long enough for what a connection that is closed sets off.
		for range 50 {
			s.held(t)
			time.Sleep(time.Millisecond)
		}
		return nil
	}})
	assert.ErrorIs(t, err, context.Canceled)
	assert.Equal(t, copies, 1)
	s.freed(t)
	assert.Equal(t, len(s.client.idle), 0)
}

// A sink that panics has stopped copying when the loan ends.
func TestLoanEndsAfterAPanic(t *testing.T) {
	t.Parallel()
	s := newShop(t, 20, shopOptions{})
	func() {
		defer func() { assert.Equal(t, recover(), any("sink")) }()
		_ = s.read(t.Context(), each{s.memory(), func(int, []byte) error {
			s.release()
			panic("sink")
		}})
	}()
	s.freed(t)
	assert.Equal(t, len(s.client.idle), 0)
}

// A client that is closed keeps what a read in flight has mapped.
func TestCloseDuringACopy(t *testing.T) {
	t.Parallel()
	s := newShop(t, 40, shopOptions{})
	into := s.memory()
	var m *mapping
	assert.NoError(t, s.read(t.Context(), each{into, func(i int, page []byte) error {
		if m == nil {
			m = s.client.mapped
		}
		assert.NoError(t, s.client.Close())
		return into.Copy(i, page)
	}}))
	assert.NoError(t, s.sealed.View(s.refs[2], func(page []byte) error {
		assert.Equal(t, into[2], page)
		return nil
	}))
	assert.True(t, m.bytes == nil)
	assert.ErrorIs(t, s.read(t.Context(), into), ErrClosed)
}

// Where memory cannot be shared, pages come by the stream, and the client says
// why.
func TestFallsBackToTheStream(t *testing.T) {
	t.Parallel()
	other := func(*net.UnixConn) (int, error) { return os.Geteuid() + 1, nil }
	for name, tc := range map[string]struct {
		server func(*Server)
		client func(*shop)
		want   error // nil: any
	}{
		"server of another user": {client: func(s *shop) { s.client.uid = other }, want: errUser},
		"server of somebody":     {client: func(s *shop) { s.client.uid = func(*net.UnixConn) (int, error) { return 0, unix.EINVAL } }, want: unix.EINVAL},
		"client of another user": {server: func(s *Server) { s.uid = other }},
		"nothing to share":       {server: func(s *Server) { s.arena = nil }, want: ErrNotShared},
		"nobody at the other end": {client: func(s *shop) {
			for os.Remove(s.addr[len("unix:"):]+handSuffix) != nil {
				time.Sleep(time.Millisecond) // Serve has not made it yet
			}
		}, want: unix.ENOENT},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newShop(t, 20, shopOptions{server: tc.server})
			if tc.client != nil {
				tc.client(s)
			}
			for range 2 {
				into := s.memory()
				assert.NoError(t, s.read(t.Context(), into))
				assert.NoError(t, s.sealed.View(s.refs[1], func(page []byte) error {
					assert.Equal(t, into[1], page)
					return nil
				}))
				assert.Equal(t, s.client.Transport(), Unix)
				if err := s.client.WhyNotShared(); err == nil || tc.want != nil && !errors.Is(err, tc.want) {
					t.Errorf("reason is %v, want %v", err, tc.want)
				}
			}
			assert.Equal(t, s.server.Lent(), 0)
		})
	}
	// Anonymous memory has no descriptor, and TCP may come from anywhere.
	private := kvtest.Pool(t, kv.Config{})
	shared := kvtest.Pool(t, kv.Config{Memory: kv.Memfd})
	for _, tc := range []struct {
		pool *kv.Pool
		addr string
	}{{private, "unix:" + filepath.Join(t.TempDir(), "s")}, {shared, "tcp:127.0.0.1:0"}} {
		l, err := Listen(tc.addr, nil)
		assert.NoError(t, err)
		h, err := NewServer(ServerOptions{Arena: tc.pool}).share(l)
		assert.NoError(t, err)
		assert.True(t, h == nil)
		assert.NoError(t, l.Close())
	}
}

// A server that cannot hand its memory out any more says so, like one that
// cannot accept reads.
func TestServeFailsWithItsHandover(t *testing.T) {
	t.Parallel()
	s := newShop(t, 1, shopOptions{})
	assert.NoError(t, s.stop())
	l, err := Listen(s.addr, nil)
	assert.NoError(t, err)
	dead := errors.New("out of descriptors")
	assert.ErrorIs(t, s.server.Serve(t.Context(), failsOnce{l, dead}), dead)
	l, err = Listen(s.addr, nil)
	assert.NoError(t, err)
	h, err := s.server.share(l)
	assert.NoError(t, err)
	assert.NoError(t, h.l.Close())
	assert.ErrorIs(t, h.serve(t.Context()), net.ErrClosed)
	h.close()
	// And two cannot listen at one place.
	taken, err := Listen(s.addr+handSuffix, nil)
	assert.NoError(t, err)
	defer taken.Close()
	assert.ErrorIs(t, s.server.Serve(t.Context(), l), unix.EADDRINUSE)
}

type failsOnce struct {
	net.Listener
	err error
}

func (f failsOnce) Accept() (net.Conn, error) { return nil, f.err }

// A token is good once, for the last that asked on a connection, and as long as
// that connection is open.
func TestTokens(t *testing.T) {
	t.Parallel()
	s := newShop(t, 1, shopOptions{})
	c, err := net.Dial("unix", s.addr[len("unix:"):])
	assert.NoError(t, err)
	defer c.Close()
	ask := func() grant {
		_, err := c.Write(appendPreamble(nil, kindMap))
		assert.NoError(t, err)
		g, err := readGrant(c)
		assert.NoError(t, err)
		return g
	}
	get := func(g grant) error {
		f, err := take(t.Context(), g, time.Now, peerUID)
		if err == nil {
			err = f.Close()
		}
		return err
	}
	g := ask()
	assert.Equal(t, g.size, uint64(s.pool.Arena().Bytes))
	assert.NoError(t, get(g))
	assert.True(t, get(g) != nil)
	first, second := ask(), ask()
	assert.True(t, get(first) != nil)
	wrong := second
	wrong.token[0]++
	assert.True(t, get(wrong) != nil)
	assert.True(t, get(grant{path: g.path}) != nil)
	assert.NoError(t, get(second))
	last := ask()
	assert.NoError(t, c.Close())
	// Whoever closed the connection cannot tell when the server has noticed;
	// when it has, the token is worthless.
	assert.NoError(t, s.stop())
	assert.True(t, get(last) != nil)
}

// The end of a connection takes its token with it.
func TestTokenEndsWithItsConnection(t *testing.T) {
	t.Parallel()
	h := &handover{valid: map[token]bool{}}
	here, there := net.Pipe()
	x := &line{Conn: there, hand: h, tok: h.issue()}
	assert.Equal(t, len(h.valid), 1)
	x.hangUp()
	assert.Equal(t, len(h.valid), 0)
	assert.NoError(t, here.Close())
}

// Memory is mapped only if nobody can cut it off or write it from now on.
func TestMapMemoryChecks(t *testing.T) {
	t.Parallel()
	const size = 8192
	mem, err := mapMemory(memfd(t, size, wantSeals), size)
	assert.NoError(t, err)
	assert.Equal(t, len(mem), size)
	assert.ErrorIs(t, unix.Mprotect(mem, unix.PROT_READ|unix.PROT_WRITE), unix.EACCES)
	assert.NoError(t, unix.Munmap(mem))

	for _, missing := range []int{unix.F_SEAL_SHRINK, unix.F_SEAL_GROW, unix.F_SEAL_FUTURE_WRITE} {
		_, err = mapMemory(memfd(t, size, wantSeals&^missing), size)
		assert.ErrorIs(t, err, errMemory)
	}
	for _, n := range []uint64{size - 4096, size + 4096, 1 << 40} {
		_, err = mapMemory(memfd(t, size, wantSeals), n)
		assert.ErrorIs(t, err, errMemory)
	}
	plain, err := os.Create(filepath.Join(t.TempDir(), "f"))
	assert.NoError(t, err)
	defer plain.Close()
	assert.NoError(t, plain.Truncate(size))
	_, err = mapMemory(plain, size)
	assert.ErrorIs(t, err, errMemory)
}

// The message with the descriptor carries exactly one.
func TestDescriptor(t *testing.T) {
	t.Parallel()
	open := func() int {
		fd, err := unix.MemfdCreate("x", unix.MFD_CLOEXEC)
		assert.NoError(t, err)
		return fd
	}
	f, err := descriptor(1, unix.UnixRights(open()), 0)
	assert.NoError(t, err)
	assert.NoError(t, f.Close())
	for name, tc := range map[string]struct {
		n     int
		oob   []byte
		flags int
	}{
		"none":      {1, nil, 0},
		"two":       {1, unix.UnixRights(open(), open()), 0},
		"no byte":   {0, unix.UnixRights(open()), 0},
		"truncated": {1, unix.UnixRights(open()), unix.MSG_CTRUNC},
		"garbage":   {1, []byte{1, 2, 3}, 0},
	} {
		if _, err := descriptor(tc.n, tc.oob, tc.flags); !errors.Is(err, ErrProtocol) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Every deviation of a server that lends pages from the protocol.
func TestBorrowerRefusesBadServers(t *testing.T) {
	t.Parallel()
	const size = 4096
	refs := []PageRef{{Index: 4, Generation: 9}, {Index: 5, Generation: 9}}
	good := appendLoan(nil, testPage, []int64{0, size - testPage})
	for name, tc := range map[string]struct {
		answer []byte
		want   error
		keep   bool
		end    []byte // the answer to done
	}{
		"good":             {good, nil, true, appendPreamble(nil, uint16(statusOK))},
		"no end":           {good, ErrBroken, false, nil},
		"bad end":          {good, ErrProtocol, false, appendPreamble(nil, uint16(statusStale))},
		"nothing":          {nil, ErrBroken, false, nil},
		"half of it":       {good[:len(good)-1], ErrBroken, false, nil},
		"no offsets":       {good[:answerHeaderBytes], ErrBroken, false, nil},
		"beyond the end":   {appendLoan(nil, testPage, []int64{0, size - testPage + 1}), ErrProtocol, false, nil},
		"before the start": {appendLoan(nil, testPage, []int64{-1, 0}), ErrProtocol, false, nil},
		"fewer":            {appendLoan(nil, testPage, []int64{0}), ErrProtocol, false, nil},
		"other page size":  {appendLoan(nil, 2*testPage, []int64{0, 0}), ErrProtocol, false, nil},
		"refused":          {answerHeader{status: statusRefused}.append(nil), ErrRefused, true, nil},
		"stale":            {answerHeader{status: statusStale}.append(nil), ErrStale, true, nil},
		"not shared":       {answerHeader{status: statusNotShared}.append(nil), ErrNotShared, true, nil},
		"bad request":      {answerHeader{status: statusBad}.append(nil), ErrProtocol, false, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			backing := memfd(t, size, wantSeals)
			_, err := backing.WriteAt(bytes.Repeat([]byte{7}, testPage), 0)
			assert.ErrorIs(t, err, unix.EPERM) // sealed: pages stay zero
			gone := make(chan string, 8)
			c := server(t, func(c net.Conn) {
				if kind, err := readPreamble(c); err != nil || kind != kindLend {
					return
				}
				if _, err := readBody(c, kindLend); err != nil {
					return
				}
				_, _ = c.Write(tc.answer)
				if kind, err := readPreamble(c); err == nil && kind == kindDone {
					gone <- "done"
					_, _ = c.Write(tc.end)
				} else {
					gone <- "closed"
				}
			})
			mem, err := mapMemory(backing, size)
			assert.NoError(t, err)
			c.opts.StreamOnly, c.opts.StallTimeout = false, 200*time.Millisecond
			c.chosen, c.mapped = true, &mapping{bytes: mem, users: 1}
			copied := 0
			into := each{memory{make([]byte, testPage), make([]byte, testPage)}, func(_ int, page []byte) error {
				copied++
				assert.Equal(t, len(page), testPage)
				assert.Equal(t, cap(page), testPage)
				return nil
			}}
			err = c.ReadPages(t.Context(), id.Transfer{1}, Secret{2}, refs, into)
			if tc.want == nil {
				assert.NoError(t, err)
			} else {
				assert.ErrorIs(t, err, tc.want)
			}
			if bytes.Equal(tc.answer, good) {
				assert.Equal(t, copied, 2)
				assert.Equal(t, <-gone, "done")
			} else {
				assert.Equal(t, copied, 0)
			}
			assert.Equal(t, len(c.idle) == 1, tc.keep)
		})
	}
}

func FuzzBody(f *testing.F) {
	f.Add(uint16(kindLend), appendLend(nil, memoryID{7}, readRequest{refs: []PageRef{{Index: 3, Generation: 4}}})[preambleBytes:])
	f.Fuzz(func(t *testing.T, kind uint16, b []byte) {
		r, err := readBody(bytes.NewReader(b), kind)
		if err != nil || kind != kindLend {
			return
		}
		if out := appendLend(nil, r.mem, r.read)[preambleBytes:]; !bytes.Equal(out, b[:len(out)]) {
			t.Fatalf("read %x, would write %x", b, out)
		}
	})
}

func FuzzGrant(f *testing.F) {
	f.Add(grant{mem: memoryID{1}, token: token{2}, size: 3, path: "/x"}.append(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		g, err := readGrant(bytes.NewReader(b))
		if err != nil {
			return
		}
		if out := g.append(nil); !bytes.Equal(out, b[:len(out)]) {
			t.Fatalf("read %x, would write %x", b, out)
		}
	})
}

// memfd makes sealed memory.
func memfd(t *testing.T, size int64, seals int) *os.File {
	t.Helper()
	fd, err := unix.MemfdCreate("pages", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	assert.NoError(t, err)
	f := os.NewFile(uintptr(fd), "pages")
	t.Cleanup(func() { _ = f.Close() })
	assert.NoError(t, f.Truncate(size))
	_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
	assert.NoError(t, err)
	return f
}
