package sim

import (
	"bytes"
	"context"
	"time"

	"bulkhead.dev/engine/fabric"
	"bulkhead.dev/engine/fabric/fabrictest"
	"bulkhead.dev/engine/handoff"
	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/kv/kvtest"
	"bulkhead.dev/infra/id"
)

const (
	// hop is the longest way of a message that is not late.
	hop = 5 * time.Millisecond
	// shortCall and longCall bound calls that the callee answers at once and
	// those that wait for other calls.
	shortCall = 300 * time.Millisecond
	longCall  = 2 * time.Second
)

type reply[T any] struct {
	v   T
	err error
}

// call sends a message to whoever lives at a place, and waits for the answer.
// The callee's context ends when the caller gives up, unless the news of that is
// late, too.
func call[T any](ctx context.Context, a *actor, r *transfer, to *slot, name string, timeout time.Duration,
	serve func(context.Context, *actor, *life) (T, error),
) (T, error) {
	w := a.w
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	copies, slow, mute, remote := 1, time.Duration(0), false, ctx
	f := a.pick(2, messageFaults...)
	if f != noFault {
		w.injected(a, r, name, f)
	}
	switch f {
	case loseRequest:
		copies = 0
	case loseReply:
		mute = true
	case duplicate:
		copies = 2
	case late:
		slow, remote = timeout, context.Background()
	}
	replies := make(chan reply[T], copies)
	for range copies {
		b := a.fork(name)
		w.spawn(func() {
			b.sleep(hop)
			if slow > 0 {
				time.Sleep(slow)
			}
			l := to.now()
			if l == nil {
				replies <- reply[T]{err: errUnreachable}
				return
			}
			mine, done := context.WithCancel(remote)
			defer done()
			defer context.AfterFunc(l.ctx, done)()
			v, err := serve(mine, b, l)
			b.sleep(hop)
			if !mute && !l.dead() {
				replies <- reply[T]{v, err}
			}
		})
	}
	var last reply[T]
	for range copies {
		select {
		case last = <-replies:
			if last.err == nil {
				return last.v, nil
			}
		case <-ctx.Done():
			return last.v, errTimeout
		}
	}
	if copies == 0 {
		<-ctx.Done()
		return last.v, errTimeout
	}
	return last.v, last.err
}

// wire is the fabric between two workers: pages take their time, and any of them
// can be hit by a fault.
type wire struct {
	*actor
	r *transfer
	s *session
}

// Transport implements fabric.Reader.
func (x *wire) Transport() fabric.Transport { return "sim" }

// ReadPages implements fabric.Reader.
func (x *wire) ReadPages(ctx context.Context, transfer id.Transfer, secret fabric.Secret, refs []kv.PageRef, into fabric.Sink) error {
	b, w, d := x.fork("read"), x.w, x.s.life
	to := kvtest.Refs(x.s.in.Extents())
	defer d.track.hold(to[len(to)-len(refs):])()
	ctx, done := context.WithCancel(ctx)
	defer done()
	defer context.AfterFunc(d.ctx, done)()
	b.step(d, x.r, "read begins")

	faulty := fabrictest.Faulty{Reader: served{x, b}}
	f := b.pick(8, readFaults...)
	last := len(refs) - 1
	if last == 0 && (f == wrongPage || f == swapPages) {
		f = flipPage
	}
	if f != noFault {
		w.injected(b, x.r, "read begins", f)
	}
	taint, skip, stale := false, false, false
	switch f {
	case flipPage:
		page, bit := b.IntN(len(refs)), b.IntN(8*into.PageBytes())
		into = fabrictest.Each{Sink: into, Page: func(i int, p []byte) ([]byte, error) {
			if i == page {
				p[bit/8] ^= 1 << (bit % 8)
			}
			return p, nil
		}}
		taint = true
	case wrongPage:
		faulty.Fault, taint = fabrictest.WrongPage, true
	case swapPages:
		faulty.Fault, taint = fabrictest.SwapPages, true
	case skipPage:
		faulty.Fault, taint, skip = fabrictest.SkipPage, true, true
	case shortRead:
		faulty.Fault, taint = fabrictest.ShortRead, true
	case dieMidway:
		faulty.Fault, taint = fabrictest.DieMidway, true
	case lateStore:
		faulty.Fault, taint = fabrictest.DieMidway, true
		sink, page := into, bytes.Repeat([]byte{0xEE}, into.PageBytes())
		defer w.spawn(func() {
			b.sleep(20 * time.Millisecond)
			if err := sink.Copy(last, page); err == nil {
				w.fail("%s: a page was stored after the read had ended", b.name)
			}
		})
	case staleRef:
		faulty.Fault, taint, stale = fabrictest.StaleGeneration, true, true
	case wrongSecret:
		faulty.Fault, taint = fabrictest.WrongSecret, true
	}
	x.r.mu.Lock()
	x.s.tainted = x.s.tainted || taint
	x.s.skipped = x.s.skipped || skip
	x.s.staled = x.s.staled || stale
	x.r.mu.Unlock()
	err := faulty.ReadPages(ctx, transfer, secret, refs, into)
	if err == nil {
		b.step(d, x.r, "read ends")
	}
	return err
}

// served is the page server at the place of the prefill worker.
type served struct {
	*wire
	b *actor
}

// ReadPages implements fabric.Reader.
func (x served) ReadPages(ctx context.Context, transfer id.Transfer, secret fabric.Secret, refs []kv.PageRef, into fabric.Sink) error {
	p := x.r.slot.now()
	if p == nil {
		return fabric.ErrBroken
	}
	ctx, done := context.WithCancel(ctx)
	defer done()
	return p.server.Local().ReadPages(ctx, transfer, secret, refs, viewing{into, func(i int) error {
		defer p.track.hold(refs[i : i+1])()
		x.b.step(x.s.life, x.r, "page open")
		if p.dead() {
			return fabric.ErrBroken
		}
		return ctx.Err()
	}})
}

// viewing is a sink that holds each page open for a while before it takes it.
type viewing struct {
	fabric.Sink
	before func(i int) error
}

// Copy implements fabric.Sink.
func (v viewing) Copy(i int, page []byte) error {
	if err := v.before(i); err != nil {
		return err
	}
	return v.Sink.Copy(i, page)
}

// arrive hands a manifest or a preview to a decode worker, and judges what comes
// of it.
func (w *world) arrive(ctx context.Context, a *actor, d *life, r *transfer, enc []byte, preview bool) (root [32]byte, err error) {
	where, f := "manifest arrives", flipManifest
	if preview {
		where, f = "preview arrives", flipPreview
	}
	if !a.step(d, r, where) {
		return root, errUnreachable
	}
	if a.pick(6, f) != noFault {
		w.injected(a, r, where, f)
		enc = append([]byte(nil), enc...)
		bit := a.IntN(8 * len(enc))
		enc[bit/8] ^= 1 << (bit % 8)
	}
	o := r.begin(d, enc, preview)
	if preview {
		err = d.receiver.Preview(ctx, r.want.Transfer, enc)
	} else {
		root, err = d.receiver.Pull(ctx, r.want.Transfer, enc)
	}
	r.end(ctx, a, d, o, root, err)
	return root, err
}

// send replays a manifest that was sent once: as it is, for a transfer that it is
// not for, or with the ids of that.
func (w *world) send(a *actor, r *transfer, f fault) bool {
	w.mu.Lock()
	if len(w.archive) == 0 {
		w.mu.Unlock()
		return false
	}
	old := w.archive[a.IntN(len(w.archive))]
	w.mu.Unlock()
	target, enc := old.r, old.enc
	if f != replayOld {
		if target = r; old.r == r {
			return false
		}
	}
	if f == replayForged {
		m, err := handoff.DecodeManifest(enc)
		if err != nil {
			w.fail("a manifest that was sent: %v", err)
			return false
		}
		m.Transfer, m.Request = r.want.Transfer, r.want.Request
		enc = m.Encode()
	}
	w.resend(a, target, enc)
	return true
}

// replay sends a manifest of lives before this one.
func (w *world) replay(a *actor, l *life) {
	w.mu.Lock()
	var old []archived
	for _, m := range w.archive {
		if m.r.slot == l.slot || !l.slot.prefill {
			old = append(old, m)
		}
	}
	w.mu.Unlock()
	if len(old) > 0 {
		m := old[a.IntN(len(old))]
		w.injected(a, m.r, "restarted", replayOld)
		w.resend(a, m.r, m.enc)
	}
}

func (w *world) resend(a *actor, r *transfer, enc []byte) {
	r.mu.Lock()
	r.faulted = true
	r.mu.Unlock()
	b := a.fork("replay")
	w.spawn(func() {
		_, _ = call(context.Background(), b, r, w.decode, "replay", shortCall, func(ctx context.Context, c *actor, d *life) ([32]byte, error) {
			return w.arrive(ctx, c, d, r, enc, false)
		})
	})
}
