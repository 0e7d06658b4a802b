package fabric

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"bulkhead.dev/infra/id"
)

// mapping is the memory of a server as a client has it mapped.
type mapping struct {
	id    memoryID
	bytes []byte
	users int // under Client.mu: the client, and reads; unmapped at 0
}

// memory returns the mapping for a read, which has to drop it, or nil if the
// pages come by the stream. The first read decides which, for good.
func (c *Client) memory(ctx context.Context) (*mapping, error) {
	if m, ok, err := c.decided(); ok || err != nil {
		return m, err
	}
	select {
	case c.deciding <- struct{}{}:
		defer func() { <-c.deciding }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if m, ok, err := c.decided(); ok || err != nil {
		return m, err
	}
	m, why, err := c.mapServer(ctx)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.chosen, c.mapped, c.whyNot = true, m, why
	if m == nil {
		return nil, nil
	}
	m.users++ // this read
	if c.closed {
		c.mapped = nil
	} else {
		m.users++ // the client
	}
	return m, nil
}

// decided returns what memory decided earlier, if it did.
func (c *Client) decided() (m *mapping, ok bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.closed:
		return nil, false, ErrClosed
	case c.mapped != nil:
		c.mapped.users++
	}
	return c.mapped, c.chosen, nil
}

// drop ends one use of a mapping.
func (c *Client) drop(m *mapping) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return m.drop()
}

// drop ends one use. Callers hold the client's mu.
func (m *mapping) drop() error {
	if m.users--; m.users > 0 {
		return nil
	}
	b := m.bytes
	m.bytes = nil
	return unix.Munmap(b)
}

// mapServer maps the memory of the server. whyNot says why that will not do;
// err that it may do another time.
func (c *Client) mapServer(ctx context.Context) (m *mapping, whyNot, err error) {
	var g grant
	err = c.exchange(ctx, appendPreamble(nil, kindMap), func(x *exchange) (err error) {
		g, err = readGrant(x.conn)
		x.clean = err == nil || errors.Is(err, ErrNotShared)
		if x.answered = x.clean; !x.clean {
			err = broken(err)
		}
		return err
	})
	if errors.Is(err, ErrNotShared) {
		return nil, err, nil
	}
	if err != nil {
		return nil, nil, err
	}
	file, err := take(ctx, g, c.opts.Now, c.uid)
	if err != nil {
		return nil, err, ctx.Err()
	}
	bytes, err := mapMemory(file, g.size)
	if err = errors.Join(err, file.Close()); err != nil {
		return nil, err, nil
	}
	return &mapping{id: g.mem, bytes: bytes}, nil, nil
}

// copyLent copies pages of the server out of its memory, while they are lent.
func (c *Client) copyLent(ctx context.Context, m *mapping, transfer id.Transfer, secret Secret, refs []PageRef, into Sink) error {
	req := appendLend(nil, m.id, readRequest{transfer: transfer, secret: secret, refs: refs})
	return c.exchange(ctx, req, func(x *exchange) error {
		size, err := readHead(x, x.conn, len(refs), into)
		if err != nil {
			return err
		}
		offsets, err := readOffsets(x.conn, len(refs), size, len(m.bytes))
		if err != nil {
			return broken(err)
		}
		// From here on the end of the connection tells the server that nobody
		// looks at the pages, so it must not come while somebody does.
		if !x.keepOpen() {
			return ctx.Err()
		}
		if err := copyPages(ctx, m, offsets, size, into); err != nil {
			return err // which closes the connection
		}
		stop := context.AfterFunc(ctx, func() { _ = x.conn.Close() })
		err = c.giveBack(x)
		x.clean = stop() && err == nil
		return err
	})
}

// giveBack tells the server that nobody looks at the pages any more, and waits
// until it holds them no longer: who is done with a transfer then finds no trace
// of it.
func (c *Client) giveBack(x *exchange) error {
	if err := x.conn.SetDeadline(c.opts.Now().Add(c.opts.StallTimeout)); err != nil {
		return broken(err)
	}
	if _, err := x.conn.Write(appendPreamble(nil, kindDone)); err != nil {
		return broken(err)
	}
	st, err := readPreamble(x.conn)
	if err != nil {
		return broken(err)
	}
	if status(st) != statusOK {
		return fmt.Errorf("%w: status %d", ErrProtocol, st)
	}
	return nil
}

func copyPages(ctx context.Context, m *mapping, offsets []int, size int, into Sink) error {
	for i, at := range offsets {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := into.Copy(i, m.bytes[at:at+size:at+size]); err != nil {
			return err
		}
	}
	return nil
}

// Transport implements Reader.
func (c *Client) Transport() Transport {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.network == "tcp" && c.opts.TLS != nil:
		return TCPWithTLS
	case c.network == "tcp":
		return TCP
	case c.chosen && c.whyNot == nil && !c.opts.StreamOnly:
		return SharedMemory
	}
	return Unix
}

// WhyNotShared tells, after a read over a unix socket, why it did not come out
// of shared memory; nil if it did.
func (c *Client) WhyNotShared() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.network != "unix" || c.opts.StreamOnly {
		return fmt.Errorf("%w: not asked for", ErrNotShared)
	}
	return c.whyNot
}
