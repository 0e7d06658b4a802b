package sched

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"bulkhead.dev/engine/compute"
	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/sample"
)

// DecodeOptions configure a decode loop. All are needed.
type DecodeOptions struct {
	// Model is used by the loop only, from Run on. The number of runs at once
	// must not be above the rows that it takes; the slots of the gate see to it.
	Model Forwarder
	// NewText makes a decoder for one run.
	NewText func() Text
	// IsEOG reports whether an id ends the text.
	IsEOG func(id int32) bool
	// Mailbox is how many ids may wait in a run to be taken; at least 1.
	Mailbox int
	// SlowLimit is how long a mailbox may stay full.
	SlowLimit time.Duration
	// Now is the clock.
	Now func() time.Time
}

// Decode is the continuous batch of a decode worker. Its methods are safe for
// concurrent use; Run is called once.
type Decode struct {
	opts DecodeOptions

	mu      sync.Mutex
	joining []*Run
	stopped bool

	wake    chan struct{}
	tokens  atomic.Uint64
	running atomic.Int64
}

// NewDecode makes a decode loop; Run runs it.
func NewDecode(opts DecodeOptions) *Decode {
	return &Decode{opts: opts, wake: make(chan struct{}, 1)}
}

// Tokens returns the ids computed since the start.
func (d *Decode) Tokens() uint64 { return d.tokens.Load() }

// Running returns the runs that have not ended.
func (d *Decode) Running() int { return int(d.running.Load()) }

// Start adds a sequence to the batch. It takes the sequence out of the proof
// and releases it at the end of the run, or before it returns an error:
// ErrRequest, ErrStopped, or what handoff.Committed.Sequence says. The caller
// must Close the run, and leave its slot only after that.
func (d *Decode) Start(req Request) (*Run, error) {
	seq, err := req.Committed.Sequence()
	if err != nil {
		return nil, fmt.Errorf("take the sequence: %w", err)
	}
	r, err := d.newRun(req, seq)
	if err != nil {
		seq.Release()
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.stopped {
		r.end("", ErrStopped)
		return nil, ErrStopped
	}
	d.joining = append(d.joining, r)
	d.running.Add(1)
	d.poke()
	return r, nil
}

func (d *Decode) newRun(req Request, seq *kv.Sequence) (*Run, error) {
	vocab := d.opts.Model.Vocab()
	switch {
	case req.LastToken < 0 || int(req.LastToken) >= vocab:
		return nil, fmt.Errorf("%w: last token is outside the vocabulary", ErrRequest)
	case req.MaxOutput < 1:
		return nil, fmt.Errorf("%w: at most %d output tokens", ErrRequest, req.MaxOutput)
	case seq.Len() < 1:
		return nil, fmt.Errorf("%w: no prompt", ErrRequest)
	}
	if err := req.Params.Validate(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrRequest, err)
	}
	return &Run{
		d:       d,
		seq:     seq,
		pages:   seq.Extents,
		sampler: sample.New(req.Params, vocab),
		stop:    sample.NewStop(req.Stops),
		text:    d.opts.NewText(),
		logits:  make([]float32, vocab),
		input:   [1]int32{req.LastToken},
		pos:     seq.Len() - 1,
		max:     req.MaxOutput,
		ready:   make(chan struct{}, 1),
		done:    make(chan struct{}),
	}, nil
}

// Run steps the batch until ctx ends. Then it ends every run with ErrStopped and
// returns nil.
func (d *Decode) Run(ctx context.Context) error {
	var s steps
	var runs []*Run
	for ctx.Err() == nil {
		runs = d.sweep(d.join(runs))
		batch, next := d.runnable(runs)
		if len(batch) == 0 {
			d.wait(ctx, next)
			continue
		}
		d.step(&s, batch)
	}
	d.mu.Lock()
	d.stopped = true
	runs = append(runs, d.joining...)
	d.joining = nil
	d.mu.Unlock()
	for _, r := range runs {
		if !r.gone() {
			d.end(r, "", ErrStopped)
		}
	}
	return nil
}

func (d *Decode) poke() {
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

// join adds the runs that were started since the last step.
func (d *Decode) join(runs []*Run) []*Run {
	d.mu.Lock()
	defer d.mu.Unlock()
	runs = append(runs, d.joining...)
	clear(d.joining)
	d.joining = d.joining[:0]
	return runs
}

// sweep ends what was canceled and drops what has ended.
func (d *Decode) sweep(runs []*Run) []*Run {
	kept := runs[:0]
	for _, r := range runs {
		if !r.gone() && r.canceled.Load() {
			d.end(r, "", ErrCanceled)
		}
		if !r.gone() {
			kept = append(kept, r)
		}
	}
	clear(runs[len(kept):])
	return kept
}

// runnable returns the runs of the next step, and how long until a full mailbox
// reaches its limit (0: none is full). A run at its limit is ended.
func (d *Decode) runnable(runs []*Run) (batch []*Run, next time.Duration) {
	for _, r := range runs {
		if !r.mailboxFull() {
			r.full = time.Time{}
			batch = append(batch, r)
			continue
		}
		now := d.opts.Now()
		if r.full.IsZero() {
			r.full = now
		}
		left := d.opts.SlowLimit - now.Sub(r.full)
		if left <= 0 {
			d.end(r, "", ErrSlowConsumer)
			continue
		}
		if next == 0 || left < next {
			next = left
		}
	}
	return batch, next
}

// wait sleeps until there may be something to do.
func (d *Decode) wait(ctx context.Context, limit time.Duration) {
	var timeout <-chan time.Time
	if limit > 0 {
		t := time.NewTimer(limit)
		defer t.Stop()
		timeout = t.C
	}
	select {
	case <-ctx.Done():
	case <-d.wake:
	case <-timeout:
	}
}

func (d *Decode) end(r *Run, f Finish, err error) {
	r.end(f, err)
	d.running.Add(-1)
}

// gone reports whether the run has ended. Only the loop ends runs.
func (r *Run) gone() bool {
	select {
	case <-r.done:
		return true
	default:
		return false
	}
}

// steps is the scratch of the loop. It holds no numbers of a sequence, only
// where they are, and is cleared after every step.
type steps struct {
	runs   []*Run
	spans  []compute.Span
	tables []*kv.Table
	errs   []error
}

// step runs one token of every run in the batch.
func (d *Decode) step(s *steps, batch []*Run) {
	defer s.clear()
	for _, r := range batch {
		table, err := r.open()
		if err != nil {
			d.end(r, "", err)
			continue
		}
		s.runs = append(s.runs, r)
		s.tables = append(s.tables, table)
		s.spans = append(s.spans, compute.Span{Tokens: r.input[:], Pos: r.pos, Pages: table, Logits: r.logits})
	}
	if len(s.runs) == 0 {
		return
	}
	began := d.opts.Now()
	s.forward(d.opts.Model)
	took := d.opts.Now().Sub(began)
	for i, r := range s.runs {
		r.compute.Add(int64(took))
		err := r.close(s.tables[i], s.spans[i], s.errs[i])
		var f Finish
		if err == nil && r.canceled.Load() {
			err = ErrCanceled // what this step computed goes to nobody
		}
		if err == nil {
			before := r.Output()
			f, err = r.accept()
			d.tokens.Add(uint64(r.Output() - before))
		}
		if err != nil || f != "" {
			d.end(r, f, err)
		}
	}
}

// forward runs the pass. If it fails for the batch, each span is run alone, so
// that the error belongs to those at fault.
func (s *steps) forward(m Forwarder) {
	s.errs = append(s.errs, make([]error, len(s.spans))...)
	if m.Forward(s.spans) == nil {
		return
	}
	for i := range s.spans {
		s.spans[i].Wrote = 0
		if err := m.Forward(s.spans[i : i+1]); err != nil {
			s.errs[i] = fmt.Errorf("%w: %w", ErrModel, err)
		}
	}
}

func (s *steps) clear() {
	clear(s.runs)
	clear(s.spans)
	clear(s.tables)
	clear(s.errs)
	s.runs, s.spans, s.tables, s.errs = s.runs[:0], s.spans[:0], s.tables[:0], s.errs[:0]
}

// open prepares the pages for the next step of the run.
func (r *Run) open() (*kv.Table, error) {
	if !r.proved {
		proof, err := r.seq.TokenBytes(r.pos, r.proof[:0])
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrPages, err)
		}
		r.proof = proof
	}
	if err := r.seq.Extend(r.pos + 1); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrPages, err)
	}
	table, err := r.seq.Table(r.pos, 1)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrPages, err)
	}
	return table, nil
}

// close ends the pass over the pages of the run and, after the first, checks
// the proof.
func (r *Run) close(table *kv.Table, span compute.Span, failed error) error {
	defer table.Close()
	if failed != nil {
		return failed
	}
	if err := wrote(span); err != nil {
		return err
	}
	if err := table.Advance(span.Wrote); err != nil {
		return fmt.Errorf("%w: %w", ErrPages, err)
	}
	table.Close()
	if r.proved {
		return nil
	}
	again, err := r.seq.TokenBytes(r.pos, nil)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrPages, err)
	}
	same := recomputed(r.proof, again)
	clear(again)
	clear(r.proof)
	r.proof, r.proved = nil, true
	if !same {
		return ErrRecompute
	}
	return nil
}
