package fabric

import (
	"context"
	"crypto/tls"
	"net"

	"bulkhead.dev/engine/kv"
	"bulkhead.dev/infra/id"
)

type Secret [32]byte
type PageRef = kv.PageRef

// Reader reads pages of an open offer. When ReadPages returns, nothing writes
// into the memory that land gave out any more.
type Reader interface {
	ReadPages(ctx context.Context, transfer id.Transfer, secret Secret, refs []PageRef, land func(i int) []byte) error
}

// Server serves the pages of open offers (prefill side).
type Server struct{}

func NewServer(ServerOptions) *Server { panic("unfinished") }

type ServerOptions struct{}

func (s *Server) Serve(ctx context.Context, l net.Listener) error { panic("unfinished") } // returns when ctx ends and every connection is closed
func (s *Server) Local() Reader                                   { panic("unfinished") } // in-process reader

// Listen and Dial take "unix:/path" or "tcp:host:port".
func Listen(addr string, t *tls.Config) (net.Listener, error) { panic("unfinished") }

type Client struct{}

// Dial connects lazily; tls nil means plain.
func Dial(addr string, t *tls.Config) (*Client, error) { panic("unfinished") }
func (c *Client) ReadPages(ctx context.Context, transfer id.Transfer, secret Secret, refs []PageRef, land func(i int) []byte) error {
	panic("unfinished")
}
func (c *Client) Close() error { panic("unfinished") }
