package handoff

import (
	"context"
	"errors"
	"slices"
	"sync"

	"bulkhead.dev/engine/fabric"
	"bulkhead.dev/engine/kv"
)

type inboundState uint8

const (
	expected inboundState = iota
	pulling
	committed
	refused
)

// Inbound is one announced transfer on the decode leg.
type Inbound struct {
	receiver *Receiver
	want     Expect
	landing  *kv.Landing
	from     fabric.Reader
	ctx      context.Context // ends a pull in flight
	cancel   context.CancelFunc
	done     chan struct{} // closed when the state is final

	mu      sync.Mutex
	state   inboundState // under mu
	early   *Manifest    // the last preview; the puller's while the state is pulling
	closed  bool         // under mu
	outcome *Committed   // under mu; set in state committed
	refusal *Refusal     // under mu; set in state refused
}

// Wait blocks until the transfer is committed or refused, or until ctx ends,
// which closes the Inbound. Every error is a *Refusal.
func (in *Inbound) Wait(ctx context.Context) (*Committed, error) {
	select {
	case <-in.done:
	case <-ctx.Done():
		in.Close()
		return nil, refuse(Canceled, ctx.Err())
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.refusal != nil {
		return nil, in.refusal
	}
	return in.outcome, nil
}

// Extents returns the pages that were granted for the transfer so far, also
// after a refusal.
func (in *Inbound) Extents() []kv.Extent { return in.landing.Extents() }

// Close gives up what was not taken: a transfer that is expected or in flight
// is refused, a sequence that nobody took is released. A sequence that was
// taken is not touched. It may be called any number of times and does not wait
// for a pull in flight; the pages that one has open are quarantined until it
// ends.
func (in *Inbound) Close() {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.closed {
		return
	}
	in.closed = true
	in.cancel()
	in.receiver.forget(in.want.Transfer)
	switch in.state {
	case expected:
		in.end(nil, refuse(Canceled, nil))
	case pulling:
		in.landing.Abort() // pull ends the state
	case committed:
		in.outcome.discard()
	}
}

// end makes the state final. Callers hold mu.
func (in *Inbound) end(c *Committed, r *Refusal) {
	if c != nil {
		in.state, in.outcome = committed, c
	} else {
		in.state, in.refusal = refused, r
		in.landing.Abort()
	}
	close(in.done)
}

// begin makes the caller the only one who pulls. The context ends with the
// transfer.
func (in *Inbound) begin(ctx context.Context) (context.Context, func(), *Refusal) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.closed || in.state != expected {
		return nil, nil, refuse(Replay, nil)
	}
	in.state = pulling
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(in.ctx, cancel)
	return ctx, func() { stop(); cancel() }, nil
}

// preview pulls what a preview adds and then waits for the next, or for the
// manifest.
func (in *Inbound) preview(ctx context.Context, encoding []byte) error {
	ctx, stop, refusal := in.begin(ctx)
	if refusal != nil {
		return refusal
	}
	defer stop()
	m, refusal := in.check(encoding, true)
	if refusal == nil {
		refusal = in.land(ctx, m)
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	if refusal == nil && in.closed {
		refusal = refuse(Canceled, nil)
	}
	if refusal != nil {
		in.receiver.forget(in.want.Transfer)
		in.end(nil, refusal)
		return refusal
	}
	in.state = expected
	return nil
}

func (in *Inbound) pull(ctx context.Context, manifest []byte) ([32]byte, error) {
	ctx, stop, refusal := in.begin(ctx)
	if refusal != nil {
		return [32]byte{}, refusal
	}
	defer stop()
	c, refusal := in.prove(ctx, manifest)
	return in.finish(c, refusal)
}

// finish ends a pull. Close may have come at any moment since it began, also
// after the commit, when there was no landing any more that it could abort.
func (in *Inbound) finish(c *Committed, refusal *Refusal) ([32]byte, error) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if refusal == nil && in.closed {
		c.discard()
		refusal = refuse(Canceled, nil)
	}
	in.receiver.forget(in.want.Transfer)
	if refusal != nil {
		in.end(nil, refusal)
		return [32]byte{}, refusal
	}
	in.end(c, nil)
	return c.root, nil
}

// check does steps 2 and 3 of the package comment.
func (in *Inbound) check(encoding []byte, preview bool) (*Manifest, *Refusal) {
	m, err := DecodeManifest(encoding)
	if err != nil {
		return nil, refuse(BadManifest, err)
	}
	if m.Preview != preview {
		return nil, refuse(BadManifest, errors.New("a preview in place of a manifest, or the reverse"))
	}
	if r := in.receiver.refusal(m, in.want); r != nil {
		return nil, r
	}
	return m, nil
}

// land does steps 4 and 5 for the pages that were not pulled before.
func (in *Inbound) land(ctx context.Context, m *Manifest) *Refusal {
	refs, have := m.refs(), 0
	if e := in.early; e != nil {
		before := e.refs()
		have = len(before)
		// The digests under the key of the manifest would tell too, but later.
		if m.Seed != e.Seed || m.Secret != e.Secret || len(refs) < have || !slices.Equal(refs[:have], before) {
			return refuse(WrongPreview, nil)
		}
		if m.Preview && len(refs) == have {
			return refuse(WrongPreview, errors.New("a preview that adds nothing"))
		}
	}
	in.early = m
	if refs = refs[have:]; len(refs) == 0 {
		return nil
	}
	if err := in.landing.Grant(len(refs)); err != nil {
		return refuse(grantReason(err), err)
	}
	if err := in.landing.Receive(m.key(), refs, func(into *kv.Intake) error {
		return in.from.ReadPages(ctx, m.Transfer, m.Secret, refs, into)
	}); err != nil {
		return refuse(readReason(ctx, err), err)
	}
	return nil
}

// verify does steps 2 to 6 of the package comment.
func (in *Inbound) verify(ctx context.Context, encoding []byte) (*Committed, *Refusal) {
	m, refusal := in.check(encoding, false)
	if refusal != nil {
		return nil, refusal
	}
	early := 0
	if in.early != nil {
		early = len(in.early.refs())
	}
	if refusal := in.land(ctx, m); refusal != nil {
		return nil, refusal
	}
	seq, err := in.landing.Commit(m.claim())
	if err != nil {
		return nil, refuse(commitReason(err), err)
	}
	return &Committed{
		seq: seq, tokens: seq.Len(), root: Root(encoding), extents: seq.Extents(), early: early,
		bytes: uint64(len(m.Sums)) * uint64(seq.Geometry().PageBytes()),
	}, nil
}

func grantReason(err error) Reason {
	if errors.Is(err, kv.ErrNoCredit) {
		return Exhausted
	}
	return Canceled // the landing was aborted
}

func readReason(ctx context.Context, err error) Reason {
	switch {
	case ctx.Err() != nil || errors.Is(err, kv.ErrStale):
		return Canceled // kv.ErrStale is our landing, fabric.ErrStale their pages
	case errors.Is(err, fabric.ErrStale):
		return Generation
	case errors.Is(err, kv.ErrCoverage):
		return Coverage // the fabric says that all is well, and left pages out
	}
	return Fabric
}

func commitReason(err error) Reason {
	switch {
	case errors.Is(err, kv.ErrDigest):
		return Digest
	case errors.Is(err, kv.ErrCoverage):
		return Coverage
	}
	return Canceled
}

// Committed is the proof that a prompt arrived whole. Only a pull that verified
// everything makes one.
type Committed struct {
	tokens  int
	root    [32]byte
	extents []kv.Extent
	bytes   uint64
	early   int

	mu    sync.Mutex
	seq   *kv.Sequence // under mu
	taken bool         // under mu
}

// Sequence hands the sequence over, once. The caller releases it. ErrStale (of
// package kv) means that it was taken before, or given up by Close.
func (c *Committed) Sequence() (*kv.Sequence, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.taken {
		return nil, kv.ErrStale
	}
	c.taken = true
	return c.seq, nil
}

// discard releases the sequence if nobody took it.
func (c *Committed) discard() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.taken {
		c.taken = true
		c.seq.Release()
	}
}

// Tokens returns the number of positions that were found written in the
// verified pages.
func (c *Committed) Tokens() int { return c.tokens }

// Root identifies the manifest that was verified.
func (c *Committed) Root() [32]byte { return c.root }

// Extents returns the pages of this leg that hold the prompt.
func (c *Committed) Extents() []kv.Extent { return c.extents }

// Early returns how many pages were pulled before the prompt was complete.
func (c *Committed) Early() int { return c.early }

// Bytes returns the size of the pages that were read.
func (c *Committed) Bytes() uint64 { return c.bytes }
