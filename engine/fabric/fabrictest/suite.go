package fabrictest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	"bulkhead.dev/engine/fabric"
	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/kv/kvtest"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
)

// bench is a server with one open offer, and memory to land in.
type bench struct {
	pool     *kv.Pool
	server   *fabric.Server
	reader   fabric.Reader
	sealed   *kv.Sealed
	refs     []kv.PageRef
	transfer id.Transfer
	secret   fabric.Secret
	memory   Memory
}

func (b *bench) read(t *testing.T, refs []kv.PageRef) error {
	return b.reader.ReadPages(t.Context(), b.transfer, b.secret, refs, b.memory)
}

// want checks that page i of the memory holds what the pool has under refs[i].
func (b *bench) want(t *testing.T, refs []kv.PageRef) {
	t.Helper()
	for i, r := range refs {
		assert.NoError(t, b.sealed.View(r, func(page []byte) error {
			if !bytes.Equal(page, b.memory[i]) {
				return fmt.Errorf("page %d differs", i)
			}
			return nil
		}))
	}
}

// Suite runs the behavior that every fabric has. connect makes a reader of a
// server, which lets its memory be mapped; it may register cleanups. All reads
// must come by the transport.
func Suite(t *testing.T, transport fabric.Transport, connect func(t *testing.T, s *fabric.Server) fabric.Reader) {
	setup := func(t *testing.T, tokens int) *bench {
		b := &bench{
			pool:     kvtest.Pool(t, kv.Config{Pages: 64, Memory: kv.Memfd}),
			transfer: id.NewTransfer(), secret: fabric.Secret{1, 2, 3},
		}
		b.server = fabric.NewServer(fabric.ServerOptions{Arena: b.pool})
		b.sealed = kvtest.Sealed(t, b.pool, kvtest.Owner(1), tokens, 7)
		t.Cleanup(b.sealed.Release)
		b.refs = kvtest.Refs(b.sealed.Extents())
		b.memory = NewMemory(len(b.refs), b.pool.Geometry().PageBytes())
		assert.NoError(t, b.server.Open(b.transfer, b.secret, b.sealed))
		b.reader = connect(t, b.server)
		t.Cleanup(func() { assert.Equal(t, b.reader.Transport(), transport) })
		return b
	}

	t.Run("reads in any order, again and again", func(t *testing.T) {
		b := setup(t, 300)
		assert.NoError(t, b.read(t, b.refs))
		b.want(t, b.refs)
		back := make([]kv.PageRef, len(b.refs))
		for i, r := range b.refs {
			back[len(back)-1-i] = r
		}
		for range 3 {
			assert.NoError(t, b.read(t, back))
			b.want(t, back)
		}
		assert.NoError(t, b.read(t, nil))
	})

	t.Run("refuses who has no right", func(t *testing.T) {
		b := setup(t, 20)
		foreign := kvtest.Sealed(t, b.pool, kvtest.Owner(2), 20, 8)
		defer foreign.Release()
		for name, f := range map[string]func(*id.Transfer, *fabric.Secret, []kv.PageRef){
			"unknown transfer": func(x *id.Transfer, _ *fabric.Secret, _ []kv.PageRef) { x[5]++ },
			"wrong secret":     func(_ *id.Transfer, s *fabric.Secret, _ []kv.PageRef) { s[31]++ },
			"no secret":        func(_ *id.Transfer, s *fabric.Secret, _ []kv.PageRef) { *s = fabric.Secret{} },
			"neither":          func(x *id.Transfer, s *fabric.Secret, _ []kv.PageRef) { x[5]++; *s = fabric.Secret{} },
			"page of another":  func(_ *id.Transfer, _ *fabric.Secret, r []kv.PageRef) { r[1] = kvtest.Refs(foreign.Extents())[0] },
			"page of nobody":   func(_ *id.Transfer, _ *fabric.Secret, r []kv.PageRef) { r[1].Index = 60 },
			"no such page":     func(_ *id.Transfer, _ *fabric.Secret, r []kv.PageRef) { r[1].Index = 1 << 31 },
		} {
			transfer, secret, refs := b.transfer, b.secret, append([]kv.PageRef(nil), b.refs...)
			f(&transfer, &secret, refs)
			err := b.reader.ReadPages(t.Context(), transfer, secret, refs, b.memory)
			if err == nil {
				t.Errorf("%s: served", name)
				continue
			}
			assert.ErrorIs(t, err, fabric.ErrRefused)
		}
		// A refusal spoils nothing.
		assert.NoError(t, b.read(t, b.refs))
		b.want(t, b.refs)
	})

	t.Run("refuses another generation", func(t *testing.T) {
		b := setup(t, 20)
		for _, d := range []uint64{1, ^uint64(0), 1 << 32} {
			refs := append([]kv.PageRef(nil), b.refs...)
			refs[1].Generation += d
			assert.ErrorIs(t, b.read(t, refs), fabric.ErrStale)
		}
		assert.NoError(t, b.read(t, b.refs))
	})

	t.Run("refuses after release and withdrawal", func(t *testing.T) {
		b := setup(t, 20)
		b.sealed.Release() // too early: the offer is still open
		assert.ErrorIs(t, b.read(t, b.refs), fabric.ErrStale)
		b.server.Withdraw(b.transfer)
		b.server.Withdraw(b.transfer)
		assert.ErrorIs(t, b.read(t, b.refs), fabric.ErrRefused)
		// The transfer may be opened again, with other pages under the same
		// numbers: the old references are dead.
		again := kvtest.Sealed(t, b.pool, kvtest.Owner(1), 20, 9)
		defer again.Release()
		assert.Equal(t, kvtest.Refs(again.Extents())[0].Index, b.refs[0].Index)
		assert.NoError(t, b.server.Open(b.transfer, b.secret, again))
		assert.ErrorIs(t, b.server.Open(b.transfer, b.secret, again), fabric.ErrDuplicate)
		assert.ErrorIs(t, b.read(t, b.refs), fabric.ErrStale)
		assert.Equal(t, b.server.Offers(), 1)
	})

	t.Run("refuses memory that does not fit", func(t *testing.T) {
		b := setup(t, 20)
		size := b.memory.PageBytes()
		good := b.memory
		for _, n := range []int{0, size - 1, size + 1} {
			b.memory = NewMemory(len(b.refs), n)
			assert.ErrorIs(t, b.read(t, b.refs), fabric.ErrProtocol)
		}
		b.memory = good
		assert.NoError(t, b.read(t, b.refs))
	})

	t.Run("passes on that the sink wants no more", func(t *testing.T) {
		b := setup(t, 60)
		enough := errors.New("enough")
		err := b.reader.ReadPages(t.Context(), b.transfer, b.secret, b.refs, Each{b.memory, func(i int, page []byte) ([]byte, error) {
			if i == 2 {
				return nil, enough
			}
			return page, nil
		}})
		assert.ErrorIs(t, err, enough)
		assert.NoError(t, b.read(t, b.refs))
		b.want(t, b.refs)
	})

	t.Run("ends with its context", func(t *testing.T) {
		b := setup(t, 600)
		ctx, cancel := context.WithCancel(t.Context())
		err := b.reader.ReadPages(ctx, b.transfer, b.secret, b.refs, Each{b.memory, func(i int, page []byte) ([]byte, error) {
			if i == 3 {
				cancel()
			}
			return page, nil
		}})
		// All of it may have been under way already; what is not allowed is
		// another error.
		if err != nil {
			assert.ErrorIs(t, err, context.Canceled)
		}
		assert.ErrorIs(t, b.reader.ReadPages(ctx, b.transfer, b.secret, b.refs, b.memory), context.Canceled)
		assert.NoError(t, b.read(t, b.refs))
		b.want(t, b.refs)
	})

	t.Run("serves many at once", func(t *testing.T) {
		b := setup(t, 160)
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				memory := NewMemory(len(b.refs), b.pool.Geometry().PageBytes())
				for range 20 {
					err := b.reader.ReadPages(t.Context(), b.transfer, b.secret, b.refs, memory)
					if err != nil {
						t.Error(err)
						return
					}
				}
				for i, r := range b.refs {
					_ = b.sealed.View(r, func(page []byte) error {
						if !bytes.Equal(page, memory[i]) {
							t.Errorf("page %d differs", i)
						}
						return nil
					})
				}
			})
		}
		wg.Wait()
	})
}
