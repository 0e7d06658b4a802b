package kv_test

import (
	"bytes"
	"errors"
	"io"
	"testing"

	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/kv/kvtest"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
)

func landing(t *testing.T, p *kv.Pool, owner id.Owner, credits, grant int) *kv.Landing {
	t.Helper()
	c, err := p.Reserve(owner, credits)
	assert.NoError(t, err)
	l, err := c.Land(id.NewLease())
	assert.NoError(t, err)
	t.Cleanup(l.Abort)
	if grant > 0 {
		assert.NoError(t, l.Grant(grant))
	}
	return l
}

var key = kvtest.Key

// Every way in which landed pages can differ from the claim, and the claim from
// the pages. Each must be refused and must give everything back.
func TestCommitRefuses(t *testing.T) {
	t.Parallel()
	const tokens = 40
	for _, tc := range []struct {
		name   string
		want   error
		grant  int
		claim  func(c *kv.Claim)
		landed func(pages [][]byte)
	}{
		{name: "nothing landed", want: kv.ErrDigest, landed: func(p [][]byte) { clear(p[0]); clear(p[1]); clear(p[2]) }},
		{name: "one bit", want: kv.ErrDigest, landed: func(p [][]byte) { p[1][77] ^= 4 }},
		{name: "one bit in the padding", want: kv.ErrDigest, landed: func(p [][]byte) { p[2][len(p[2])-1] ^= 1 }},
		{name: "pages swapped", want: kv.ErrDigest, landed: func(p [][]byte) {
			for i := range p[0] {
				p[0][i], p[1][i] = p[1][i], p[0][i]
			}
		}},
		{name: "other generation", want: kv.ErrCoverage, claim: func(c *kv.Claim) { c.Pages[0].From.Generation++ }},
		{name: "other page", want: kv.ErrCoverage, claim: func(c *kv.Claim) { c.Pages[2].From.Index++ }},
		{name: "other key", want: kv.ErrDigest, claim: func(c *kv.Claim) { c.Key.Secret[0]++ }},
		{name: "other algorithm", want: kv.ErrDigest, claim: func(c *kv.Claim) { c.Key.Alg++ }},
		{name: "one position fewer", want: kv.ErrCoverage, claim: func(c *kv.Claim) { c.Tokens-- }},
		{name: "one position more", want: kv.ErrCoverage, claim: func(c *kv.Claim) { c.Tokens++ }},
		{name: "one page of positions more", want: kv.ErrCoverage, claim: func(c *kv.Claim) { c.Tokens += 16 }},
		{name: "no positions", want: kv.ErrCoverage, claim: func(c *kv.Claim) { c.Tokens = 0 }},
		{name: "one page claimed too few", want: kv.ErrCoverage, claim: func(c *kv.Claim) { c.Pages = c.Pages[:2] }},
		{name: "a page granted that never landed", want: kv.ErrCoverage, grant: 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			from := kvtest.Pool(t, kv.Config{})
			to := kvtest.Pool(t, kv.Config{})
			s := kvtest.Sealed(t, from, alice, tokens, 1)
			defer s.Release()
			l := landing(t, to, alice, 5, 3)
			assert.NoError(t, kvtest.Land(s, l, tc.landed))
			if tc.grant > 0 {
				assert.NoError(t, l.Grant(tc.grant))
			}
			c := kvtest.Claim(t, s, key)
			if tc.claim != nil {
				tc.claim(&c)
			}
			_, err := l.Commit(c)
			assert.ErrorIs(t, err, tc.want)
			assert.Equal(t, to.Stats().Free, 16)
			_, err = l.Commit(kvtest.Claim(t, s, key))
			assert.ErrorIs(t, err, kv.ErrStale)
		})
	}
}

// The incident: pages whose digests are right, since the sender made them, but
// which do not hold the positions that it says.
func TestCommitCountsForItself(t *testing.T) {
	t.Parallel()
	for _, pattern := range []kv.Pattern{kv.Zero, kv.NaN} {
		for name, written := range map[string]int{"one token": 1, "one short": 39, "one page short": 32} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				from := kvtest.Pool(t, kv.Config{Pattern: pattern})
				to := kvtest.Pool(t, kv.Config{})
				f := filler(t, from, alice, 3, 3)
				table, err := f.Table(0, 40)
				assert.NoError(t, err)
				kvtest.Write(t, from.Geometry(), table, 0, written, 1)
				assert.NoError(t, table.Advance(40)) // the lie
				table.Close()
				s, err := f.Seal(40)
				assert.NoError(t, err)
				defer s.Release()
				l := landing(t, to, alice, 3, 3)
				kvtest.Copy(t, s, l)
				_, err = l.Commit(kvtest.Claim(t, s, key))
				assert.ErrorIs(t, err, kv.ErrCoverage)
			})
		}
	}
	// And a tail that is not wiped.
	t.Run("bytes after the last position", func(t *testing.T) {
		t.Parallel()
		from := kvtest.Pool(t, kv.Config{})
		to := kvtest.Pool(t, kv.Config{})
		long, short := kvtest.Sealed(t, from, alice, 31, 1), kvtest.Sealed(t, from, alice, 30, 1)
		defer long.Release()
		defer short.Release()
		l := landing(t, to, alice, 2, 2)
		kvtest.Copy(t, long, l)
		c := kvtest.Claim(t, long, key)
		c.Tokens = 30
		_, err := l.Commit(c)
		assert.ErrorIs(t, err, kv.ErrCoverage)
	})
}

func TestReceiveHoldsThePages(t *testing.T) {
	t.Parallel()
	p := kvtest.Pool(t, kv.Config{Pages: 4})
	l := landing(t, p, alice, 4, 3)
	var kept *kv.Intake
	broken := errors.New("broken")
	from := []kv.PageRef{{Index: 7, Generation: 1}, {Index: 8, Generation: 1}, {Index: 9, Generation: 2}}
	page := make([]byte, p.Geometry().PageBytes())
	assert.ErrorIs(t, l.Receive(key, from, func(in *kv.Intake) error {
		kept = in
		assert.Equal(t, in.PageBytes(), len(page))
		_, err := l.Commit(kv.Claim{Tokens: 48, Key: key, Pages: make([]kv.PageClaim, 3)})
		assert.ErrorIs(t, err, kv.ErrOpen)
		assert.ErrorIs(t, l.Receive(key, from, nil), kv.ErrOpen)
		assert.ErrorIs(t, l.Grant(1), kv.ErrOpen)
		l.Abort()
		assert.Equal(t, p.Stats().Quarantined, 3)
		assert.Equal(t, p.Page(0).Reason, kv.WriterOpen)
		return broken
	}), broken)
	assert.ErrorIs(t, kept.Copy(0, page), kv.ErrStale)
	assert.ErrorIs(t, kept.Read(0, bytes.NewReader(page)), kv.ErrStale)
	assert.Equal(t, p.Stats().Free, 4)
	assert.ErrorIs(t, l.Receive(key, from, nil), kv.ErrStale)
	_, err := l.Commit(kv.Claim{})
	assert.ErrorIs(t, err, kv.ErrStale)
}

// What an intake does not take, and that it then has taken nothing.
func TestIntakeRefuses(t *testing.T) {
	t.Parallel()
	p := kvtest.Pool(t, kv.Config{})
	s := kvtest.Sealed(t, p, alice, 40, 1)
	defer s.Release()
	l := landing(t, p, alice, 4, 3)
	refs := kvtest.Refs(s.Extents())
	size := p.Geometry().PageBytes()
	page := bytes.Repeat([]byte{7}, size)

	assert.ErrorIs(t, l.Receive(kv.DigestKey{Alg: 99}, refs, nil), kv.ErrDigest)
	for _, from := range [][]kv.PageRef{nil, refs[:2], append(refs[:3:3], refs[0])} {
		assert.ErrorIs(t, l.Receive(key, from, nil), kv.ErrRange)
	}
	// One page is missing, and read does not say so.
	assert.ErrorIs(t, l.Receive(key, refs, func(in *kv.Intake) error {
		assert.NoError(t, in.Copy(0, page))
		assert.NoError(t, in.Read(2, bytes.NewReader(page)))
		assert.ErrorIs(t, in.Copy(0, page), kv.ErrRange) // twice
		assert.ErrorIs(t, in.Copy(3, page), kv.ErrRange)
		assert.ErrorIs(t, in.Copy(-1, page), kv.ErrRange)
		assert.ErrorIs(t, in.Copy(1, page[1:]), kv.ErrRange)
		assert.ErrorIs(t, in.Copy(1, append(page, 0)), kv.ErrRange)
		assert.ErrorIs(t, in.Read(1, bytes.NewReader(page[1:])), io.ErrUnexpectedEOF)
		return nil
	}), kv.ErrCoverage)
	// It can be done again, and what counts is the last time.
	kvtest.Copy(t, s, l)
	seq, err := l.Commit(kvtest.Claim(t, s, key))
	assert.NoError(t, err)
	seq.Release()
}

// Pages may come in several rounds, under one key.
func TestReceiveInRounds(t *testing.T) {
	t.Parallel()
	p := kvtest.Pool(t, kv.Config{})
	s := kvtest.Sealed(t, p, alice, 60, 1)
	defer s.Release()
	refs := kvtest.Refs(s.Extents())
	claim := kvtest.Claim(t, s, key)
	round := func(l *kv.Landing, k kv.DigestKey, from []kv.PageRef) error {
		return l.Receive(k, from, func(in *kv.Intake) error {
			for i, r := range from {
				if err := s.View(r, func(page []byte) error { return in.Read(i, bytes.NewReader(page)) }); err != nil {
					return err
				}
			}
			return nil
		})
	}
	l := landing(t, p, alice, 4, 2)
	assert.NoError(t, round(l, key, refs[:2]))
	assert.ErrorIs(t, round(l, key, refs[2:3]), kv.ErrRange) // nothing is granted for it
	assert.NoError(t, l.Grant(1))
	other := key
	other.Secret[3]++
	assert.ErrorIs(t, round(l, other, refs[2:3]), kv.ErrDigest)
	assert.NoError(t, round(l, key, refs[2:3]))
	assert.NoError(t, l.Grant(1))
	assert.NoError(t, round(l, key, refs[3:]))
	seq, err := l.Commit(claim)
	assert.NoError(t, err)
	assert.Equal(t, seq.Len(), 60)
	seq.Release()

	// Not before the last.
	l = landing(t, p, alice, 4, 3)
	assert.NoError(t, round(l, key, refs[:3]))
	_, err = l.Commit(claim)
	assert.ErrorIs(t, err, kv.ErrCoverage)
}

// Pages that a sender made up at will, with digests that match.
func TestCommitRefusesMadeUpPages(t *testing.T) {
	t.Parallel()
	g := kvtest.Geometry()
	for _, tc := range []struct {
		name   string
		tokens int
		make   func(pages [][]byte)
		want   error
	}{
		{"as it should be", 20, func([][]byte) {}, nil},
		{"one whole wiped page more", 16, func(p [][]byte) { clear(p[1]) }, kv.ErrCoverage},
		{"a hole", 20, func(p [][]byte) {
			// Slot 5 of the first page, wiped in every layer.
			w := g.DType.Bytes()
			for l := range g.Layers {
				for d := range g.HeadDim {
					clear(p[0][g.KIndex(l, 0, d, 5)*w:][:w])
					clear(p[0][g.VIndex(l, 0, 5, d)*w:][:w])
				}
			}
		}, kv.ErrCoverage},
		{"something behind a gap", 20, func(p [][]byte) { p[1][g.VIndex(1, 0, 15, 2)*g.DType.Bytes()] = 1 }, kv.ErrCoverage},
		{"something in the padding", 20, func(p [][]byte) { p[1][g.PageBytes()-1] = 1 }, kv.ErrCoverage},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			p := kvtest.Pool(t, kv.Config{})
			s := kvtest.Sealed(t, p, alice, 20, 1)
			defer s.Release()
			l := landing(t, p, alice, 2, 2)
			c := kv.Claim{Tokens: tc.tokens, Key: key}
			assert.NoError(t, kvtest.Land(s, l, func(pages [][]byte) {
				tc.make(pages)
				for i, page := range pages {
					from := kvtest.Refs(s.Extents())[i]
					c.Pages = append(c.Pages, kv.PageClaim{From: from, Sum: kv.SumOf(key, i, from.Generation, page)})
				}
			}))
			seq, err := l.Commit(c)
			if tc.want != nil {
				assert.ErrorIs(t, err, tc.want)
				return
			}
			assert.NoError(t, err)
			seq.Release()
		})
	}
}

// While pages are being taken in, and after they were, nobody else can take
// any in: a commit is of what was digested.
func TestIntakeIsExclusive(t *testing.T) {
	t.Parallel()
	p := kvtest.Pool(t, kv.Config{})
	s := kvtest.Sealed(t, p, alice, 64, 1)
	defer s.Release()
	l := landing(t, p, alice, 4, 4)
	refs := kvtest.Refs(s.Extents())
	var late *kv.Intake
	started, release := make(chan struct{}), make(chan struct{})
	stored := make(chan error)
	assert.ErrorIs(t, l.Receive(key, refs, func(in *kv.Intake) error {
		late = in
		// A reader that forgot a goroutine: Receive waits for its store.
		go func() { stored <- in.Read(0, gated{started, release}) }()
		<-started
		go func() { close(release) }()
		return nil
	}), kv.ErrCoverage)
	assert.ErrorIs(t, <-stored, errGated)
	kvtest.Copy(t, s, l)
	assert.ErrorIs(t, late.Copy(0, make([]byte, p.Geometry().PageBytes())), kv.ErrStale)
	assert.ErrorIs(t, l.Receive(key, refs, nil), kv.ErrRange)
	seq, err := l.Commit(kvtest.Claim(t, s, key))
	assert.NoError(t, err)
	b, err := seq.TokenBytes(0, nil)
	assert.NoError(t, err)
	assert.True(t, string(b) == string(kvtest.Token(p.Geometry(), 1, 0)))
	seq.Release()
}

var errGated = errors.New("gated")

// gated is a stream that says when it is read, and fails when it is told.
type gated struct{ started, release chan struct{} }

func (g gated) Read([]byte) (int, error) {
	close(g.started)
	<-g.release
	return 0, errGated
}
