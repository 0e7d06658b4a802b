package fabric

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"bulkhead.dev/engine/kv"
)

const (
	// maxConns bounds the connections of a server. A decode worker uses a few.
	maxConns = 256
	// hostBuffer is how much of a stream may wait in a socket whose ends are on
	// one host; the kernel doubles it. It is what a system lets anybody have.
	hostBuffer = 208 << 10
	// idleTimeout closes a connection on which nothing is asked. Clients notice
	// and dial again.
	idleTimeout = 5 * time.Minute
)

// Serve answers reads on a listener until ctx ends. It closes the listener and
// every connection, and returns when no goroutine serves any more: from then on
// no page is held by a read over this listener, except those lent to a reader
// that did not say that it is done; they are never granted again. The error is
// nil if ctx ended.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	hand, err := s.share(l)
	if err != nil {
		return errors.Join(err, l.Close())
	}
	if hand != nil {
		defer hand.close()
	}
	ctx, cancel := context.WithCancel(ctx)
	var conns sync.WaitGroup
	defer conns.Wait()
	defer cancel()
	failed := make(chan error, 1)
	if hand != nil {
		conns.Go(func() {
			if err := hand.serve(ctx); err != nil {
				failed <- err
				cancel()
			}
		})
	}
	ended := func() error {
		select {
		case err := <-failed:
			return err
		default:
			return nil
		}
	}
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer stop()

	slots := make(chan struct{}, maxConns)
	for {
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			return ended()
		}
		c, err := l.Accept()
		if err != nil {
			if ctx.Err() != nil {
				return ended()
			}
			_ = l.Close()
			return fmt.Errorf("accept page reads: %w", err)
		}
		conns.Go(func() {
			defer func() { <-slots }()
			smallBuffer(c)
			x := &line{Conn: c, now: s.now, grace: s.grace, hand: hand}
			stop := context.AfterFunc(ctx, x.end)
			defer stop()
			defer x.hangUp()
			s.serveConn(x)
		})
	}
}

// smallBuffer limits what waits between two processes of one host. Left to
// itself TCP lets megabytes wait there, and what has waited that long has to come
// from memory again; the default of a unix socket makes the two wait for each
// other. To other hosts a buffer has to be as long as the way.
func smallBuffer(c net.Conn) {
	if t, ok := c.(interface{ NetConn() net.Conn }); ok {
		c = t.NetConn()
	}
	if a, ok := c.RemoteAddr().(*net.TCPAddr); ok && !a.IP.IsLoopback() {
		return
	}
	if b, ok := c.(interface{ SetWriteBuffer(bytes int) error }); ok {
		_ = b.SetWriteBuffer(hostBuffer) // without it, everything works
	}
}

// serveConn answers one exchange after the other. Whatever goes wrong ends the
// connection; the peer sees that and nobody else needs to know.
func (s *Server) serveConn(c *line) {
	for {
		if c.SetDeadline(s.now().Add(idleTimeout)) != nil {
			return
		}
		var first [1]byte
		if _, err := io.ReadFull(c, first[:]); err != nil {
			return
		}
		if c.SetDeadline(s.now().Add(s.stall)) != nil {
			return
		}
		from := io.MultiReader(bytes.NewReader(first[:]), c)
		kind, err := readPreamble(from)
		var req request
		if err == nil {
			req, err = readBody(from, kind)
		}
		if err != nil {
			if errors.Is(err, ErrProtocol) {
				_, _ = c.Write(answerHeader{status: statusBad}.append(nil))
			}
			return
		}
		switch req.kind {
		case kindRead:
			err = s.answer(c, req.read)
		case kindMap:
			err = s.grant(c)
		case kindLend:
			err = s.lend(c, req)
		}
		if err != nil {
			return
		}
	}
}

// answer serves one request. An error means that the connection cannot be used
// any more.
func (s *Server) answer(c net.Conn, req readRequest) error {
	sealed, err := s.find(req.transfer, req.secret)
	if err != nil {
		_, err := c.Write(answerHeader{status: statusRefused}.append(nil))
		return err
	}
	head := answerHeader{pageBytes: uint32(sealed.Geometry().PageBytes()), count: uint32(len(req.refs))}
	if _, err := c.Write(head.append(nil)); err != nil {
		return err
	}
	var buf [pageHeaderBytes]byte
	for _, ref := range req.refs {
		// Asked for every page, so that an offer that is closed ends here.
		if sealed, err = s.find(req.transfer, req.secret); err == nil {
			err = s.sendPage(c, sealed, ref, buf[:0])
		}
		if st := statusOf(err); st != statusOK {
			if _, err := c.Write(pageHeader{status: st, ref: ref}.append(buf[:0])); err != nil {
				return err
			}
			return nil
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// sendPage writes one page out of its own memory while it is held open.
func (s *Server) sendPage(c net.Conn, sealed *kv.Sealed, ref PageRef, buf []byte) error {
	return view(sealed, ref, func(page []byte) error {
		if err := c.SetDeadline(s.now().Add(s.stall)); err != nil {
			return err
		}
		out := net.Buffers{pageHeader{ref: ref}.append(buf), page}
		_, err := out.WriteTo(c)
		return err
	})
}

// statusOf returns what to tell the peer; OK also for errors of the transport,
// over which nothing can be told.
func statusOf(err error) status {
	switch {
	case errors.Is(err, ErrRefused):
		return statusRefused
	case errors.Is(err, ErrStale):
		return statusStale
	case errors.Is(err, ErrNotShared):
		return statusNotShared
	}
	return statusOK
}
