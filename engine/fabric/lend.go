package fabric

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
)

// returnGrace is how long a server that ends waits for readers to give back what
// it lent them. A copy takes milliseconds. When it is over the pages are not
// free: they are given up for good.
const returnGrace = time.Second

// line is a connection of a server. While pages are lent over it the server does
// not close it, because its own closing would prove nothing.
type line struct {
	net.Conn
	now func() time.Time
	// grace is returnGrace, but in tests.
	grace time.Duration
	hand  *handover // nil: no memory is shared
	tok   token     // handed out over this connection, and maybe not used yet

	mu   sync.Mutex
	lent bool // under mu
	over bool // under mu: the server ends
}

// raw returns the socket if it is a unix socket, or nil.
func (l *line) raw() *net.UnixConn {
	c := l.Conn
	if t, ok := c.(interface{ NetConn() net.Conn }); ok {
		c = t.NetConn()
	}
	u, _ := c.(*net.UnixConn)
	return u
}

// end is called when the server ends.
func (l *line) end() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.over = true
	if l.lent {
		_ = l.raw().SetReadDeadline(l.now().Add(l.grace))
		return
	}
	_ = l.Close()
}

// hangUp closes the connection when its goroutine ends.
func (l *line) hangUp() {
	if l.hand != nil {
		l.hand.forget(l.tok)
	}
	_ = l.Close()
}

// begin keeps the connection open from here on until done; it returns false if
// the server ends already.
func (l *line) begin() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over || l.SetReadDeadline(time.Time{}) != nil {
		return false
	}
	l.lent = true
	return true
}

func (l *line) done() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lent = false
	if l.over {
		_ = l.Close()
	}
}

// errLost means that a reader did not give back what it was lent.
var errLost = errors.New("pages were not given back")

// returned waits until the reader says that it is done, or is proven to be gone.
// There is no deadline: a reader that stands still is no proof. errLost means
// that there will be no proof; every other error that the reader is gone.
func (l *line) returned() error {
	kind, err := readPreamble(l)
	if err == nil && kind == kindDone {
		return nil
	}
	// Anything else that comes is not understood, so only the end of the
	// connection is left to wait for, below TLS.
	for b := make([]byte, 512); !gone(err); {
		if errors.Is(err, net.ErrClosed) || errors.Is(err, os.ErrDeadlineExceeded) {
			return errLost
		}
		var rerr error
		if _, rerr = l.raw().Read(b); rerr != nil && !gone(rerr) {
			return errLost
		}
		err = rerr
	}
	return err
}

// gone tells whether an error proves that the other end of a unix socket was
// closed: by the reader, after its copy has returned, or by the kernel, after
// the last thread of its process has ended.
func gone(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET)
}

// grant answers a map request.
func (s *Server) grant(c *line) error {
	if c.hand == nil || c.raw() == nil {
		_, err := c.Write(appendPreamble(nil, uint16(statusNotShared)))
		return err
	}
	c.hand.forget(c.tok)
	c.tok = c.hand.issue()
	_, err := c.Write(grant{mem: c.hand.mem, token: c.tok, size: uint64(c.hand.size), path: c.hand.path}.append(nil))
	return err
}

// lend answers a lend request and holds the pages until they are given back.
func (s *Server) lend(c *line, req request) error {
	refuse := func(err error) error {
		st := statusOf(err)
		if st == statusOK {
			return err
		}
		_, err = c.Write(answerHeader{status: st}.append(nil))
		return err
	}
	if c.hand == nil || c.raw() == nil || req.mem != c.hand.mem {
		return refuse(ErrNotShared)
	}
	sealed, err := s.find(req.read.transfer, req.read.secret)
	if err != nil {
		return refuse(err)
	}
	loan, err := s.arena.Lend(sealed, req.read.refs)
	if err != nil {
		return refuse(translate(err))
	}
	if !c.begin() {
		loan.Close() // nobody was told of it
		return ErrClosed
	}
	defer c.done()
	s.count(len(req.read.refs))
	// Should this fail, the reader may have got it all the same.
	_, werr := c.Write(appendLoan(nil, sealed.Geometry().PageBytes(), loan.Offsets()))
	err = c.returned()
	if errors.Is(err, errLost) {
		return err
	}
	s.count(-len(req.read.refs))
	loan.Close()
	if err = errors.Join(werr, err); err != nil {
		return err
	}
	if err := c.SetWriteDeadline(s.now().Add(s.stall)); err != nil {
		return err
	}
	_, err = c.Write(appendPreamble(nil, uint16(statusOK)))
	return err
}

func (s *Server) count(pages int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lent += pages
}

// Lent returns how many pages are lent to readers that have them mapped. Those
// that a reader has not given back when Serve returned stay in it.
func (s *Server) Lent() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lent
}
