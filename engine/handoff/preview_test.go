package handoff

import (
	"context"
	"testing"

	"bulkhead.dev/engine/fabric/fabrictest"
	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/kv/kvtest"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
)

// chunked is a prompt that is computed piece by piece.
type chunked struct {
	t      *testing.T
	b      *bench
	filler *kv.Filler
	pos    int
}

func (b *bench) chunks(t *testing.T) *chunked {
	t.Helper()
	credits, err := b.prefill.Reserve(b.want.Owner, b.prefill.Geometry().PagesFor(b.want.Tokens))
	assert.NoError(t, err)
	f, err := credits.Fill(id.NewLease())
	assert.NoError(t, err)
	t.Cleanup(f.Abort)
	return &chunked{t, b, f, 0}
}

// compute writes the next n positions.
func (c *chunked) compute(n int) {
	c.t.Helper()
	g := c.b.prefill.Geometry()
	if need := g.PagesFor(c.pos+n) - g.PagesFor(c.pos); need > 0 {
		assert.NoError(c.t, c.filler.Grant(need))
	}
	table, err := c.filler.Table(c.pos, n)
	assert.NoError(c.t, err)
	kvtest.Write(c.t, g, table, c.pos, n, c.b.seed)
	assert.NoError(c.t, table.Advance(n))
	table.Close()
	c.pos += n
}

func (c *chunked) preview(o *Offer) []byte {
	c.t.Helper()
	s, err := c.filler.Finished()
	assert.NoError(c.t, err)
	p, err := o.Preview(s)
	assert.NoError(c.t, err)
	return p
}

func (c *chunked) complete(o *Offer) []byte {
	c.t.Helper()
	s, err := c.filler.Seal(c.pos)
	assert.NoError(c.t, err)
	assert.NoError(c.t, o.Complete(s))
	return o.Manifest()
}

// Pages are pulled while the rest is computed, and what comes of it is what
// comes of pulling all of them at the end.
func TestPreviews(t *testing.T) {
	t.Parallel()
	for _, tokens := range []int{60, 64} { // 64: the last preview has all pages
		b := setup(t, tokens)
		o := NewOffer(b.server, b.meta)
		defer o.Abort()
		c := b.chunks(t)
		in := b.expect(t)

		c.compute(20)
		assert.NoError(t, b.receiver.Preview(t.Context(), b.want.Transfer, c.preview(o)))
		assert.Equal(t, b.decode.Stats().Reading, 1)
		c.compute(30)
		assert.NoError(t, b.receiver.Preview(t.Context(), b.want.Transfer, c.preview(o)))
		c.compute(tokens - 50)
		early := 3
		if tokens == 64 {
			assert.NoError(t, b.receiver.Preview(t.Context(), b.want.Transfer, c.preview(o)))
			early = 4
		}
		assert.Equal(t, b.decode.Stats().Reading, early)
		// Nothing is committed before the last.
		select {
		case <-in.done:
			t.Fatal("committed before the manifest")
		default:
		}
		root, err := b.receiver.Pull(t.Context(), b.want.Transfer, c.complete(o))
		assert.NoError(t, err)
		assert.NoError(t, o.Ack(root))
		got, err := in.Wait(t.Context())
		assert.NoError(t, err)
		assert.Equal(t, got.Early(), early)
		assert.Equal(t, got.Tokens(), tokens)
		assert.Equal(t, b.prefill.Stats().Free, 32)
		seq, err := got.Sequence()
		assert.NoError(t, err)
		for pos := range tokens {
			k, err := seq.TokenBytes(pos, nil)
			assert.NoError(t, err)
			assert.True(t, string(k) == string(kvtest.Token(b.decode.Geometry(), b.seed, pos)))
		}
		seq.Release()
	}
}

// Whatever is wrong with a preview, or between previews and manifest, ends the
// transfer for its reason.
func TestPreviewsRefused(t *testing.T) {
	t.Parallel()
	change := func(enc []byte, f func(m *Manifest)) []byte {
		m, err := DecodeManifest(enc)
		if err != nil {
			panic(err)
		}
		f(m)
		return m.Encode()
	}
	for name, tc := range map[string]struct {
		second, manifest func(m *Manifest) // changes them
		version          uint16            // of the announcement
		fault            fabrictest.Fault
		want             Reason
	}{
		"other nonce":                      {second: func(m *Manifest) { m.Nonce[3]++ }, want: WrongNonce},
		"other tokens":                     {second: func(m *Manifest) { m.TokenDigest[3]++ }, want: WrongTokens},
		"more than the prompt":             {second: func(m *Manifest) { m.Tokens, m.Extents[1].Count = 80, 4 }, want: Coverage},
		"pages of before left out":         {second: func(m *Manifest) { m.Tokens = 32; m.Extents = m.Extents[1:] }, want: WrongPreview},
		"another page in place of one":     {second: func(m *Manifest) { m.Extents[0].First += 9 }, want: WrongPreview},
		"another generation of one":        {second: func(m *Manifest) { m.Extents[0].Generation += 9 }, want: WrongPreview},
		"another seed":                     {second: func(m *Manifest) { m.Seed[0]++ }, want: WrongPreview},
		"another secret":                   {second: func(m *Manifest) { m.Secret[0]++ }, want: WrongPreview},
		"nothing new":                      {second: func(m *Manifest) { m.Tokens, m.Extents = 16, m.Extents[:1] }, want: WrongPreview},
		"a manifest":                       {second: func(m *Manifest) { m.Preview, m.Sums = false, make([]kv.Sum, 3) }, want: BadManifest},
		"page outside of the offer":        {second: func(m *Manifest) { m.Extents[1].First += 9 }, want: Fabric},
		"stale page":                       {second: func(m *Manifest) { m.Extents[1].Generation += 9 }, want: Generation},
		"a page left out on the way":       {fault: fabrictest.SkipPage, want: Coverage},
		"a bit flipped on the way":         {fault: fabrictest.FlipBit, want: Digest},
		"manifest with another seed":       {manifest: func(m *Manifest) { m.Seed[0]++ }, want: WrongPreview},
		"manifest with another page":       {manifest: func(m *Manifest) { m.Extents[0].First += 9 }, want: WrongPreview},
		"manifest with another generation": {manifest: func(m *Manifest) { m.Extents[0].Generation += 9 }, want: WrongPreview},
		"manifest with another digest":     {manifest: func(m *Manifest) { m.Sums[0][0]++ }, want: Digest},
		"manifest of fewer positions":      {manifest: func(m *Manifest) { m.Tokens-- }, want: Coverage},
		"version without previews":         {version: Whole, want: WrongVersion},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t, 60)
			if tc.version != 0 {
				b.want.Version = tc.version
			}
			o := NewOffer(b.server, b.meta)
			defer o.Abort()
			c := b.chunks(t)
			in := b.expect(t)
			c.compute(16)
			err := b.receiver.Preview(t.Context(), b.want.Transfer, c.preview(o))
			if err == nil {
				in.from = fabrictest.Faulty{Reader: in.from, Fault: tc.fault}
				c.compute(32)
				p := c.preview(o)
				if tc.second != nil {
					p = change(p, tc.second)
				}
				err = b.receiver.Preview(t.Context(), b.want.Transfer, p)
				in.from = b.from
			}
			if err == nil {
				c.compute(12)
				m := c.complete(o)
				if tc.manifest != nil {
					m = change(m, tc.manifest)
				}
				_, err = b.receiver.Pull(t.Context(), b.want.Transfer, m)
			}
			assert.Equal(t, reason(t, err), tc.want)
			_, err = in.Wait(t.Context())
			assert.Equal(t, reason(t, err), tc.want)
			assert.Equal(t, b.decode.Stats().Free, 32)
			// And it is over: nothing more is taken.
			_, err = b.receiver.Pull(t.Context(), b.want.Transfer, nil)
			assert.Equal(t, reason(t, err), Replay)
			assert.Equal(t, reason(t, b.receiver.Preview(t.Context(), b.want.Transfer, nil)), Replay)
		})
	}
}

// Aborts between and during previews give everything back.
func TestPreviewsCanceled(t *testing.T) {
	t.Parallel()
	for _, during := range []bool{false, true} {
		b := setup(t, 60)
		o := NewOffer(b.server, b.meta)
		c := b.chunks(t)
		in := b.expect(t)
		c.compute(32)
		p := c.preview(o)
		if during {
			in.from = fabrictest.Faulty{Reader: in.from, Before: in.Close}
		}
		err := b.receiver.Preview(t.Context(), b.want.Transfer, p)
		if during {
			assert.Equal(t, reason(t, err), Canceled)
		} else {
			assert.NoError(t, err)
			in.Close()
		}
		_, err = in.Wait(context.Background())
		assert.Equal(t, reason(t, err), Canceled)
		assert.Equal(t, b.decode.Stats().Free, 32)
		// The prefill leg aborts while its loop still computes.
		c.compute(8)
		o.Abort()
		c.filler.Abort()
		assert.Equal(t, b.prefill.Stats().Free, 32)
	}
}

func TestVersions(t *testing.T) {
	t.Parallel()
	assert.Equal(t, Versions(0), []uint16{Early, Whole})
	assert.Equal(t, Versions(Whole), []uint16{Whole})
	assert.Equal(t, Versions(99), []uint16{Early, Whole})
	assert.Equal(t, Common(Versions(0), Versions(0)), Early)
	assert.Equal(t, Common(Versions(0), []uint16{7, Whole}), Whole)
	assert.Equal(t, Common([]uint16{3}, Versions(0)), 0)
	assert.Equal(t, Common(nil, Versions(0)), 0)
}
