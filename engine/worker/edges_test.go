package worker

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sync/errgroup"

	"bulkhead.dev/engine/compute"
	"bulkhead.dev/engine/history"
	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/sched"
	"bulkhead.dev/engine/worker/peer"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
	workerv1 "bulkhead.dev/services/gen/bulkhead/worker/v1"
	"bulkhead.dev/services/gen/bulkhead/worker/v1/workerv1connect"
)

// Pages that come back out of quarantine let waiting work in, although nobody
// leaves the gate at that moment.
func TestQuarantineEndsAWait(t *testing.T) {
	t.Parallel()
	w := &worker{freed: make(chan struct{}, 1), history: history.NewWriter(history.Options{Now: time.Now})}
	var err error
	w.pool, err = kv.New(kv.Config{
		Geometry: kv.Geometry{Layers: 1, KVHeads: 1, HeadDim: 2, PageTokens: kv.PageTokens, DType: kv.F32, Layout: kv.Layout1},
		Pages:    4, OnEvent: w.onPages,
	})
	assert.NoError(t, err)
	w.gate = sched.NewGate(w.pool, sched.GateOptions{Slots: 4, Queue: 4, PerOwner: 4, Now: time.Now})
	ctx, cancel := context.WithCancel(t.Context())
	var g errgroup.Group
	g.Go(func() error { return w.recheck(ctx) })

	slot, err := w.gate.Enter(ctx, id.Owner{1}, 4)
	assert.NoError(t, err)
	filler, err := slot.Credits().Fill(id.NewLease())
	assert.NoError(t, err)
	assert.NoError(t, filler.Grant(4))
	table, err := filler.Table(0, 64)
	assert.NoError(t, err)
	filler.Abort() // a pass is still open
	slot.Leave()
	assert.Equal(t, w.pool.Stats().Quarantined, 4)

	g.Go(func() error {
		next, err := w.gate.Enter(t.Context(), id.Owner{2}, 4)
		if err == nil {
			next.Leave()
		}
		cancel()
		return err
	})
	for {
		if waiting, _ := w.gate.Counts(); waiting == 1 {
			break
		}
		time.Sleep(time.Millisecond)
	}
	table.Close()
	assert.NoError(t, g.Wait())
	assert.NoError(t, w.pool.Close())
}

// A caller that is gone by the time of the first event leaves nothing behind.
func TestFirstEventFails(t *testing.T) {
	t.Parallel()
	c := newCluster(t, "")
	c.pair(nil)
	p, err := c.decode.leg.parseGenerate(c.job(1, prompt(20, 1), 5).generate)
	assert.NoError(t, err)
	g := &generation{d: c.decode.leg, p: p, send: func(*workerv1.GenerateResponse) error { return errors.New("gone") }}
	assert.Equal(t, reasonOf(g.run(t.Context())), Canceled)
	c.restored()
	waiting, running := c.decode.leg.gate.Counts()
	assert.Equal(t, []int{waiting, running}, []int{0, 0})
	assert.Equal(t, len(c.decode.leg.expected), 0)
	// The transfer is over for whoever offers it now.
	_, err = c.decode.leg.receiver.Pull(t.Context(), p.transfer, nil)
	assert.Equal(t, reasonOf(err), Reason("replay"))
}

// The ids of a prompt are overwritten when its call ends, well or not.
func TestIDsOfAPromptAreOverwritten(t *testing.T) {
	t.Parallel()
	c := newCluster(t, "")
	c.pair(nil)
	for _, fails := range []bool{false, true} {
		var mu sync.Mutex
		var used [][]int32
		passes := 0
		c.prefill.hook.set(func(next func([]compute.Span) error, spans []compute.Span) error {
			mu.Lock()
			defer mu.Unlock()
			used = append(used, spans[0].Tokens)
			if passes++; fails && passes == 2 {
				return errors.New("no")
			}
			return next(spans)
		})
		p := prompt(80, 1)
		o := c.do(t.Context(), c.job(1, p, 5), nil)
		assert.Equal(t, o.reasons()[0] != "", fails)
		c.restored()
		mu.Lock()
		assert.True(t, len(used) >= 2)
		for i, ids := range used {
			assert.Equal(t, len(ids), min(32, 80-32*i))
			assert.Equal(t, ids, make([]int32, len(ids)))
		}
		mu.Unlock()
	}
}

// lyingDecode acknowledges what it likes.
type lyingDecode struct {
	workerv1connect.UnimplementedDecodeServiceHandler
	root []byte
}

func (l *lyingDecode) Offer(context.Context, *workerv1.OfferRequest) (*workerv1.OfferResponse, error) {
	return &workerv1.OfferResponse{ManifestRoot: l.root}, nil
}

// Prefill reports success only if decode names the very manifest.
func TestAcknowledgmentNamesTheManifest(t *testing.T) {
	t.Parallel()
	c := newCluster(t, "")
	c.pair(nil)
	who := peer.Worker(peer.Decode, id.NewEpoch(time.Now()))
	conf, err := c.as(who).ServerConfig(peer.Prefill.Allow)
	assert.NoError(t, err)
	l, err := net.Listen("unix", filepath.Join(c.dir, "liar"))
	assert.NoError(t, err)
	liar := &lyingDecode{}
	mux := http.NewServeMux()
	mux.Handle(workerv1connect.NewDecodeServiceHandler(liar))
	s := &http.Server{Handler: mux, TLSConfig: conf, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)}
	done := make(chan struct{})
	go func() { defer close(done); _ = s.ServeTLS(l, "", "") }()
	t.Cleanup(func() { _ = s.Close(); <-done })

	pc := workerv1connect.NewPrefillServiceClient(c.client(c.prefill, c.gateway), peer.BaseURL)
	for _, root := range [][]byte{make([]byte, 32), nil, make([]byte, 31)} {
		liar.root = root
		j := c.job(1, prompt(20, 1), 5)
		j.prefill.Decode = &workerv1.Peer{Epoch: who.Epoch[:], Address: "unix:" + filepath.Join(c.dir, "liar")}
		_, err := pc.Prefill(t.Context(), j.prefill)
		r, ok := RefusalOf(err)
		if !ok || Reason(r.GetReason()) != WrongRoot || connect.CodeOf(err) != connect.CodeDataLoss {
			t.Errorf("acknowledged %d bytes: %v", len(root), err)
		}
		c.restored()
	}
}
