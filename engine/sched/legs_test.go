package sched

import (
	"context"
	"sync"
	"testing"
	"time"

	"bulkhead.dev/engine/compute"
	"bulkhead.dev/engine/fabric"
	"bulkhead.dev/engine/handoff"
	"bulkhead.dev/engine/kv"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
	"golang.org/x/sync/errgroup"
)

// legs are two real pools with a real hand-off between them, in one process.
type legs struct {
	src, dst *kv.Pool
	server   *fabric.Server
	receiver *handoff.Receiver
	prefill  fakeModel // of the prefill leg
	epochs   [2]id.Epoch
}

func newLegs(t testing.TB, pages int) *legs {
	t.Helper()
	now := time.UnixMilli(1_800_000_000_000)
	l := &legs{
		src: newPool(t, pages), dst: newPool(t, pages),
		server: fabric.NewServer(fabric.ServerOptions{}),
		epochs: [2]id.Epoch{id.NewEpoch(now), id.NewEpoch(now)},
	}
	l.receiver = handoff.NewReceiver(handoff.ReceiverConfig{Epoch: l.epochs[1], Geometry: geometry})
	return l
}

// commit prefills the prompt and hands it over.
func (l *legs) commit(t testing.TB, o id.Owner, prompt []int32, maxOutput int) *handoff.Committed {
	t.Helper()
	f, err := reserve(t, l.src, o, geometry.PagesFor(len(prompt))).Fill(id.NewLease())
	assert.NoError(t, err)
	assert.NoError(t, f.Grant(geometry.PagesFor(len(prompt))))
	table, err := f.Table(0, len(prompt))
	assert.NoError(t, err)
	spans := []compute.Span{{Tokens: prompt, Pages: table}}
	assert.NoError(t, l.prefill.Forward(spans))
	assert.NoError(t, table.Advance(spans[0].Wrote))
	table.Close()
	sealed, err := f.Seal(len(prompt))
	assert.NoError(t, err)

	meta := handoff.Meta{
		Version: handoff.Early,
		Request: id.NewRequest(time.UnixMilli(1_800_000_000_000)), Transfer: id.NewTransfer(), Nonce: id.NewNonce(),
		PrefillEpoch: l.epochs[0], DecodeEpoch: l.epochs[1], TokenDigest: handoff.TokenDigest(prompt),
	}
	offer := handoff.NewOffer(l.server, meta)
	defer offer.Abort()
	assert.NoError(t, offer.Complete(sealed))
	in, err := l.receiver.Expect(handoff.Expect{
		Version: meta.Version,
		Request: meta.Request, Transfer: meta.Transfer, Nonce: meta.Nonce, Owner: o, Lease: id.NewLease(),
		PrefillEpoch: meta.PrefillEpoch, TokenDigest: meta.TokenDigest, Tokens: len(prompt),
	}, reserve(t, l.dst, o, geometry.PagesFor(len(prompt)+maxOutput)), l.server.Local())
	assert.NoError(t, err)
	root, err := l.receiver.Pull(context.Background(), meta.Transfer, offer.Manifest())
	assert.NoError(t, err)
	assert.NoError(t, offer.Ack(root))
	c, err := in.Wait(context.Background())
	assert.NoError(t, err)
	t.Cleanup(in.Close) // releases what no run took
	return c
}

// loop is a decode loop that runs until the test ends.
type loop struct {
	*Decode
	*legs
	model *fakeModel
	stop  func()
}

func startDecode(t *testing.T, change func(*DecodeOptions)) *loop {
	t.Helper()
	l := &loop{legs: newLegs(t, 64), model: &fakeModel{}}
	opts := DecodeOptions{
		Model: l.model, NewText: func() Text { return &fakeText{} }, IsEOG: func(int32) bool { return false },
		Mailbox: 1000, SlowLimit: time.Second, Now: time.Now,
	}
	if change != nil {
		change(&opts)
	}
	l.Decode = NewDecode(opts)
	ctx, cancel := context.WithCancel(context.Background())
	var g errgroup.Group
	g.Go(func() error { return l.Run(ctx) })
	l.stop = sync.OnceFunc(func() {
		cancel()
		assert.NoError(t, g.Wait())
	})
	t.Cleanup(l.stop)
	return l
}

func (l *loop) start(t testing.TB, o id.Owner, prompt []int32, maxOutput int, stops ...string) *Run {
	t.Helper()
	r, err := l.Start(Request{
		Committed: l.commit(t, o, prompt, maxOutput), LastToken: prompt[len(prompt)-1], MaxOutput: maxOutput, Stops: stops,
	})
	assert.NoError(t, err)
	t.Cleanup(r.Close)
	return r
}

// drain takes everything until the end.
func drain(ctx context.Context, r *Run) (text string, ids []int32, err error) {
	for {
		d, err := r.Next(ctx)
		if err != nil {
			return text, ids, err
		}
		text += d.Text
		ids = append(ids, d.IDs...)
	}
}
