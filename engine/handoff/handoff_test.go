package handoff

import (
	"context"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"bulkhead.dev/engine/fabric"
	"bulkhead.dev/engine/fabric/fabrictest"
	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/kv/kvtest"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
)

func TestHandOff(t *testing.T) {
	t.Parallel()
	for _, tokens := range []int{1, 15, 16, 17, 100} {
		t.Run(fmt.Sprint(tokens), func(t *testing.T) {
			t.Parallel()
			b := setup(t, tokens)
			g := b.decode.Geometry()
			o := b.offer(t)
			in := b.expect(t)
			root, err := b.receiver.Pull(t.Context(), b.want.Transfer, o.Manifest())
			assert.NoError(t, err)
			assert.Equal(t, root, o.Root())
			c, err := in.Wait(t.Context())
			assert.NoError(t, err)
			assert.Equal(t, c.Root(), o.Root())
			assert.Equal(t, c.Tokens(), tokens)
			assert.Equal(t, c.Bytes(), o.Bytes())
			assert.Equal(t, o.Tokens(), tokens)
			assert.NoError(t, o.Ack(root))
			assert.ErrorIs(t, o.Ack(root), ErrRoot)
			assert.Equal(t, b.prefill.Stats().Free, 32)

			seq, err := c.Sequence()
			assert.NoError(t, err)
			_, err = c.Sequence()
			assert.ErrorIs(t, err, kv.ErrStale)
			in.Close() // does not touch what was taken
			assert.Equal(t, seq.Len(), tokens)
			for pos := range tokens {
				got, err := seq.TokenBytes(pos, nil)
				assert.NoError(t, err)
				assert.Equal(t, got, kvtest.Token(g, b.seed, pos))
			}
			assert.NoError(t, seq.Extend((g.PagesFor(tokens)+2)*16))
			assert.Equal(t, c.Extents(), seq.Extents()[:len(c.Extents())])
			seq.Release()
			assert.Equal(t, b.decode.Stats().Free, 32)
		})
	}
}

// Every field of a manifest, changed. Each change must be refused, for its
// reason, before a page is granted. The digest fields are the exception: only
// the bytes can tell.
func TestEveryFieldIsChecked(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		field  string
		mutate func(m *Manifest)
		want   Reason
		late   bool // found out after pages were granted
	}{
		{"Version", func(m *Manifest) { m.Version, m.Alg = Whole, kv.GMAC }, WrongVersion, false},
		{"Version", func(m *Manifest) { m.Version = Whole }, BadManifest, false},
		{"Alg", func(m *Manifest) { m.Alg = kv.GMAC }, BadManifest, false},
		{"Version", func(m *Manifest) { m.Version = 3 }, BadManifest, false},
		{"Preview", func(m *Manifest) { m.Preview = true }, BadManifest, false},
		{"Request", func(m *Manifest) { m.Request[15] ^= 1 }, WrongRequest, false},
		{"Transfer", func(m *Manifest) { m.Transfer[15] ^= 1 }, WrongTransfer, false},
		{"Nonce", func(m *Manifest) { m.Nonce[15] ^= 1 }, WrongNonce, false},
		{"Owner", func(m *Manifest) { m.Owner[15] ^= 1 }, WrongOwner, false},
		{"PrefillEpoch", func(m *Manifest) { m.PrefillEpoch[15] ^= 1 }, WrongEpoch, false},
		{"DecodeEpoch", func(m *Manifest) { m.DecodeEpoch[15] ^= 1 }, WrongEpoch, false},
		{"Model", func(m *Manifest) { m.Model[31] ^= 1 }, WrongModel, false},
		{"Geometry", func(m *Manifest) { m.Geometry[31] ^= 1 }, WrongGeometry, false},
		{"TokenDigest", func(m *Manifest) { m.TokenDigest[31] ^= 1 }, WrongTokens, false},
		{"Tokens", func(m *Manifest) { m.Tokens-- }, Coverage, false},
		{"Tokens", func(m *Manifest) { m.Tokens++ }, Coverage, false},
		{"Tokens", func(m *Manifest) { m.Tokens += 16 }, BadManifest, false},
		{"Tokens", func(m *Manifest) { m.Tokens = 0 }, BadManifest, false},
		{"Alg", func(m *Manifest) { m.Alg++ }, BadManifest, false},
		{"Extents", func(m *Manifest) { m.Extents = m.Extents[1:] }, BadManifest, false},
		{"Extents", func(m *Manifest) { m.Extents = append(m.Extents, m.Extents[0]) }, BadManifest, false},
		{"Extents", func(m *Manifest) { m.Extents[0].Count++ }, BadManifest, false},
		{"Extents", func(m *Manifest) { m.Extents[1].First = m.Extents[0].First }, BadManifest, false},
		{"Extents", func(m *Manifest) { m.Extents[0].Generation = 0 }, BadManifest, false},
		{"Extents", func(m *Manifest) { m.Extents[0].Scrubbed = 100 }, BadManifest, false},
		{"Extents", func(m *Manifest) { m.Extents[0].First += 20 }, Fabric, true}, // no such page in the offer
		{"Extents", func(m *Manifest) { m.Extents[0].Generation += 9 }, Generation, true},
		{"Extents", func(m *Manifest) { m.Extents[0], m.Extents[1] = m.Extents[1], m.Extents[0] }, Digest, true},
		{"Secret", func(m *Manifest) { m.Secret[31] ^= 1 }, Fabric, true},
		{"Seed", func(m *Manifest) { m.Seed[31] ^= 1 }, Digest, true},
		{"Sums", func(m *Manifest) { m.Sums = m.Sums[1:] }, BadManifest, false},
		{"Sums", func(m *Manifest) { m.Sums[3][15] ^= 1 }, Digest, true},
		{"Sums", func(m *Manifest) { m.Sums[0], m.Sums[1] = m.Sums[1], m.Sums[0] }, Digest, true},
		// The lease of the other leg is not known here; it is bound by the root,
		// which the offering leg compares.
		{"Lease", func(m *Manifest) { m.Lease[15] ^= 1 }, "", true},
	} {
		t.Run(tc.field+" "+string(tc.want), func(t *testing.T) {
			t.Parallel()
			b := setup(t, 60)
			o := b.offer(t)
			in := b.expect(t)
			m, err := DecodeManifest(o.Manifest())
			assert.NoError(t, err)
			tc.mutate(m)
			root, err := b.receiver.Pull(t.Context(), b.want.Transfer, m.Encode())
			if tc.want == "" {
				assert.NoError(t, err)
				assert.ErrorIs(t, o.Ack(root), ErrRoot)
				return
			}
			assert.Equal(t, reason(t, err), tc.want)
			assert.Equal(t, root, [32]byte{})
			_, err = in.Wait(t.Context())
			assert.Equal(t, reason(t, err), tc.want)
			assert.Equal(t, len(in.Extents()) > 0, tc.late)
			assert.Equal(t, b.decode.Stats().Free, 32)
			// Final: the true manifest comes too late.
			_, err = b.receiver.Pull(t.Context(), b.want.Transfer, o.Manifest())
			assert.Equal(t, reason(t, err), Replay)
		})
	}
}

// What is announced to the decode leg is checked against what the leg is.
func TestExpectRefuses(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		change func(b *bench)
		want   Reason
	}{
		"model":           {func(b *bench) { b.want.Model[0]++ }, WrongModel},
		"geometry":        {func(b *bench) { b.receiver.conf.Geometry.Layers++ }, WrongGeometry},
		"owner":           {func(b *bench) { b.want.Owner = kvtest.Owner(2) }, WrongOwner},
		"no prompt":       {func(b *bench) { b.want.Tokens = 0 }, Coverage},
		"huge prompt":     {func(b *bench) { b.want.Tokens = maxTokens + 1 }, Coverage},
		"too few credits": {func(b *bench) { b.want.Tokens = 49 }, Exhausted},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t, 48)
			credits, err := b.decode.Reserve(b.want.Owner, 3)
			assert.NoError(t, err)
			tc.change(b)
			_, err = b.receiver.Expect(b.want, credits, b.from)
			assert.Equal(t, reason(t, err), tc.want)
			assert.Equal(t, b.decode.Stats().Free, 32)
			_, err = b.receiver.Pull(t.Context(), b.want.Transfer, nil)
			assert.Equal(t, reason(t, err), WrongTransfer)
			_, err = b.receiver.Expect(b.want, credits, b.from)
			assert.Equal(t, reason(t, err), Canceled) // the credits are gone
		})
	}
}

// Everything the way can do to pages.
func TestFabricFaults(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name  string
		fault fabrictest.Fault
		want  Reason
	}{
		{"flip bit", fabrictest.FlipBit, Digest},
		{"short read", fabrictest.ShortRead, Digest},
		{"skip page", fabrictest.SkipPage, Coverage},
		{"swap pages", fabrictest.SwapPages, Digest},
		{"wrong page", fabrictest.WrongPage, Digest},
		{"stale generation", fabrictest.StaleGeneration, Generation},
		{"die midway", fabrictest.DieMidway, Fabric},
		{"wrong secret", fabrictest.WrongSecret, Fabric},
		{"wrong transfer", fabrictest.WrongTransfer, Fabric},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			b := setup(t, 60)
			b.from = fabrictest.Faulty{Reader: b.from, Fault: tc.fault}
			// The same tenant had these pages before, with the same tokens but
			// for one: what is left in them must not stand in for what is not
			// read.
			kvtest.Sealed(t, b.decode, b.want.Owner, 60, 12).Release()
			o := b.offer(t)
			b.expect(t)
			_, err := b.receiver.Pull(t.Context(), b.want.Transfer, o.Manifest())
			assert.Equal(t, reason(t, err), tc.want)
			assert.Equal(t, b.decode.Stats().Free, 32)
		})
	}
}

// The source pages are given up and granted again between offer and read, to
// anybody: generation. And were the page server to be fooled as well, the
// digest.
func TestSourceGrantedAgain(t *testing.T) {
	t.Parallel()
	for _, fooled := range []bool{false, true} {
		b := setup(t, 60)
		o := b.offer(t)
		b.expect(t)
		m, err := DecodeManifest(o.Manifest())
		assert.NoError(t, err)
		o.sealed[0].Release() // a bug: before the acknowledgment
		thief := kvtest.Sealed(t, b.prefill, b.want.Owner, 60, b.seed+1)
		defer thief.Release()
		assert.Equal(t, thief.Extents()[0].First, m.Extents[0].First)
		if fooled {
			b.server.Withdraw(b.want.Transfer)
			assert.NoError(t, b.server.Open(b.want.Transfer, m.Secret, thief))
			m.Extents = thief.Extents()
		}
		_, err = b.receiver.Pull(t.Context(), b.want.Transfer, m.Encode())
		assert.Equal(t, reason(t, err), map[bool]Reason{false: Generation, true: Digest}[fooled])
	}
}

// A prefill leg that wrote fewer positions than it says, with digests that are
// right for what it has.
func TestLyingPrefillIsCounted(t *testing.T) {
	t.Parallel()
	for _, wrote := range []int{1, 59} {
		b := setup(t, 60)
		g := b.prefill.Geometry()
		credits, err := b.prefill.Reserve(b.want.Owner, 4)
		assert.NoError(t, err)
		f, err := credits.Fill(id.NewLease())
		assert.NoError(t, err)
		assert.NoError(t, f.Grant(4))
		table, err := f.Table(0, 60)
		assert.NoError(t, err)
		kvtest.Write(t, g, table, 0, wrote, 1)
		assert.NoError(t, table.Advance(60))
		table.Close()
		sealed, err := f.Seal(60)
		assert.NoError(t, err)
		o := NewOffer(b.server, b.meta)
		assert.NoError(t, o.Complete(sealed))
		b.expect(t)
		_, err = b.receiver.Pull(t.Context(), b.want.Transfer, o.Manifest())
		assert.Equal(t, reason(t, err), Coverage)
		o.Abort()
	}
}

func TestTransferIsPulledOnce(t *testing.T) {
	t.Parallel()
	b := setup(t, 20)
	o := b.offer(t)
	_, err := b.receiver.Pull(t.Context(), b.want.Transfer, o.Manifest())
	assert.Equal(t, reason(t, err), WrongTransfer) // not announced yet
	in := b.expect(t)
	_, err = b.receiver.Pull(t.Context(), b.want.Transfer, o.Manifest())
	assert.NoError(t, err)
	_, err = b.receiver.Pull(t.Context(), b.want.Transfer, o.Manifest())
	assert.Equal(t, reason(t, err), Replay)
	again := func() error {
		credits, err := b.decode.Reserve(b.want.Owner, 2)
		assert.NoError(t, err)
		_, err = b.receiver.Expect(b.want, credits, b.from)
		return err
	}
	assert.Equal(t, reason(t, again()), Replay)
	in.Close()
	assert.Equal(t, reason(t, again()), Replay)
	assert.Equal(t, b.decode.Stats().Free, 32)
}

// A second manifest that comes while the first is being read.
func TestPullIsExclusive(t *testing.T) {
	t.Parallel()
	b := setup(t, 20)
	o := b.offer(t)
	b.from = fabrictest.Faulty{Reader: b.from, Before: func() {
		_, err := b.receiver.Pull(t.Context(), b.want.Transfer, o.Manifest())
		assert.Equal(t, reason(t, err), Replay)
	}}
	in := b.expect(t)
	_, err := b.receiver.Pull(t.Context(), b.want.Transfer, o.Manifest())
	assert.NoError(t, err)
	_, err = in.Wait(t.Context())
	assert.NoError(t, err)
}

func TestSeenIsBounded(t *testing.T) {
	t.Parallel()
	r := NewReceiver(ReceiverConfig{})
	at := func(i int) (t id.Transfer) { t[0], t[1], t[2] = byte(i), byte(i>>8), byte(i>>16); return t }
	for i := range maxSeen + 10 {
		r.remember(at(i))
	}
	assert.Equal(t, len(r.seen), maxSeen)
	_, oldest := r.seen[at(9)]
	_, next := r.seen[at(10)]
	assert.Equal(t, [2]bool{oldest, next}, [2]bool{false, true})
}

// Giving up at every point: before the manifest, during the read, after the
// commit. Nothing stays behind, and the reason is the same for both sides.
func TestClose(t *testing.T) {
	t.Parallel()
	t.Run("before", func(t *testing.T) {
		t.Parallel()
		b := setup(t, 20)
		o := b.offer(t)
		in := b.expect(t)
		in.Close()
		in.Close()
		_, err := in.Wait(t.Context())
		assert.Equal(t, reason(t, err), Canceled)
		_, err = b.receiver.Pull(t.Context(), b.want.Transfer, o.Manifest())
		assert.Equal(t, reason(t, err), Replay)
		assert.Equal(t, b.decode.Stats().Free, 32)
	})
	t.Run("during", func(t *testing.T) {
		t.Parallel()
		b := setup(t, 20)
		var in *Inbound
		b.from = fabrictest.Faulty{Reader: b.from, Before: func() {
			in.Close()
			// The read still has the pages open.
			assert.Equal(t, b.decode.Stats().Quarantined, 2)
		}}
		o := b.offer(t)
		in = b.expect(t)
		_, err := b.receiver.Pull(t.Context(), b.want.Transfer, o.Manifest())
		assert.Equal(t, reason(t, err), Canceled)
		_, err = in.Wait(t.Context())
		assert.Equal(t, reason(t, err), Canceled)
		assert.Equal(t, b.decode.Stats().Free, 32)
	})
	t.Run("between commit and end", func(t *testing.T) {
		t.Parallel()
		b := setup(t, 20)
		o := b.offer(t)
		in := b.expect(t)
		in.state = pulling
		c, refusal := in.verify(t.Context(), o.Manifest())
		assert.True(t, refusal == nil)
		in.Close()
		_, err := in.finish(c, nil)
		assert.Equal(t, reason(t, err), Canceled)
		_, err = in.Wait(t.Context())
		assert.Equal(t, reason(t, err), Canceled)
		assert.Equal(t, b.decode.Stats().Free, 32)
	})
	t.Run("after", func(t *testing.T) {
		t.Parallel()
		b := setup(t, 20)
		o := b.offer(t)
		in := b.expect(t)
		_, err := b.receiver.Pull(t.Context(), b.want.Transfer, o.Manifest())
		assert.NoError(t, err)
		c, err := in.Wait(t.Context())
		assert.NoError(t, err)
		in.Close()
		assert.Equal(t, b.decode.Stats().Free, 32)
		_, err = c.Sequence()
		assert.ErrorIs(t, err, kv.ErrStale)
	})
	t.Run("the waiter goes", func(t *testing.T) {
		t.Parallel()
		b := setup(t, 20)
		in := b.expect(t)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err := in.Wait(ctx)
		assert.Equal(t, reason(t, err), Canceled)
		assert.Equal(t, b.decode.Stats().Free, 32)
	})
	t.Run("the puller goes", func(t *testing.T) {
		t.Parallel()
		b := setup(t, 20)
		o := b.offer(t)
		in := b.expect(t)
		ctx, cancel := context.WithCancel(t.Context())
		b.from = nil
		in.from = fabrictest.Faulty{Reader: in.from, Before: cancel}
		_, err := b.receiver.Pull(ctx, b.want.Transfer, o.Manifest())
		assert.Equal(t, reason(t, err), Canceled)
		_, err = in.Wait(t.Context())
		assert.Equal(t, reason(t, err), Canceled)
	})
}

func TestOfferFails(t *testing.T) {
	t.Parallel()
	b := setup(t, 20)
	o := b.offer(t)
	second := NewOffer(b.server, b.meta)
	assert.ErrorIs(t, second.Complete(kvtest.Sealed(t, b.prefill, b.want.Owner, 20, 1)), fabric.ErrDuplicate)
	assert.Equal(t, b.prefill.Stats().Free, 30) // the second pages were released
	assert.ErrorIs(t, o.Ack([32]byte{1}), ErrRoot)
	assert.Equal(t, b.prefill.Stats().Free, 32)
	o.Abort()
	gone := kvtest.Sealed(t, b.prefill, b.want.Owner, 20, 1)
	gone.Release()
	assert.ErrorIs(t, NewOffer(b.server, b.meta).Complete(gone), kv.ErrStale)
	// Too late: it was withdrawn before it was complete.
	late := NewOffer(b.server, b.meta)
	late.Abort()
	assert.ErrorIs(t, late.Complete(kvtest.Sealed(t, b.prefill, b.want.Owner, 20, 1)), ErrWithdrawn)
	assert.Equal(t, b.prefill.Stats().Free, 32)
}

// Keys, secrets and sums of two offers of the same pages have nothing in
// common.
func TestOffersShareNothing(t *testing.T) {
	t.Parallel()
	b := setup(t, 20)
	var ms []*Manifest
	for range 2 {
		o := b.offer(t)
		m, err := DecodeManifest(o.Manifest())
		assert.NoError(t, err)
		ms = append(ms, m)
		o.Abort()
	}
	assert.True(t, ms[0].Seed != ms[1].Seed)
	assert.True(t, ms[0].Secret != ms[1].Secret)
	assert.True(t, ms[0].key() != ms[1].key())
	assert.True(t, ms[0].Sums[0] != ms[1].Sums[0])
	assert.Equal(t, fmt.Sprintf("%v %+v %#v", ms[0].Secret, ms[0].Secret, ms[0].Secret), "REDACTED REDACTED REDACTED")
}

// The reasons are a closed list: each constant is in it, each has a test above.
func TestReasonsAreClosed(t *testing.T) {
	t.Parallel()
	file, err := parser.ParseFile(token.NewFileSet(), "refusal.go", nil, 0)
	assert.NoError(t, err)
	var declared []Reason
	ast.Inspect(file, func(n ast.Node) bool {
		if v, ok := n.(*ast.ValueSpec); ok {
			for _, value := range v.Values {
				declared = append(declared, Reason(strings.Trim(value.(*ast.BasicLit).Value, `"`)))
			}
		}
		return true
	})
	assert.Equal(t, declared, Reasons())
}

// Only this package turns landed pages into a sequence: no other code of the
// product may so much as name a kv.Claim, which Commit needs.
func TestNobodyElseCommits(t *testing.T) {
	t.Parallel()
	root := filepath.Join("..", "..")
	allowed := []string{filepath.Join("engine", "handoff"), filepath.Join("engine", "kv", "kvtest")}
	files := 0
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		if d.IsDir() {
			if slices.Contains(allowed, rel) || (strings.HasPrefix(d.Name(), ".") && rel != ".") || d.Name() == "shared" {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
		if err != nil {
			return nil //nolint:nilerr // not ours to judge here; the compiler does
		}
		name := ""
		for _, imp := range f.Imports {
			if imp.Path.Value == `"bulkhead.dev/engine/kv"` {
				name = "kv"
				if imp.Name != nil {
					name = imp.Name.Name
				}
			}
		}
		if name == "" {
			return nil
		}
		files++
		if name == "." {
			t.Errorf("%s imports kv without its name", rel)
		}
		ast.Inspect(f, func(n ast.Node) bool {
			if s, ok := n.(*ast.SelectorExpr); ok {
				if x, ok := s.X.(*ast.Ident); ok && x.Name == name && (s.Sel.Name == "Claim" || s.Sel.Name == "PageClaim") {
					t.Errorf("%s names kv.%s", rel, s.Sel.Name)
				}
			}
			return true
		})
		return nil
	})
	assert.NoError(t, err)
	assert.True(t, files > 0)
}
