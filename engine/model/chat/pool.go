package chat

import (
	"context"
	"errors"
	"sync"
)

// pool has the instances of one template.
type pool struct {
	engine *Engine
	// img is the memory of an instance right after the template was compiled, a
	// bit more than half a MiB. It is never written.
	img []byte
	// slots holds a token for each render that may run.
	slots chan struct{}

	mu     sync.Mutex // guards all below
	idle   []*instance
	closed bool
}

func newPool(e *Engine, img []byte, size int) *pool {
	p := &pool{engine: e, img: img, slots: make(chan struct{}, size)}
	for range size {
		p.slots <- struct{}{}
	}
	return p
}

// get returns an instance, which goes back with put. It waits while all of them
// render.
func (p *pool) get(ctx context.Context) (*instance, error) {
	select {
	case <-p.slots:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	in, err := p.take(ctx)
	if err != nil {
		p.slots <- struct{}{}
		return nil, err
	}
	return in, nil
}

func (p *pool) take(ctx context.Context) (*instance, error) {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return nil, ErrClosed
	}
	if n := len(p.idle); n > 0 {
		in := p.idle[n-1]
		p.idle = p.idle[:n-1]
		p.mu.Unlock()
		return in, nil
	}
	p.mu.Unlock()
	in, err := p.engine.newInstance(ctx)
	if err != nil {
		return nil, err
	}
	if !in.load(p.img) {
		return nil, errors.Join(errors.New("the template engine cannot be restored"), in.close())
	}
	return in, nil
}

// put takes back an instance of get, wiped, or closes it.
func (p *pool) put(in *instance) {
	if in.restore(p.img) {
		p.mu.Lock()
		p.idle = append(p.idle, in)
		p.mu.Unlock()
	} else {
		_ = in.close() // there is nothing to flush, and nobody to tell
	}
	p.slots <- struct{}{}
}

// close waits for the renders that run, and closes all instances.
func (p *pool) close() error {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return nil
	}
	p.closed = true
	p.mu.Unlock()
	for range cap(p.slots) {
		<-p.slots
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	var errs []error
	for _, in := range p.idle {
		errs = append(errs, in.close())
	}
	p.idle = nil
	// Renders that were waiting find the pool closed.
	for range cap(p.slots) {
		p.slots <- struct{}{}
	}
	return errors.Join(errs...)
}
