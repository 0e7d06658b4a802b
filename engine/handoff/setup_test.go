package handoff

import (
	"testing"

	"bulkhead.dev/engine/fabric"
	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/kv/kvtest"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
)

// bench is two legs and what the gateway told them.
type bench struct {
	prefill, decode *kv.Pool
	server          *fabric.Server
	receiver        *Receiver
	from            fabric.Reader
	meta            Meta
	want            Expect
	seed            uint64
}

var ids = []int32{1, 5, 9, 200, 31999}

func setup(t *testing.T, tokens int) *bench {
	t.Helper()
	b := &bench{
		prefill: kvtest.Pool(t, kv.Config{Pages: 32}),
		decode:  kvtest.Pool(t, kv.Config{Pages: 32}),
		server:  fabric.NewServer(fabric.ServerOptions{}),
		seed:    11,
		meta: Meta{
			Version: Early,
			Request: id.Request{1}, Transfer: id.NewTransfer(), Nonce: id.NewNonce(),
			PrefillEpoch: id.Epoch{2}, DecodeEpoch: id.Epoch{3},
			Model: [32]byte{4}, TokenDigest: TokenDigest(ids),
		},
	}
	b.from = b.server.Local()
	b.receiver = NewReceiver(ReceiverConfig{Epoch: b.meta.DecodeEpoch, Geometry: b.decode.Geometry(), Model: b.meta.Model})
	b.want = Expect{
		Version: Early,
		Request: b.meta.Request, Transfer: b.meta.Transfer, Nonce: b.meta.Nonce, Owner: kvtest.Owner(1), Lease: id.NewLease(),
		PrefillEpoch: b.meta.PrefillEpoch, Model: b.meta.Model, TokenDigest: b.meta.TokenDigest, Tokens: tokens,
	}
	t.Cleanup(func() {
		if n := b.server.Offers(); n != 0 {
			t.Errorf("%d offers are still open", n)
		}
	})
	return b
}

// offer computes the prompt and offers it.
func (b *bench) offer(t *testing.T) *Offer {
	t.Helper()
	o := NewOffer(b.server, b.meta)
	t.Cleanup(o.Abort)
	assert.NoError(t, o.Complete(kvtest.Sealed(t, b.prefill, b.want.Owner, b.want.Tokens, b.seed)))
	return o
}

// expect announces the transfer with credits for two pages of growth.
func (b *bench) expect(t *testing.T) *Inbound {
	t.Helper()
	credits, err := b.decode.Reserve(b.want.Owner, b.decode.Geometry().PagesFor(b.want.Tokens)+2)
	assert.NoError(t, err)
	in, err := b.receiver.Expect(b.want, credits, b.from)
	assert.NoError(t, err)
	t.Cleanup(in.Close)
	return in
}

func reason(t *testing.T, err error) Reason {
	t.Helper()
	return assert.ErrorAs[*Refusal](t, err).Reason
}
