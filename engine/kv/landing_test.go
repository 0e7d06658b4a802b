package kv_test

import (
	"errors"
	"runtime"
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

var key = kv.DigestKey{Alg: kv.GMAC, Secret: [32]byte{9}}

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
		{name: "other generation", want: kv.ErrDigest, claim: func(c *kv.Claim) { c.Pages[0].Generation++ }},
		{name: "other key", want: kv.ErrDigest, claim: func(c *kv.Claim) { c.Key.Secret[0]++ }},
		{name: "other algorithm", want: kv.ErrDigest, claim: func(c *kv.Claim) { c.Key.Alg++ }},
		{name: "one position fewer", want: kv.ErrCoverage, claim: func(c *kv.Claim) { c.Tokens-- }},
		{name: "one position more", want: kv.ErrCoverage, claim: func(c *kv.Claim) { c.Tokens++ }},
		{name: "one page of positions more", want: kv.ErrCoverage, claim: func(c *kv.Claim) { c.Tokens += 16 }},
		{name: "no positions", want: kv.ErrCoverage, claim: func(c *kv.Claim) { c.Tokens = 0 }},
		{name: "one page claimed too few", want: kv.ErrCoverage, claim: func(c *kv.Claim) { c.Pages = c.Pages[:2] }},
		{name: "one page granted too many", want: kv.ErrCoverage, grant: 4},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			from := kvtest.Pool(t, kv.Config{})
			to := kvtest.Pool(t, kv.Config{})
			s := kvtest.Sealed(t, from, alice, tokens, 1)
			defer s.Release()
			l := landing(t, to, alice, 5, max(3, tc.grant))
			kvtest.Copy(t, s, l)
			if tc.landed != nil {
				assert.NoError(t, l.Receive(func(land func(int) []byte) error {
					tc.landed([][]byte{land(0), land(1), land(2)})
					return nil
				}))
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
	var kept func(int) []byte
	broken := errors.New("broken")
	assert.ErrorIs(t, l.Receive(func(land func(int) []byte) error {
		kept = land
		assert.True(t, land(3) == nil)
		assert.True(t, land(-1) == nil)
		assert.Equal(t, len(land(2)), p.Geometry().PageBytes())
		assert.Equal(t, cap(land(2)), p.Geometry().PageBytes())
		_, err := l.Commit(kv.Claim{Tokens: 48, Key: key, Pages: make([]kv.PageClaim, 3)})
		assert.ErrorIs(t, err, kv.ErrOpen)
		assert.ErrorIs(t, l.Receive(nil), kv.ErrOpen)
		assert.ErrorIs(t, l.Grant(1), kv.ErrOpen)
		l.Abort()
		assert.Equal(t, p.Stats().Quarantined, 3)
		assert.Equal(t, p.Page(0).Reason, kv.WriterOpen)
		return broken
	}), broken)
	assert.True(t, kept(0) == nil)
	assert.Equal(t, p.Stats().Free, 4)
	assert.ErrorIs(t, l.Receive(nil), kv.ErrStale)
	_, err := l.Commit(kv.Claim{})
	assert.ErrorIs(t, err, kv.ErrStale)
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
			kvtest.Copy(t, s, l)
			c := kv.Claim{Tokens: tc.tokens, Key: key}
			assert.NoError(t, l.Receive(func(land func(int) []byte) error {
				pages := [][]byte{land(0), land(1)}
				tc.make(pages)
				for i, page := range pages {
					c.Pages = append(c.Pages, kv.PageClaim{Generation: 1, Sum: kv.SumOf(key, i, 1, page)})
				}
				return nil
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

// Between the verification and the commit nothing can write: a receive, or a
// second commit, that comes meanwhile is refused.
func TestCommitIsExclusive(t *testing.T) {
	t.Parallel()
	// Big enough that verifying takes a while.
	g := kv.Geometry{Layers: 64, KVHeads: 8, HeadDim: 64, PageTokens: 16, DType: kv.F32, Layout: 1}
	p := kvtest.Pool(t, kv.Config{Pages: 8, Geometry: g})
	s := kvtest.Sealed(t, p, alice, 64, 1)
	defer s.Release()
	l := landing(t, p, alice, 4, 4)
	kvtest.Copy(t, s, l)
	c := kvtest.Claim(t, s, key)
	first := l.Extents()[0].First
	done := make(chan struct{})
	tried := make(chan error)
	go func() {
		for p.Page(first).Readers == 0 {
			select {
			case <-done:
				tried <- errors.New("commit was over before it was seen")
				return
			default:
				runtime.Gosched()
			}
		}
		tried <- l.Receive(func(land func(int) []byte) error { land(0)[0] ^= 1; return nil })
	}()
	seq, err := l.Commit(c)
	close(done)
	assert.True(t, <-tried != nil)
	assert.NoError(t, err)
	b, err := seq.TokenBytes(0, nil)
	assert.NoError(t, err)
	assert.True(t, string(b) == string(kvtest.Token(g, 1, 0)))
	seq.Release()
}
