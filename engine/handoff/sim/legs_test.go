package sim

import (
	"context"
	"errors"
	"sync"
	"time"

	"bulkhead.dev/engine/fabric"
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

// passer is a handle that passes write through.
type passer interface {
	Table(pos, count int) (*kv.Table, error)
	Extents() []kv.Extent
}

// pass stands in for a kernel. It writes until its very end, whatever was given
// up meanwhile.
func (w *world) pass(ctx context.Context, a *actor, l *life, r *transfer, h passer, pos, n int, where string, during func()) error {
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
		if err := w.pass(ctx, a, l, r, filler, pos, n, "prefill pass", nil); err != nil {
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

// sequence is a prompt that was committed, and grows.
type sequence struct {
	w    *world
	seq  *kv.Sequence
	r    *transfer
	mu   sync.Mutex
	gone bool // under mu
}

// spot looks at a few positions.
func (q *sequence) spot(a *actor) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.gone {
		return
	}
	n := q.seq.Len()
	for range min(n, 3) {
		q.look(a.IntN(n))
	}
}

// whole looks at every position.
func (q *sequence) whole(length int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.gone {
		return
	}
	if n := q.seq.Len(); n != length {
		q.w.fail("a sequence of %d positions has %d", length, n)
	}
	for pos := range length {
		q.look(pos)
	}
}

func (q *sequence) look(pos int) {
	got, err := q.seq.TokenBytes(pos, nil)
	if errors.Is(err, kv.ErrOpen) {
		return
	}
	if err != nil || string(got) != string(kvtest.Token(geometry, q.r.content, pos)) {
		q.w.fail("position %d of a committed sequence holds other bytes (%v)", pos, err)
	}
}

func (q *sequence) release(l *life) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.gone = true
	l.track.mu.Lock()
	delete(l.track.live, q.seq.Lease())
	l.track.mu.Unlock()
	q.seq.Release()
}

func (t *track) sequences() (out []*sequence) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, q := range t.live {
		out = append(out, q)
	}
	return out
}

// consume is the decode worker from the announcement on.
func (w *world) consume(a *actor, d *life, r *transfer, s *session) {
	defer d.cleanup(func() {
		r.mu.Lock()
		s.closed, s.over = true, true
		r.mu.Unlock()
		s.in.Close()
	})
	ctx, cancel := context.WithTimeout(d.ctx, longCall+shortCall)
	defer cancel()
	c, err := s.in.Wait(ctx)
	if d.dead() {
		return
	}
	if err != nil {
		r.mu.Lock()
		s.closed, s.over = true, true
		r.mu.Unlock()
		w.refused(a, err)
		return
	}
	if !a.step(d, r, "committed") {
		return
	}
	r.mu.Lock()
	closed := s.closed
	r.mu.Unlock()
	seq, err := c.Sequence()
	if (err != nil) != closed {
		w.fail("%s: sequence taken with %v, given up before %v", a.name, err, closed)
	}
	if err != nil {
		return
	}
	if _, err := c.Sequence(); !errors.Is(err, kv.ErrStale) {
		w.fail("%s: a sequence was taken twice: %v", a.name, err)
	}
	r.mu.Lock()
	s.taken = true
	r.mu.Unlock()
	q := &sequence{w: w, seq: seq, r: r}
	d.track.mu.Lock()
	d.track.live[seq.Lease()] = q
	d.track.mu.Unlock()
	defer d.cleanup(func() { q.release(d) })
	if seq.Owner() != r.want.Owner || seq.Lease() != r.want.Lease || c.Tokens() != r.want.Tokens {
		w.fail("%s: a sequence of %d tokens of another owner or lease", a.name, c.Tokens())
	}
	q.whole(r.want.Tokens)
	w.grow(ctx, a, d, r, q)
}

// grow decodes until the credits end, or earlier.
func (w *world) grow(ctx context.Context, a *actor, d *life, r *transfer, q *sequence) {
	if a.chance(0.5) {
		select {
		case <-r.verdict:
		case <-ctx.Done():
		}
	}
	length := r.want.Tokens
	credits := geometry.PagesFor(length) + r.spare
	for range a.IntN(12) {
		if !a.step(d, r, "decoding") {
			return
		}
		n := 1 + a.IntN(6)
		err := q.seq.Extend(length + n)
		if geometry.PagesFor(length+n) > credits {
			if !errors.Is(err, kv.ErrNoCredit) {
				w.fail("%s: grown beyond the credits: %v", a.name, err)
			}
			break
		}
		if err != nil {
			w.fail("%s: extend: %v", a.name, err)
			return
		}
		var during func()
		if a.pick(4, releaseOpen) != noFault {
			w.injected(a, r, "decode pass", releaseOpen)
			during = func() { q.release(d) }
		}
		err = w.pass(d.ctx, a, d, r, q.seq, length, n, "decode pass", during)
		if d.dead() {
			return
		}
		if (err == nil) != (during == nil) || err != nil && !errors.Is(err, kv.ErrStale) {
			w.fail("%s: decode pass: %v", a.name, err)
		}
		if err != nil {
			return
		}
		length += n
		q.whole(length)
	}
	a.step(d, r, "decoded")
}
