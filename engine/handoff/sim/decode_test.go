package sim

import (
	"context"
	"errors"
	"sync"

	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/kv/kvtest"
)

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
		err = w.pass(a, d, r, q.seq, length, n, "decode pass", during)
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
