package fabric

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"bulkhead.dev/infra/id"
)

const (
	// maxIdle is how many connections a client keeps for later.
	maxIdle = 64
	// dialTimeout bounds connecting; both ends are in one data center.
	dialTimeout = 5 * time.Second
)

// ClientOptions may be left zero.
type ClientOptions struct {
	// TLS, if set, encrypts and authenticates the stream.
	TLS *tls.Config
	// Now and StallTimeout are as in ServerOptions.
	Now          func() time.Time
	StallTimeout time.Duration
	// StreamOnly keeps a client from mapping memory of the server, which it
	// does over a unix socket if the server lets it.
	StreamOnly bool
}

// Client reads pages of a server in another process: over a stream, or out of
// its memory. It is safe for concurrent use: each read has a connection to
// itself.
type Client struct {
	network, where string
	opts           ClientOptions
	// uid is as in Server.
	uid func(*net.UnixConn) (int, error)
	// deciding has one element while somebody finds out whether memory can be
	// mapped.
	deciding chan struct{}

	mu     sync.Mutex
	idle   []net.Conn // under mu; each finished its last exchange
	closed bool       // under mu
	chosen bool       // under mu; whether pages come out of memory is decided
	mapped *mapping   // under mu; nil: they come by the stream
	whyNot error      // under mu
}

var _ Reader = (*Client)(nil)

// Dial makes a client of the server at "unix:/path" or "tcp:host:port", with TLS
// if conf is set. It connects when it is first needed.
func Dial(addr string, conf *tls.Config) (*Client, error) {
	return NewClient(addr, ClientOptions{TLS: conf})
}

// NewClient is Dial with all options.
func NewClient(addr string, o ClientOptions) (*Client, error) {
	network, where, err := split(addr)
	if err != nil {
		return nil, err
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.StallTimeout == 0 {
		o.StallTimeout = DefaultStallTimeout
	}
	c := &Client{network: network, where: where, opts: o, uid: peerUID, deciding: make(chan struct{}, 1)}
	c.chosen = network != "unix" || o.StreamOnly
	return c, nil
}

// Close closes the idle connections. Reads in flight end by their context, and
// keep what they have mapped until then.
func (c *Client) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	var err error
	if c.mapped != nil {
		err = c.mapped.drop()
		c.mapped = nil
	}
	for _, conn := range c.idle {
		err = errors.Join(err, conn.Close())
	}
	c.idle = nil
	return err
}

// ReadPages implements Reader.
func (c *Client) ReadPages(ctx context.Context, transfer id.Transfer, secret Secret, refs []PageRef, into Sink) error {
	if len(refs) == 0 {
		return nil
	}
	err := c.readPages(ctx, transfer, secret, refs, into)
	if err != nil {
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return fmt.Errorf("read %d pages: %w", len(refs), err)
	}
	return nil
}

func (c *Client) readPages(ctx context.Context, transfer id.Transfer, secret Secret, refs []PageRef, into Sink) (err error) {
	m, err := c.memory(ctx)
	if err != nil {
		return err
	}
	read, each := c.stream, maxRefs
	if m != nil {
		defer func() { err = errors.Join(err, c.drop(m)) }()
		each = maxLent
		read = func(ctx context.Context, transfer id.Transfer, secret Secret, refs []PageRef, into Sink) error {
			return c.copyLent(ctx, m, transfer, secret, refs, into)
		}
	}
	for at := 0; at < len(refs); at += each {
		if err := read(ctx, transfer, secret, refs[at:min(at+each, len(refs))], part{into, at}); err != nil {
			return err
		}
	}
	return nil
}

// part is a sink from one of its pages on.
type part struct {
	Sink
	first int
}

func (p part) Copy(i int, page []byte) error      { return p.Sink.Copy(p.first+i, page) }
func (p part) Read(i int, stream io.Reader) error { return p.Sink.Read(p.first+i, stream) }

// exchange is one request and its answer.
type exchange struct {
	conn net.Conn
	// keepOpen keeps the connection open when the context ends. It returns
	// false if that happened before.
	keepOpen func() bool
	// answered tells whether anything of an answer came; clean that the
	// exchange ended as it should, so that the connection can be used again.
	answered, clean bool
}

// exchange does one exchange on a connection that is idle, or on a new one if
// the server closed the idle one before it answered anything.
func (c *Client) exchange(ctx context.Context, req []byte, answer func(*exchange) error) error {
	for {
		conn, used, err := c.get(ctx)
		if err != nil {
			return err
		}
		answered, err := c.exchangeOn(ctx, conn, req, answer)
		if err != nil && used && !answered && errors.Is(err, ErrBroken) && ctx.Err() == nil {
			continue // each turn uses up one idle connection, so this ends
		}
		return err
	}
}

func (c *Client) get(ctx context.Context) (conn net.Conn, used bool, err error) {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil, false, ErrClosed
	}
	if n := len(c.idle); n > 0 {
		conn, c.idle = c.idle[n-1], c.idle[:n-1]
		c.mu.Unlock()
		return conn, true, nil
	}
	c.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	if conn, err = c.dial(ctx); err != nil {
		return nil, false, fmt.Errorf("%w: connect to page server: %w", ErrBroken, err)
	}
	return conn, false, nil
}

func (c *Client) dial(ctx context.Context) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, c.network, c.where)
	if err != nil || c.opts.TLS == nil {
		return conn, err
	}
	conf := c.opts.TLS
	if conf.ServerName == "" && !conf.InsecureSkipVerify {
		conf = conf.Clone()
		if conf.ServerName, _, err = net.SplitHostPort(c.where); err != nil {
			return nil, errors.Join(err, conn.Close())
		}
	}
	t := tls.Client(newRecords(conn), conf)
	if err := t.HandshakeContext(ctx); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return t, nil
}

// wipe overwrites what a connection still has of the pages that came over it.
func wipe(conn net.Conn) {
	if t, ok := conn.(*tls.Conn); ok {
		t.NetConn().(*records).wipe()
	}
}

// put keeps a connection whose exchange ended as it should.
func (c *Client) put(conn net.Conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || len(c.idle) >= maxIdle {
		_ = conn.Close()
		return
	}
	c.idle = append(c.idle, conn)
}

// exchangeOn does one exchange and then keeps or destroys the connection, which
// ends with the context.
func (c *Client) exchangeOn(ctx context.Context, conn net.Conn, req []byte, answer func(*exchange) error) (answered bool, err error) {
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	kept := false
	x := &exchange{conn: conn, keepOpen: func() bool {
		kept = kept || stop()
		return kept
	}}
	defer func() {
		wipe(conn)
		if x.keepOpen() && x.clean {
			c.put(conn)
			return
		}
		_ = conn.Close()
	}()

	if err := conn.SetDeadline(c.opts.Now().Add(c.opts.StallTimeout)); err != nil {
		return false, broken(err)
	}
	if _, err := conn.Write(req); err != nil {
		return false, broken(err)
	}
	err = answer(x)
	return x.answered, err
}

// readHead reads the header of an answer with n pages for a sink, and returns
// their size.
func readHead(x *exchange, from io.Reader, n int, into Sink) (pageBytes int, err error) {
	head, err := readAnswerHeader(from)
	if err != nil {
		return 0, broken(err)
	}
	x.answered = true
	if head.status != statusOK {
		x.clean = head.status != statusBad
		return 0, head.status.err()
	}
	if int(head.count) != n {
		return 0, fmt.Errorf("%w: %d pages for %d", ErrProtocol, head.count, n)
	}
	if size := into.PageBytes(); size != int(head.pageBytes) {
		return 0, fmt.Errorf("%w: pages of %d bytes for %d bytes of memory", ErrProtocol, head.pageBytes, size)
	}
	return int(head.pageBytes), nil
}

// stream reads pages over the stream.
func (c *Client) stream(ctx context.Context, transfer id.Transfer, secret Secret, refs []PageRef, into Sink) error {
	req := readRequest{transfer: transfer, secret: secret, refs: refs}.append(nil)
	return c.exchange(ctx, req, func(x *exchange) error {
		from := newWindow(x.conn, answerHeaderBytes+len(refs)*(pageHeaderBytes+into.PageBytes()))
		// What waits in it are pages, of which nothing stays behind.
		defer from.wipe()
		if _, err := readHead(x, from, len(refs), into); err != nil {
			return err
		}
		for i, ref := range refs {
			if err := x.conn.SetDeadline(c.opts.Now().Add(c.opts.StallTimeout)); err != nil {
				return broken(err)
			}
			p, err := readPageHeader(from)
			if err != nil {
				return broken(err)
			}
			if p.ref != ref {
				return fmt.Errorf("%w: page %d generation %d in place of page %d generation %d",
					ErrProtocol, p.ref.Index, p.ref.Generation, ref.Index, ref.Generation)
			}
			if p.status != statusOK {
				return fmt.Errorf("%w: page %d generation %d", p.status.err(), ref.Index, ref.Generation)
			}
			if err := into.Read(i, from); err != nil {
				if from.failed {
					return broken(err)
				}
				return err // the sink does not want the page
			}
		}
		x.clean = from.left() == 0 // or the server said more than it was asked
		return nil
	})
}

// broken marks errors of the transport; errors of the protocol stay.
func broken(err error) error {
	if errors.Is(err, ErrProtocol) {
		return err
	}
	return fmt.Errorf("%w: %w", ErrBroken, err)
}
