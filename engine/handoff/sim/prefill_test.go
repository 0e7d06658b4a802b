package sim

import (
	"context"
	"errors"
	"time"

	"bulkhead.dev/engine/fabric"
	"bulkhead.dev/engine/handoff"
	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/kv/kvtest"
)

// passer is a handle that passes write through.
type passer interface {
	Table(pos, count int) (*kv.Table, error)
	Extents() []kv.Extent
}

// pass stands in for a kernel. It writes until its very end, whatever was given
// up meanwhile.
func (w *world) pass(a *actor, l *life, r *transfer, h passer, pos, n int, where string, during func()) error {
	table, err := h.Table(pos, n)
	if err != nil {
		return err
	}
	defer table.Close()
	refs, all := kvtest.Refs(h.Extents())[:geometry.PagesFor(pos+n)], kvtest.Pages(w.t, geometry, table, pos+n)
	defer l.track.hold(refs)()
	for i := geometry.PagesFor(pos); i < len(refs); i++ {
		l.track.fresh(refs[i], all[i])
	}
	pages := all[pos/geometry.PageTokens:]
	kvtest.Write(w.t, geometry, table, pos, n, r.content)
	var written [][]byte
	for _, p := range pages {
		written = append(written, append([]byte(nil), p...))
	}
	if during != nil {
		during()
	}
	alive := a.step(l, r, where)
	for i, p := range pages {
		copy(p, written[i])
	}
	if !alive {
		return errUnreachable
	}
	return table.Advance(n)
}

// gone reports whether an error on the prefill leg is one that a fault explains.
func (w *world) gone(a *actor, l *life, r *transfer, err error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	ok := errors.Is(err, kv.ErrStale) || errors.Is(err, handoff.ErrWithdrawn) || errors.Is(err, fabric.ErrDuplicate) && len(r.legs) > 1
	if !l.dead() && (!ok || !r.faulted) {
		w.fail("%s: prefill leg failed without a cause: %v", a.name, err)
	}
	return err
}

// prefill is the prefill worker with one prompt.
func (w *world) prefill(ctx context.Context, a *actor, l *life, r *transfer) (acked bool, err error) {
	e := r.want
	credits, err := l.pool.Reserve(e.Owner, geometry.PagesFor(e.Tokens))
	if err != nil {
		return false, r.full(err)
	}
	if !a.step(l, r, "prefill reserved") {
		l.cleanup(credits.Return)
		return false, errUnreachable
	}
	filler, err := credits.Fill(a.id())
	if err != nil {
		return false, w.gone(a, l, r, err)
	}
	defer l.cleanup(filler.Abort)
	meta := handoff.Meta{
		Version: e.Version, Request: e.Request, Transfer: e.Transfer, Nonce: e.Nonce,
		PrefillEpoch: l.epoch, DecodeEpoch: r.decode, Model: model, TokenDigest: e.TokenDigest,
	}
	f := a.pick(4, metaFaults...)
	switch f {
	case versionSkew:
		meta.Version = handoff.Whole + handoff.Early - meta.Version
	case otherTokens:
		meta.TokenDigest = handoff.TokenDigest([]int32{7})
	}
	if f != noFault {
		w.injected(a, r, "prefill", f)
	}
	u := &leg{life: l, filler: filler, offer: handoff.NewOffer(l.server, meta)}
	defer l.cleanup(u.offer.Abort)
	r.mu.Lock()
	r.legs = append(r.legs, u)
	r.mu.Unlock()

	sent := 0
	for pos := 0; pos < e.Tokens; {
		n := 1 + a.IntN(min(e.Tokens-pos, 40))
		if need := geometry.PagesFor(pos+n) - filler.Pages(); need > 0 {
			if err := filler.Grant(need); err != nil {
				return false, w.gone(a, l, r, err)
			}
		}
		if !a.step(l, r, "prefill granted") {
			return false, errUnreachable
		}
		if err := w.pass(a, l, r, filler, pos, n, "prefill pass", nil); err != nil {
			return false, w.gone(a, l, r, err)
		}
		pos += n
		if meta.Version == handoff.Early && pos/geometry.PageTokens > sent && a.chance(0.7) {
			if err := w.preview(ctx, a, l, r, u); err != nil {
				return false, err
			}
			sent = pos / geometry.PageTokens
		}
		if ctx.Err() != nil {
			return false, ctx.Err()
		}
	}
	sealed, err := filler.Seal(e.Tokens)
	if err != nil {
		return false, w.gone(a, l, r, err)
	}
	u.keep(sealed)
	if !a.step(l, r, "sealed") {
		l.cleanup(sealed.Release)
		return false, errUnreachable
	}
	if err := u.offer.Complete(sealed); err != nil {
		return false, w.gone(a, l, r, err)
	}
	enc := u.offer.Manifest()
	u.sent(w, enc, false)
	w.mu.Lock()
	w.archive = append(w.archive, archived{r, enc})
	w.mu.Unlock()
	if !a.step(l, r, "completed") {
		return false, errUnreachable
	}
	root, err := w.pull(ctx, a, r, enc)
	if err != nil {
		return false, err
	}
	if a.pick(2, flipRoot) != noFault {
		w.injected(a, r, "pulled", flipRoot)
		root[a.IntN(len(root))] ^= 1 << a.IntN(8)
	}
	if !a.step(l, r, "pulled") {
		return false, errUnreachable
	}
	return w.ack(a, r, u, enc, root)
}

// ack acknowledges a root; only that of the offer, while it is open, may pass.
func (w *world) ack(a *actor, r *transfer, u *leg, enc []byte, root [32]byte) (bool, error) {
	u.mu.Lock()
	want := !u.aborted && root == handoff.Root(enc)
	u.mu.Unlock()
	err := u.offer.Ack(root)
	if (err == nil) != want || err != nil && !errors.Is(err, handoff.ErrRoot) {
		w.fail("%s: acknowledged with %v, ok %v expected", a.name, err, want)
	}
	if err == nil {
		w.note(a, "acknowledged")
		r.mu.Lock()
		r.acked = true
		r.mu.Unlock()
	}
	if again := u.offer.Ack(root); !errors.Is(again, handoff.ErrRoot) {
		w.fail("%s: acknowledged twice: %v", a.name, again)
	}
	return err == nil, err
}

func (u *leg) keep(s *kv.Sealed) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.handles = append(u.handles, s)
}

// sent notes what an unaltered message is.
func (u *leg) sent(w *world, enc []byte, preview bool) {
	m, err := handoff.DecodeManifest(enc)
	if err != nil {
		w.fail("an offer that cannot be decoded: %v", err)
		return
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if preview {
		u.previews = append(u.previews, plain(m))
	} else {
		u.manifest = plain(m)
	}
}

// preview offers the pages that are finished.
func (w *world) preview(ctx context.Context, a *actor, l *life, r *transfer, u *leg) error {
	s, err := u.filler.Finished()
	if err != nil {
		return w.gone(a, l, r, err)
	}
	u.keep(s)
	enc, err := u.offer.Preview(s)
	if err != nil {
		return w.gone(a, l, r, err)
	}
	u.sent(w, enc, true)
	if !a.step(l, r, "previewed") {
		return errUnreachable
	}
	send := func(ctx context.Context, b *actor) error {
		_, err := call(ctx, b, r, w.decode, "preview", shortCall, func(ctx context.Context, c *actor, d *life) ([32]byte, error) {
			return w.arrive(ctx, c, d, r, enc, true)
		})
		return err
	}
	if a.pick(6, reorder) != noFault {
		w.injected(a, r, "previewed", reorder)
		b := a.fork("overtaken")
		w.spawn(func() {
			b.sleep(60 * time.Millisecond)
			_ = send(context.Background(), b)
		})
		return nil
	}
	if err := send(ctx, a); err != nil && a.chance(0.7) {
		return err
	}
	return nil
}

// pull sends the manifest, again if nobody answered or another message was just
// at work.
func (w *world) pull(ctx context.Context, a *actor, r *transfer, enc []byte) (root [32]byte, err error) {
	for range 3 {
		root, err = call(ctx, a, r, w.decode, "pull", shortCall, func(ctx context.Context, b *actor, d *life) ([32]byte, error) {
			return w.arrive(ctx, b, d, r, enc, false)
		})
		if err == nil || ctx.Err() != nil {
			break
		}
		a.sleep(40 * time.Millisecond)
	}
	return root, err
}
