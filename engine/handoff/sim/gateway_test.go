package sim

import (
	"context"
	"errors"
	"time"

	"bulkhead.dev/engine/handoff"
	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/kv/kvtest"
	"bulkhead.dev/infra/id"
)

// request is the gateway with one request. It may try again with another
// transfer.
func (w *world) request(a *actor, owner, n uint64) {
	a.sleep(100 * time.Millisecond)
	request, tokens := id.Request(a.id()), 1+a.IntN(80)
	for range 1 + a.IntN(3) {
		s := w.prefills[a.IntN(len(w.prefills))]
		p, d := s.now(), w.decode.now()
		if p == nil || d == nil {
			a.sleep(100 * time.Millisecond)
			continue
		}
		r := &transfer{
			w: w, slot: s, decode: d.epoch, planned: []*life{p, d}, content: owner<<32 | n, spare: a.IntN(3),
			verdict: make(chan struct{}), sessions: map[*life]*session{},
			want: handoff.Expect{
				Version: handoff.Early, Request: request, Transfer: a.id(), Nonce: a.id(), Owner: kvtest.Owner(owner), Lease: a.id(),
				PrefillEpoch: p.epoch, Model: model, TokenDigest: handoff.TokenDigest([]int32{int32(owner), int32(n)}), Tokens: tokens,
			},
		}
		if a.chance(0.3) {
			r.want.Version = handoff.Whole
		}
		w.mu.Lock()
		w.all = append(w.all, r)
		w.mu.Unlock()
		if w.attempt(a, r) {
			return
		}
		a.sleep(50 * time.Millisecond)
	}
}

// attempt announces, has the prompt computed and tells the decode leg to go on.
func (w *world) attempt(a *actor, r *transfer) bool {
	ctx := context.Background()
	defer close(r.verdict)
	a.step(nil, r, "planned")
	_, err := call(ctx, a, r, w.decode, "announce", shortCall, func(ctx context.Context, b *actor, d *life) (struct{}, error) {
		return struct{}{}, w.announce(ctx, b, d, r)
	})
	if err != nil {
		w.note(a, "announce: %v", err)
		if errors.Is(err, errBusy) || a.chance(0.8) {
			r.close()
			return false
		}
	}
	a.step(nil, r, "announced")
	acked, err := call(ctx, a, r, r.slot, "prefill", longCall, func(ctx context.Context, b *actor, p *life) (bool, error) {
		return w.prefill(ctx, b, p, r)
	})
	if err != nil {
		w.note(a, "prefill: %v", err)
	}
	if !acked {
		r.close()
	}
	return acked
}

// full notes that there was no room; any other error is wrong.
func (r *transfer) full(err error) error {
	if _, ok := errors.AsType[kv.ErrExhausted](err); !ok {
		r.w.fail("reserve: %v", err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.busy = true
	return errBusy
}

// announce is the decode worker that is told of a transfer.
func (w *world) announce(ctx context.Context, a *actor, d *life, r *transfer) error {
	e := r.want
	owner, pages := e.Owner, geometry.PagesFor(e.Tokens)+r.spare
	f := a.pick(4, announceFaults...)
	wrong := map[fault]handoff.Reason{
		shortCredits: handoff.Exhausted, otherOwner: handoff.WrongOwner, otherModel: handoff.WrongModel,
		otherVersion: handoff.WrongVersion, noTokens: handoff.Coverage,
	}[f]
	switch f {
	case shortCredits:
		if pages = geometry.PagesFor(e.Tokens) - 1; pages == 0 {
			f, wrong, pages = noFault, "", 1+r.spare
		}
	case otherOwner:
		owner = kvtest.Owner(77)
	case otherModel:
		e.Model[3] ^= 4
	case otherVersion:
		e.Version = handoff.Early + 1
	case noTokens:
		e.Tokens = 0
	}
	if f != noFault {
		w.injected(a, r, "announce", f)
	}
	credits, err := d.pool.Reserve(owner, pages)
	if err != nil {
		return r.full(err)
	}
	if !a.step(d, r, "decode reserved") {
		d.cleanup(credits.Return)
		return errUnreachable
	}
	s := &session{life: d}
	r.mu.Lock()
	_, again := r.sessions[d]
	r.mu.Unlock()
	in, err := d.receiver.Expect(e, credits, &wire{a.fork("wire"), r, s})
	if again && wrong == "" {
		wrong = handoff.Replay
	}
	if (err == nil) != (wrong == "") {
		w.fail("announcement: %v, %q expected", err, wrong)
	}
	if err != nil {
		if got := w.refused(a, err); got != wrong {
			w.fail("announcement: %v, %q expected", err, wrong)
		}
		return err
	}
	s.in = in
	r.mu.Lock()
	r.sessions[d] = s
	r.mu.Unlock()
	b := a.fork("decode")
	w.spawn(func() { w.consume(b, d, r, s) })
	return nil
}
