package sched

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"bulkhead.dev/engine/compute"
	"bulkhead.dev/engine/kv"
	"bulkhead.dev/infra/id"
)

// PrefillOptions configure a prefill loop. All are needed.
type PrefillOptions struct {
	// Model is used by the loop only, from Run on.
	Model Forwarder
	// Geometry says how many pages a chunk needs.
	Geometry kv.Geometry
	// Chunk is how many positions one pass computes, at least 1. It bounds how
	// long one prompt delays another, and how late a cancel takes effect.
	Chunk int
	// Now is the clock.
	Now func() time.Time
}

// Prefill computes keys and values of prompts, chunk by chunk. Its methods are
// safe for concurrent use; Run is called once.
type Prefill struct {
	opts PrefillOptions

	mu      sync.Mutex
	ring    []*fill // the next in turn is first
	stopped bool

	wake    chan struct{}
	tokens  atomic.Uint64
	running atomic.Int64
}

// fill is one prompt. Until done closes it belongs to the loop, apart from the
// context.
type fill struct {
	ctx    context.Context
	filler *kv.Filler
	tokens []int32
	early  func(*kv.Sealed)
	shared int // pages that were passed on
	wrote  int // positions that forward passes reported as written, then or now
	took   time.Duration
	err    error
	done   chan struct{}
}

// Filled is what a prompt left behind and what was measured on the way.
type Filled struct {
	Sealed   *kv.Sealed // nil after an error
	Tokens   int        // positions that forward passes wrote, those of Start included
	Cached   int        // positions of Start
	Extents  []kv.Extent
	Computed time.Duration // wall time of the passes over this prompt
}

// NewPrefill makes a prefill loop; Run runs it.
func NewPrefill(opts PrefillOptions) *Prefill {
	return &Prefill{opts: opts, wake: make(chan struct{}, 1)}
}

// Tokens returns the positions written since the start.
func (p *Prefill) Tokens() uint64 { return p.tokens.Load() }

// Running returns the prompts that are being computed.
func (p *Prefill) Running() int { return int(p.running.Load()) }

// Job is a prompt to compute.
type Job struct {
	// Credits for the prompt. Fill takes them.
	Credits *kv.Credits
	Lease   id.Lease
	Tokens  []int32
	// Start has the first pages of the prompt already, if it is set. Fill takes
	// it.
	Start *kv.Sealed
	// Early, if set, is given a handle on the pages that are finished, again
	// after each chunk that finished some, but the last. It owns the handle and must not block: the
	// loop waits for it.
	Early func(*kv.Sealed)
}

// Fill computes the prompt into pages of the credits and seals them. On success
// the caller owns Sealed; on an error every page is released, and the
// measurements up to there are returned all the same. When ctx ends it returns
// ErrCanceled within one chunk.
func (p *Prefill) Fill(ctx context.Context, job Job) (Filled, error) {
	tokens := job.Tokens
	if err := p.check(job); err != nil {
		if job.Start != nil {
			job.Start.Release()
		}
		return Filled{}, err
	}
	filler, err := job.filler()
	if err != nil {
		return Filled{}, fmt.Errorf("%w: %w", ErrPages, err)
	}
	cached := filler.Len()
	f := &fill{ctx: ctx, filler: filler, tokens: tokens, wrote: cached, early: job.Early, done: make(chan struct{})}
	if !p.add(f) {
		filler.Abort()
		return Filled{}, ErrStopped
	}
	<-f.done
	p.running.Add(-1)
	out := Filled{Tokens: f.wrote, Cached: cached, Extents: filler.Extents(), Computed: f.took}
	if f.err == nil {
		out.Sealed, f.err = filler.Seal(f.wrote)
		if f.err != nil {
			f.err = fmt.Errorf("%w: %w", ErrPages, f.err)
		}
	}
	if f.err != nil {
		filler.Abort()
		return out, f.err
	}
	return out, nil
}

func (p *Prefill) check(job Job) error {
	if len(job.Tokens) == 0 {
		return fmt.Errorf("%w: no prompt", ErrRequest)
	}
	if job.Start != nil && job.Start.Tokens() >= len(job.Tokens) {
		return fmt.Errorf("%w: nothing is left to compute", ErrRequest)
	}
	vocab := p.opts.Model.Vocab()
	for _, t := range job.Tokens {
		if t < 0 || int(t) >= vocab {
			return fmt.Errorf("%w: a token is outside the vocabulary", ErrRequest)
		}
	}
	return nil
}

func (job Job) filler() (*kv.Filler, error) {
	if job.Start == nil {
		return job.Credits.Fill(job.Lease)
	}
	return job.Credits.FillAfter(job.Lease, job.Start)
}

func (p *Prefill) add(f *fill) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stopped {
		return false
	}
	p.ring = append(p.ring, f)
	p.running.Add(1)
	select {
	case p.wake <- struct{}{}:
	default:
	}
	return true
}

// Run computes until ctx ends. Then it ends every prompt with ErrStopped and
// returns nil.
func (p *Prefill) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		f := p.next()
		if f == nil {
			select {
			case <-ctx.Done():
			case <-p.wake:
			}
			continue
		}
		if p.chunk(f) {
			close(f.done)
		} else {
			p.again(f)
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stopped = true
	for _, f := range p.ring {
		f.err = ErrStopped
		close(f.done)
	}
	p.ring = nil
	return nil
}

// next ends the prompts that were canceled and takes out the one in turn.
func (p *Prefill) next() *fill {
	p.mu.Lock()
	defer p.mu.Unlock()
	kept := p.ring[:0]
	for _, f := range p.ring {
		if f.ctx.Err() != nil {
			f.err = ErrCanceled
			close(f.done)
			continue
		}
		kept = append(kept, f)
	}
	clear(p.ring[len(kept):])
	p.ring = kept
	if len(p.ring) == 0 {
		return nil
	}
	f := p.ring[0]
	p.ring = append(p.ring[:0], p.ring[1:]...)
	return f
}

// again puts a prompt at the end of the ring.
func (p *Prefill) again(f *fill) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ring = append(p.ring, f)
}

// chunk computes the next chunk of the prompt. It reports whether the prompt is
// complete or has failed.
func (p *Prefill) chunk(f *fill) (over bool) {
	pos := f.filler.Len()
	n := min(p.opts.Chunk, len(f.tokens)-pos)
	began := p.opts.Now()
	wrote, err := p.pass(f, pos, n)
	f.took += p.opts.Now().Sub(began)
	f.wrote += wrote
	p.tokens.Add(uint64(wrote))
	switch {
	case err != nil:
		f.err = err
	case f.ctx.Err() != nil:
		f.err = ErrCanceled
	case f.filler.Len() < len(f.tokens):
		f.err = f.share()
		return f.err != nil
	}
	return true
}

// share passes on what is finished.
func (f *fill) share() error {
	full := f.filler.Len() / kv.PageTokens
	if f.early == nil || full == f.shared { // a chunk may be less than a page
		return nil
	}
	f.shared = full
	sealed, err := f.filler.Finished()
	if err != nil {
		return fmt.Errorf("%w: %w", ErrPages, err)
	}
	f.early(sealed)
	return nil
}

// pass writes the positions [pos, pos+n) and returns how many were written.
func (p *Prefill) pass(f *fill, pos, n int) (int, error) {
	g := p.opts.Geometry
	if need := g.PagesFor(pos+n) - g.PagesFor(pos); need > 0 {
		if err := f.filler.Grant(need); err != nil {
			return 0, fmt.Errorf("%w: %w", ErrPages, err)
		}
	}
	table, err := f.filler.Table(pos, n)
	if err != nil {
		return 0, fmt.Errorf("%w: %w", ErrPages, err)
	}
	defer table.Close()
	spans := [1]compute.Span{{Tokens: f.tokens[pos : pos+n], Pos: pos, Pages: table}}
	if err := p.opts.Model.Forward(spans[:]); err != nil {
		return 0, fmt.Errorf("%w: %w", ErrModel, err)
	}
	if err := wrote(spans[0]); err != nil {
		return spans[0].Wrote, err
	}
	if err := table.Advance(spans[0].Wrote); err != nil {
		return spans[0].Wrote, fmt.Errorf("%w: %w", ErrPages, err)
	}
	return spans[0].Wrote, nil
}
