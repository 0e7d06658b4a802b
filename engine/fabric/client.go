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
	maxIdle = 4
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
}

// Client reads pages over a stream. It is safe for concurrent use: each read
// has a connection to itself.
type Client struct {
	network, where string
	opts           ClientOptions

	mu     sync.Mutex
	idle   []net.Conn // under mu; each finished its last exchange
	closed bool       // under mu
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
	return &Client{network: network, where: where, opts: o}, nil
}

// Close closes the idle connections. Reads in flight end by their context.
func (c *Client) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	var err error
	for _, conn := range c.idle {
		err = errors.Join(err, conn.Close())
	}
	c.idle = nil
	return err
}

// ReadPages implements Reader.
func (c *Client) ReadPages(ctx context.Context, transfer id.Transfer, secret Secret, refs []PageRef, into Sink) error {
	for at := 0; at < len(refs); at += maxRefs {
		req := readRequest{transfer: transfer, secret: secret, refs: refs[at:min(at+maxRefs, len(refs))]}
		if err := c.exchange(ctx, req, part{into, at}); err != nil {
			if ctx.Err() != nil {
				err = ctx.Err()
			}
			return fmt.Errorf("read %d pages: %w", len(refs), err)
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

// exchange does one exchange on a connection that is idle, or on a new one if
// the server closed the idle one before it answered anything.
func (c *Client) exchange(ctx context.Context, req readRequest, into Sink) error {
	for {
		conn, used, err := c.get(ctx)
		if err != nil {
			return err
		}
		answered, err := c.exchangeOn(ctx, conn, req, into)
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
	var d interface {
		DialContext(ctx context.Context, network, addr string) (net.Conn, error)
	} = &net.Dialer{}
	if c.opts.TLS != nil {
		d = &tls.Dialer{Config: c.opts.TLS}
	}
	conn, err = d.DialContext(ctx, c.network, c.where)
	if err != nil {
		return nil, false, fmt.Errorf("%w: connect to page server: %w", ErrBroken, err)
	}
	return conn, false, nil
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

// exchangeOn does one exchange and then keeps or destroys the connection.
// answered tells whether anything of an answer came.
func (c *Client) exchangeOn(ctx context.Context, conn net.Conn, req readRequest, into Sink) (answered bool, err error) {
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	clean := false
	defer func() {
		if stop() && clean {
			c.put(conn)
			return
		}
		_ = conn.Close()
	}()

	if err := conn.SetDeadline(c.opts.Now().Add(c.opts.StallTimeout)); err != nil {
		return false, broken(err)
	}
	if _, err := conn.Write(req.append(nil)); err != nil {
		return false, broken(err)
	}
	head, err := readAnswerHeader(conn)
	if err != nil {
		return false, broken(err)
	}
	if head.status != statusOK {
		clean = head.status == statusRefused
		return true, head.status.err()
	}
	if int(head.count) != len(req.refs) {
		return true, fmt.Errorf("%w: %d pages for %d", ErrProtocol, head.count, len(req.refs))
	}
	if size := into.PageBytes(); size != int(head.pageBytes) {
		return true, fmt.Errorf("%w: pages of %d bytes for %d bytes of memory", ErrProtocol, head.pageBytes, size)
	}
	from := &tracked{Reader: conn}
	for i, ref := range req.refs {
		if err := conn.SetDeadline(c.opts.Now().Add(c.opts.StallTimeout)); err != nil {
			return true, broken(err)
		}
		p, err := readPageHeader(conn)
		if err != nil {
			return true, broken(err)
		}
		if p.ref != ref {
			return true, fmt.Errorf("%w: page %d generation %d in place of page %d generation %d",
				ErrProtocol, p.ref.Index, p.ref.Generation, ref.Index, ref.Generation)
		}
		if p.status != statusOK {
			return true, fmt.Errorf("%w: page %d generation %d", p.status.err(), ref.Index, ref.Generation)
		}
		if err := into.Read(i, from); err != nil {
			if from.failed {
				return true, broken(err)
			}
			return true, err // the sink does not want the page
		}
	}
	clean = true
	return true, nil
}

// tracked tells an error of the connection from one of the sink.
type tracked struct {
	io.Reader
	failed bool
}

func (t *tracked) Read(b []byte) (int, error) {
	n, err := t.Reader.Read(b)
	t.failed = t.failed || err != nil
	return n, err
}

// broken marks errors of the transport; errors of the protocol stay.
func broken(err error) error {
	if errors.Is(err, ErrProtocol) {
		return err
	}
	return fmt.Errorf("%w: %w", ErrBroken, err)
}
