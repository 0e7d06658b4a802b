package worker

import (
	"net/http"
	"sync"
	"time"

	"bulkhead.dev/engine/fabric"
	"bulkhead.dev/engine/worker/peer"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/services/gen/bulkhead/worker/v1/workerv1connect"
)

// maxPeers bounds the connections to other workers that are kept. A worker has
// a few peers at a time; each restart of one makes another.
const maxPeers = 64

// where is a run of a worker at an address.
type where struct {
	epoch   id.Epoch
	address string
}

// peers keeps one client for each run of a worker, and forgets the oldest
// beyond maxPeers.
type peers[T any] struct {
	make func(where) (T, error)
	drop func(T)

	mu      sync.Mutex
	clients map[where]T
	order   []where // oldest first
}

func (p *peers[T]) get(w where) (T, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if c, ok := p.clients[w]; ok {
		return c, nil
	}
	c, err := p.make(w)
	if err != nil {
		return c, err
	}
	if p.clients == nil {
		p.clients = map[where]T{}
	}
	if len(p.order) >= maxPeers {
		oldest := p.order[0]
		p.drop(p.clients[oldest])
		delete(p.clients, oldest)
		p.order = p.order[1:]
	}
	p.clients[w] = c
	p.order = append(p.order, w)
	return c, nil
}

func (p *peers[T]) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.clients {
		p.drop(c)
	}
	p.clients, p.order = nil, nil
}

// pageReaders reads from the page servers of prefill workers.
func pageReaders(c peer.Credentials, stall time.Duration) *peers[*fabric.Client] {
	return &peers[*fabric.Client]{
		make: func(w where) (*fabric.Client, error) {
			conf, err := c.ClientConfig(peer.Only(peer.Worker(peer.Prefill, w.epoch)))
			if err != nil {
				return nil, err
			}
			return fabric.NewClient(w.address, fabric.ClientOptions{TLS: conf, StallTimeout: stall})
		},
		// A read in flight goes on.
		drop: func(c *fabric.Client) { _ = c.Close() },
	}
}

// decodeClient is the API of one run of a decode worker.
type decodeClient struct {
	workerv1connect.DecodeServiceClient
	http *http.Client
}

// decodeClients makes offers to decode workers.
func decodeClients(c peer.Credentials) *peers[decodeClient] {
	return &peers[decodeClient]{
		make: func(w where) (decodeClient, error) {
			hc, err := peer.NewClient(w.address, c, peer.Only(peer.Worker(peer.Decode, w.epoch)))
			if err != nil {
				return decodeClient{}, err
			}
			return decodeClient{workerv1connect.NewDecodeServiceClient(hc, peer.BaseURL, peer.Unpacked), hc}, nil
		},
		drop: func(c decodeClient) { c.http.CloseIdleConnections() },
	}
}
