package sim

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"sync"

	"bulkhead.dev/engine/handoff"
	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/kv/kvtest"
	"bulkhead.dev/infra/id"
)

// transfer is one attempt at one request, and the reference of what may become
// of it.
type transfer struct {
	w       *world
	want    handoff.Expect
	decode  id.Epoch // as the gateway knows it
	slot    *slot    // of the prefill worker
	planned []*life  // that the gateway chose
	content uint64   // what the passes write
	spare   int      // credits beyond the prompt
	verdict chan struct{}

	mu       sync.Mutex
	faulted  bool               // under mu; a fault hit it
	staled   bool               // under mu; its source was given up behind its back
	busy     bool               // under mu; there was no room for it
	acked    bool               // under mu
	commits  [][32]byte         // under mu; roots
	legs     []*leg             // under mu; several if the call came twice
	sessions map[*life]*session // under mu
}

// leg is one run of the prefill side.
type leg struct {
	life   *life
	filler *kv.Filler
	offer  *handoff.Offer

	mu       sync.Mutex
	aborted  bool         // under mu
	handles  []*kv.Sealed // under mu
	manifest []byte       // under mu; plain
	previews [][]byte     // under mu; plain
}

func (u *leg) sealed() []*kv.Sealed {
	u.mu.Lock()
	defer u.mu.Unlock()
	return slices.Clone(u.handles)
}

// session is the announcement to one decode worker. Its fields are under the
// lock of the transfer.
type session struct {
	life     *life
	in       *handoff.Inbound
	closed   bool // given up
	over     bool // refused, committed or given up
	taken    bool // its sequence was
	inflight int
	early    *handoff.Manifest // the last preview that was taken
	tainted  bool              // not every page came as it was
	skipped  bool              // a page was left out
	staled   bool              // another generation was asked for
}

// close gives up on the decode leg, wherever it lives.
func (r *transfer) close() bool {
	r.mu.Lock()
	var open []*session
	for _, s := range r.sessions {
		if !s.life.dead() && !s.closed {
			s.closed, s.over = true, true
			open = append(open, s)
		}
	}
	r.mu.Unlock()
	for _, s := range open {
		s.in.Close()
		r.mu.Lock()
		taken := s.taken
		r.mu.Unlock()
		for _, ref := range kvtest.Refs(s.in.Extents()) {
			info := s.life.pool.Page(ref.Index)
			if !taken && info.Generation == ref.Generation && !info.State.Free() && info.State != kv.StateQuarantined && info.State != kv.StateScrubbing {
				r.w.fail("page %d is %v after its transfer was given up", ref.Index, info.State)
			}
		}
	}
	return len(open) > 0
}

// each does something to the prefill legs that live.
func (r *transfer) each(locked, f func(*leg)) (any bool) {
	r.mu.Lock()
	legs := slices.Clone(r.legs)
	r.faulted = r.faulted || len(legs) > 0
	for _, u := range legs {
		if locked != nil && !u.life.dead() {
			u.mu.Lock()
			locked(u)
			u.mu.Unlock()
		}
	}
	r.mu.Unlock()
	for _, u := range legs {
		if !u.life.dead() {
			f(u)
			any = true
		}
	}
	return any
}

// plain is a manifest without the two things that nothing on the decode leg
// depends on: the lease of the prefill leg and the counts of wiped pages. The root
// covers them.
func plain(m *handoff.Manifest) []byte {
	c := *m
	c.Lease = id.Lease{}
	c.Extents = slices.Clone(m.Extents)
	for i := range c.Extents {
		c.Extents[i].Scrubbed = 0
	}
	return c.Encode()
}

// outlook is what the reference says of a message before it is delivered.
type outlook struct {
	session  *session // nil if this was not announced here
	preview  bool
	enc      []byte
	decoded  *handoff.Manifest
	pristine bool             // nothing that matters was altered
	exact    []handoff.Reason // if any, it is refused for one of these
	pulling  bool             // it is the one that may go on to read pages
}

// begin says what may become of a message.
func (r *transfer) begin(d *life, enc []byte, preview bool) *outlook {
	r.mu.Lock()
	defer r.mu.Unlock()
	o := &outlook{session: r.sessions[d], preview: preview, enc: enc}
	s := o.session
	switch {
	case s == nil:
		o.exact = []handoff.Reason{handoff.WrongTransfer}
		return o
	case s.over || s.inflight > 0:
		o.exact = []handoff.Reason{handoff.Replay}
		return o
	}
	s.inflight++
	o.pulling = true
	m, err := handoff.DecodeManifest(enc)
	if err != nil || m.Preview != preview {
		o.exact = []handoff.Reason{handoff.BadManifest}
		return o
	}
	o.decoded = m
	for _, u := range r.legs {
		u.mu.Lock()
		sent := [][]byte{u.manifest}
		if preview {
			sent = u.previews
		}
		for _, p := range sent {
			o.pristine = o.pristine || bytes.Equal(p, plain(m))
		}
		u.mu.Unlock()
	}
	o.exact = r.differs(m, d)
	if len(o.exact) == 0 && s.early != nil && !follows(m, s.early) {
		o.exact = []handoff.Reason{handoff.WrongPreview}
	}
	return o
}

// differs lists the reasons of all fields that are not as announced.
func (r *transfer) differs(m *handoff.Manifest, d *life) (out []handoff.Reason) {
	add := func(differ bool, reason handoff.Reason) {
		if differ {
			out = append(out, reason)
		}
	}
	e := r.want
	add(m.Version != e.Version, handoff.WrongVersion)
	add(m.Transfer != e.Transfer, handoff.WrongTransfer)
	add(m.Request != e.Request, handoff.WrongRequest)
	add(m.Nonce != e.Nonce, handoff.WrongNonce)
	add(m.Owner != e.Owner, handoff.WrongOwner)
	add(m.PrefillEpoch != e.PrefillEpoch || m.DecodeEpoch != d.epoch, handoff.WrongEpoch)
	add(m.Model != e.Model, handoff.WrongModel)
	add(m.Geometry != geometry.Fingerprint(), handoff.WrongGeometry)
	add(m.TokenDigest != e.TokenDigest, handoff.WrongTokens)
	add(m.Preview && int(m.Tokens) > e.Tokens || !m.Preview && int(m.Tokens) != e.Tokens, handoff.Coverage)
	return out
}

// follows reports whether a preview or manifest goes on where another ended.
func follows(m, early *handoff.Manifest) bool {
	before, now := kvtest.Refs(early.Extents), kvtest.Refs(m.Extents)
	if m.Seed != early.Seed || m.Secret != early.Secret || len(now) < len(before) || m.Preview && len(now) == len(before) {
		return false
	}
	return slices.Equal(now[:len(before)], before)
}

// end compares what became of a message with the outlook.
func (r *transfer) end(ctx context.Context, a *actor, d *life, o *outlook, root [32]byte, err error) {
	w := r.w
	r.mu.Lock()
	defer r.mu.Unlock()
	s := o.session
	if o.pulling {
		s.inflight--
	}
	if d.dead() {
		return // nobody has seen it
	}
	if err == nil {
		w.note(a, "taken, preview %v", o.preview)
		switch {
		case len(o.exact) > 0:
			w.fail("%s: taken, %v expected", a.name, o.exact)
		case s.closed:
			w.fail("%s: taken after it was given up", a.name)
		case !o.preview && (!o.pristine || s.tainted):
			w.fail("%s: committed although altered: manifest pristine %v, pages tainted %v", a.name, o.pristine, s.tainted)
		case !o.preview && root != handoff.Root(o.enc):
			w.fail("%s: the root is not that of the manifest", a.name)
		}
		if o.preview {
			s.early = o.decoded
			return
		}
		s.over = true
		if r.commits = append(r.commits, root); len(r.commits) > 1 {
			w.fail("%s: committed %d times", a.name, len(r.commits))
		}
		return
	}
	reason := w.refused(a, err)
	if o.pulling {
		s.over = true
	}
	if len(o.exact) > 0 {
		if !slices.Contains(o.exact, reason) {
			w.fail("%s: refused with %v, %v expected", a.name, err, o.exact)
		}
		return
	}
	ok := false
	switch reason {
	case handoff.Canceled:
		ok = s.closed || ctx.Err() != nil
	case handoff.Fabric:
		ok = r.faulted || r.died() || !o.pristine
	case handoff.Generation:
		ok = r.staled || s.staled || !o.pristine
	case handoff.Digest:
		ok = s.tainted || !o.pristine
	case handoff.Coverage:
		ok = s.skipped || !o.pristine
	}
	if !ok {
		w.fail("%s: refused with %v without a cause", a.name, err)
	}
}

// refused counts a refusal and checks that it is one of the closed list.
func (w *world) refused(a *actor, err error) handoff.Reason {
	w.note(a, "%v", err)
	refusal, ok := errors.AsType[*handoff.Refusal](err)
	if !ok || !slices.Contains(handoff.Reasons(), refusal.Reason) {
		w.fail("%s: %v is not a refusal for a reason", a.name, err)
		return ""
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.tally.refusals[refusal.Reason]++
	return refusal.Reason
}

// died reports whether a worker that was chosen died.
func (r *transfer) died() bool {
	return slices.ContainsFunc(r.planned, (*life).dead)
}

// finish judges the transfer when everything has ended.
func (r *transfer) finish() {
	r.mu.Lock()
	defer r.mu.Unlock()
	w, t := r.w, r.w.tally
	t.transfers++
	t.commits += len(r.commits)
	if r.busy {
		t.busy++
	}
	if r.acked {
		t.acks++
		if len(r.commits) != 1 {
			w.fail("acknowledged with %d commits", len(r.commits))
		}
	}
	if !r.faulted && !r.busy && !r.died() {
		t.clean++
		if !r.acked {
			w.fail("transfer %s met no fault and was not acknowledged", r.want.Transfer)
		}
	}
}
