package worker

import (
	"context"
	"crypto/tls"
	"errors"
	"math"
	"net"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sync/errgroup"

	"bulkhead.dev/engine/compute"
	"bulkhead.dev/engine/fabric"
	"bulkhead.dev/engine/handoff"
	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/worker/peer"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
	workerv1 "bulkhead.dev/services/gen/bulkhead/worker/v1"
	"bulkhead.dev/services/gen/bulkhead/worker/v1/workerv1connect"
)

// What the two legs are told must agree, or nothing is decoded. Each row makes
// one thing differ.
func TestLegsMustAgree(t *testing.T) {
	t.Parallel()
	c := newCluster(t, "")
	c.pair(nil)
	for name, tc := range map[string]struct {
		change func(*job)
		reason string // of both legs
	}{
		"nonce":    {func(j *job) { j.prefill.Nonce[0] ^= 1 }, "wrong_nonce"},
		"transfer": {func(j *job) { id := id.NewTransfer(); j.prefill.TransferId = id[:] }, "wrong_transfer"},
		"request":  {func(j *job) { r := id.NewRequest(time.Now()); j.prefill.RequestId = r[:] }, "wrong_request"},
		"owner":    {func(j *job) { j.prefill.Owner = append([]byte{9}, j.prefill.Owner[1:]...) }, "wrong_owner"},
		"token":    {func(j *job) { j.prefill.Tokens[3]++ }, "wrong_tokens"},
		// A prompt of several chunks is found out by the first preview.
		"one less":  {func(j *job) { j.prefill.Tokens = j.prefill.Tokens[:39] }, "wrong_tokens"},
		"one token": {func(j *job) { j.prefill.Tokens = j.prefill.Tokens[:1] }, "coverage"}, // the incident: no preview
		"one more":  {func(j *job) { j.prefill.Tokens = append(j.prefill.Tokens, 7) }, "wrong_tokens"},
		"one more, old": {func(j *job) {
			j.prefill.Tokens = append(j.prefill.Tokens, 7)
			j.prefill.HandoffVersion, j.generate.HandoffVersion = 1, 1
		}, "coverage"},
		"versions":      {func(j *job) { j.prefill.HandoffVersion = 1 }, "wrong_version"},
		"announced one": {func(j *job) { j.generate.PromptTokens = 1 }, "coverage"},
		"digest":        {func(j *job) { j.generate.TokenDigest[0] ^= 1 }, "wrong_tokens"},
	} {
		t.Run(name, func(t *testing.T) {
			j := c.job(1, prompt(40, 1), 10)
			tc.change(j)
			o := c.do(t.Context(), j, nil)
			assert.Equal(t, o.events, []string{"reserved"})
			assert.Equal(t, o.reasons()[1], tc.reason)
			if o.reasons()[0] != tc.reason && connect.CodeOf(o.err) != connect.CodeCanceled {
				// The decode leg heard of it, or was ended by the gateway.
				t.Fatalf("decode: %v", o.err)
			}
			c.restored()
		})
	}
}

// A last token that is not the one that prefill computed shows in its keys and
// values.
func TestLastTokenIsProven(t *testing.T) {
	t.Parallel()
	c := newCluster(t, "")
	c.pair(nil)
	j := c.job(1, prompt(40, 1), 10)
	j.generate.LastToken++
	o := c.do(t.Context(), j, nil)
	assert.Equal(t, o.events, []string{"reserved", "committed"})
	assert.Equal(t, o.reasons()[0], "recompute_mismatch")
	r, ok := RefusalOf(o.err)
	assert.True(t, ok)
	assert.Equal(t, r.GetFacts().GetTokens(), uint32(40))
	assert.Equal(t, connect.CodeOf(o.err), connect.CodeDataLoss)
	c.restored()
}

// A prefill leg that says it wrote what it did not is refused, whatever the
// pages hold there.
func TestUnwrittenPositions(t *testing.T) {
	t.Parallel()
	for _, scrub := range []string{"zero", "nan"} {
		t.Run(scrub, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t, "")
			c.pair(func(b *Boot) { b.ScrubWith = scrub })
			for _, missing := range []int{1, 20} {
				c.prefill.hook.set(func(next func([]compute.Span) error, spans []compute.Span) error {
					s := spans[0]
					s.Tokens = s.Tokens[:max(0, len(s.Tokens)-missing)]
					if len(s.Tokens) > 0 {
						if err := next([]compute.Span{s}); err != nil {
							return err
						}
					}
					spans[0].Wrote = len(spans[0].Tokens)
					return nil
				})
				o := c.do(t.Context(), c.job(1, prompt(30, 1), 10), nil)
				assert.True(t, o.finished == nil && o.text == "")
				if code := connect.CodeOf(o.err); code != connect.CodeDataLoss {
					t.Errorf("%d positions missing: %v", missing, o.err)
				}
				c.restored()
			}
		})
	}
}

// A step that gives a NaN ends the answer with a refusal.
func TestNaNRefuses(t *testing.T) {
	t.Parallel()
	c := newCluster(t, "")
	c.pair(nil)
	c.decode.hook.set(func(next func([]compute.Span) error, spans []compute.Span) error {
		err := next(spans)
		for _, s := range spans {
			if s.Pos == 44 {
				s.Logits[len(s.Logits)/2] = float32(math.NaN())
			}
		}
		return err
	})
	o := c.do(t.Context(), c.job(1, prompt(40, 1), 100), nil)
	assert.Equal(t, o.reasons()[0], "not_finite")
	assert.True(t, len(o.ids) <= 5 && o.finished == nil)
	c.restored()
}

func TestBadRequests(t *testing.T) {
	t.Parallel()
	c := newCluster(t, "")
	c.pair(nil)
	for name, tc := range map[string]struct {
		generate bool // which leg is asked
		change   func(*job)
		reason   Reason
	}{
		"request id":       {true, func(j *job) { j.generate.RequestId = nil }, BadRequest},
		"owner":            {true, func(j *job) { j.generate.Owner = make([]byte, 16) }, BadRequest},
		"lease":            {true, func(j *job) { j.generate.LeaseId = []byte("short") }, BadRequest},
		"model":            {true, func(j *job) { j.generate.ModelDigest = make([]byte, 32) }, WrongModel},
		"no prompt":        {true, func(j *job) { j.generate.PromptTokens = 0 }, BadRequest},
		"no output":        {true, func(j *job) { j.generate.MaxOutputTokens = 0 }, BadRequest},
		"window":           {true, func(j *job) { j.generate.MaxOutputTokens = 217 }, ContextLength},
		"overflow":         {true, func(j *job) { j.generate.MaxOutputTokens = math.MaxUint32 }, ContextLength},
		"digest":           {true, func(j *job) { j.generate.TokenDigest = nil }, BadRequest},
		"last token":       {true, func(j *job) { j.generate.LastToken = 1 << 31 }, BadRequest},
		"no sampling":      {true, func(j *job) { j.generate.Sampling = nil }, BadRequest},
		"temperature":      {true, func(j *job) { j.generate.Sampling.Temperature = float32(math.NaN()) }, BadRequest},
		"top k":            {true, func(j *job) { j.generate.Sampling.TopK = math.MaxUint32 }, BadRequest},
		"stops":            {true, func(j *job) { j.generate.Stop = make([]string, 17) }, BadRequest},
		"empty stop":       {true, func(j *job) { j.generate.Stop = []string{""} }, BadRequest},
		"no prefill":       {true, func(j *job) { j.generate.Prefill = nil }, BadRequest},
		"prefill address":  {true, func(j *job) { j.generate.Prefill.FabricAddress = "http://x" }, BadRequest},
		"no tokens":        {false, func(j *job) { j.prefill.Tokens = nil }, BadRequest},
		"vocabulary":       {false, func(j *job) { j.prefill.Tokens[0] = math.MaxUint32 }, BadRequest},
		"too long":         {false, func(j *job) { j.prefill.Tokens = make([]uint32, 257) }, ContextLength},
		"nonce":            {false, func(j *job) { j.prefill.Nonce = nil }, BadRequest},
		"prefill model":    {false, func(j *job) { j.prefill.ModelDigest = nil }, WrongModel},
		"decode address":   {false, func(j *job) { j.prefill.Decode.Address = "unix:relative" }, BadRequest},
		"nobody at decode": {false, func(j *job) { j.prefill.Decode.Address = "unix:/nowhere" }, DecodeUnreachable},
		"another decode":   {false, func(j *job) { e := id.NewEpoch(time.Now()); j.prefill.Decode.Epoch = e[:] }, DecodeUnreachable},
	} {
		t.Run(name, func(t *testing.T) {
			j := c.job(1, prompt(40, 1), 10)
			tc.change(j)
			before := c.prefill.pool.Stats().Grants
			var err error
			if tc.generate {
				j.prefill = nil
				err = c.do(t.Context(), j, nil).err
			} else {
				pc := workerv1connect.NewPrefillServiceClient(c.client(c.prefill, c.gateway), peer.BaseURL)
				_, err = pc.Prefill(t.Context(), j.prefill)
			}
			r, ok := RefusalOf(err)
			if !ok || Reason(r.GetReason()) != tc.reason {
				t.Fatalf("got %v", err)
			}
			assert.Equal(t, connect.CodeOf(err), tc.reason.Code())
			if tc.reason != DecodeUnreachable {
				assert.Equal(t, c.prefill.pool.Stats().Grants, before)
			}
			c.restored()
		})
	}
}

// Each call is for one kind of peer.
func TestUnauthorisedPeers(t *testing.T) {
	t.Parallel()
	c := newCluster(t, "")
	c.pair(nil)
	j := c.job(1, prompt(20, 1), 5)
	offer := &workerv1.OfferRequest{RequestId: j.generate.RequestId, TransferId: j.generate.TransferId, Manifest: []byte("x")}
	gateway, prefill, decode := c.gateway, c.as(c.prefill.who), c.as(c.decode.who)
	strange := c.as(peer.Worker(peer.Prefill, id.NewEpoch(time.Now())))

	call := func(i *instance, as peer.Credentials, method string) error {
		hc := c.client(i, as)
		switch method {
		case "generate":
			s, err := workerv1connect.NewDecodeServiceClient(hc, peer.BaseURL).Generate(t.Context(), j.generate)
			if err != nil {
				return err
			}
			defer func() { _ = s.Close() }()
			for s.Receive() {
				t.Error("an event for a stranger")
			}
			return s.Err()
		case "offer":
			_, err := workerv1connect.NewDecodeServiceClient(hc, peer.BaseURL).Offer(t.Context(), offer)
			return err
		case "prefill":
			_, err := workerv1connect.NewPrefillServiceClient(hc, peer.BaseURL).Prefill(t.Context(), j.prefill)
			return err
		case "pages":
			_, err := workerv1connect.NewControlServiceClient(hc, peer.BaseURL).Pages(t.Context(), &workerv1.PagesRequest{})
			return err
		}
		_, err := workerv1connect.NewControlServiceClient(hc, peer.BaseURL).Drain(t.Context(), &workerv1.DrainRequest{})
		return err
	}
	for _, tc := range []struct {
		at     *instance
		as     peer.Credentials
		method string
	}{
		{c.decode, prefill, "generate"},
		{c.decode, decode, "generate"},
		{c.decode, gateway, "offer"},
		{c.decode, decode, "offer"},
		{c.decode, prefill, "drain"},
		{c.decode, prefill, "pages"},
		{c.decode, decode, "pages"},
		{c.prefill, decode, "pages"},
		{c.prefill, prefill, "prefill"},
		{c.prefill, decode, "prefill"},
		{c.prefill, decode, "drain"},
	} {
		err := call(tc.at, tc.as, tc.method)
		if connect.CodeOf(err) != connect.CodePermissionDenied {
			t.Errorf("%s: %v", tc.method, err)
		}
		if r, ok := RefusalOf(err); !ok || Reason(r.GetReason()) != WrongPeer {
			t.Errorf("%s: %v", tc.method, err)
		}
	}
	// A prefill worker that was not announced cannot use up the transfer of the
	// one that was.
	o := c.do(t.Context(), j, func(e string) {
		if e == "reserved" {
			r, ok := RefusalOf(call(c.decode, strange, "offer"))
			if !ok || Reason(r.GetReason()) != WrongPeer {
				t.Error("the offer of a stranger was not refused")
			}
		}
	})
	assert.NoError(t, o.err)
	// Nor can anybody but a decode worker read pages.
	for name, creds := range map[string]peer.Credentials{"gateway": gateway, "prefill": prefill} {
		conf, err := creds.ClientConfig(peer.Anyone)
		assert.NoError(t, err)
		_, path, err := peer.SplitAddress(c.prefill.boot.FabricListen)
		assert.NoError(t, err)
		conn, err := tls.Dial("unix", path, conf)
		if err == nil {
			_, err = conn.Read(make([]byte, 1))
			_ = conn.Close()
		}
		if err == nil {
			t.Errorf("%s reads pages", name)
		}
	}
	c.restored()
}

// block makes a loop stand still in its next pass. entered tells that it does;
// release lets it go on; the end of the test does too.
func (h *hook) block(t *testing.T) (entered <-chan struct{}, release func()) {
	in, out := make(chan struct{}, 1000), make(chan struct{})
	h.set(func(next func([]compute.Span) error, spans []compute.Span) error {
		in <- struct{}{}
		<-out
		return next(spans)
	})
	release = sync.OnceFunc(func() { h.set(nil); close(out) })
	t.Cleanup(release)
	return in, release
}

func TestQueue(t *testing.T) {
	t.Parallel()
	c := newCluster(t, "")
	c.pair(func(b *Boot) {
		if b.Role == peer.Decode {
			b.MaxRunning, b.Queue, b.PerTenant = 1, 2, 2
		}
	})
	entered, release := c.decode.hook.block(t)
	var g errgroup.Group
	g.Go(func() error { return c.do(t.Context(), c.job(1, prompt(20, 1), 5), nil).err })
	<-entered
	ctx, cancel := context.WithCancel(t.Context())
	var left *outcome
	g.Go(func() error { left = c.do(ctx, c.job(1, prompt(20, 2), 5), nil); return nil })
	waiting := func(n uint32) {
		c.eventually("queue", func() bool { return c.front.beat(c.decode.who.Epoch).GetQueued() == n })
	}
	waiting(1)
	assert.Equal(t, c.do(t.Context(), c.job(1, prompt(20, 3), 5), nil).reasons()[0], "tenant_concurrency")
	g.Go(func() error { return c.do(t.Context(), c.job(2, prompt(20, 2), 5), nil).err })
	waiting(2)
	o := c.do(t.Context(), c.job(3, prompt(20, 2), 5), nil)
	assert.Equal(t, o.reasons()[0], "queue_full")
	assert.Equal(t, connect.CodeOf(o.err), connect.CodeResourceExhausted)
	cancel() // one leaves the queue
	waiting(1)
	assert.Equal(t, c.front.beat(c.decode.who.Epoch).GetRunning(), uint32(1))
	release()
	assert.NoError(t, g.Wait())
	assert.Equal(t, len(left.events), 0)
	assert.Equal(t, connect.CodeOf(left.err), connect.CodeCanceled)
	c.restored()
	c.eventually("counted refusals", func() bool {
		n := map[string]uint64{}
		for _, r := range c.front.beat(c.decode.who.Epoch).GetRefusals() {
			n[r.GetReason()] = r.GetCount()
		}
		return n["queue_full"] == 1 && n["tenant_concurrency"] == 1 && n["canceled"] == 1
	})
}

// The pool is smaller than all requests together: they wait for credits.
func TestCreditsAreWaitedFor(t *testing.T) {
	t.Parallel()
	c := newCluster(t, "")
	c.pair(func(b *Boot) { b.Pages = 16 }) // one window
	var g errgroup.Group
	for i := range 6 {
		g.Go(func() error { return c.do(t.Context(), c.job(byte(i%2), prompt(150, i), 50), nil).err })
	}
	assert.NoError(t, g.Wait())
	c.restored()
}

func TestCancelDuringPrefill(t *testing.T) {
	t.Parallel()
	c := newCluster(t, "")
	c.pair(nil)
	entered, release := c.prefill.hook.block(t)
	ctx, cancel := context.WithCancel(t.Context())
	var g errgroup.Group
	var o *outcome
	g.Go(func() error { o = c.do(ctx, c.job(1, prompt(200, 1), 5), nil); return nil })
	<-entered
	assert.True(t, c.decode.pool.Stats().Credits > 0)
	cancel()
	// Decode lets go although prefill is still computing.
	c.eventually("credits of decode", func() bool { return c.decode.pool.Stats().Credits == 0 })
	release()
	assert.NoError(t, g.Wait())
	assert.Equal(t, o.events, []string{"reserved"})
	c.restored()
	assert.NoError(t, c.do(t.Context(), c.job(1, prompt(20, 1), 5), nil).err)
}

// A prefill worker that ends in the middle of a prompt takes the request with
// it, and nothing else.
func TestPrefillWorkerEnds(t *testing.T) {
	t.Parallel()
	c := newCluster(t, "")
	c.prefill = c.start(peer.Prefill, func(b *Boot) { b.DrainFor = Span(time.Millisecond) })
	c.decode = c.start(peer.Decode, nil)
	c.ready(c.prefill)
	c.ready(c.decode)
	entered, release := c.prefill.hook.block(t)
	var g errgroup.Group
	var o *outcome
	g.Go(func() error { o = c.do(t.Context(), c.job(1, prompt(200, 1), 5), nil); return nil })
	<-entered
	c.prefill.stop()
	c.eventually("drain", func() bool { return c.front.beat(c.prefill.who.Epoch).GetDraining() })
	release()
	<-c.prefill.done
	assert.NoError(t, c.prefill.err)
	assert.NoError(t, g.Wait())
	assert.Equal(t, o.events, []string{"reserved"})
	assert.Equal(t, o.reasons()[1], "stopped")
	c.eventually("pages of decode", func() bool { st := c.decode.pool.Stats(); return st.Free == st.Pages })
	// Another one takes its place.
	c.prefill = c.start(peer.Prefill, nil)
	c.ready(c.prefill)
	assert.NoError(t, c.do(t.Context(), c.job(1, prompt(20, 1), 5), nil).err)
}

func TestOfferTimeout(t *testing.T) {
	t.Parallel()
	c := newCluster(t, "")
	c.pair(func(b *Boot) { b.OfferWait = Span(50 * time.Millisecond) })
	j := c.job(1, prompt(20, 1), 5)
	late := j.prefill
	j.prefill = nil
	o := c.do(t.Context(), j, nil)
	assert.Equal(t, o.reasons()[0], "offer_timeout")
	c.restored()
	// The offer that comes later is refused.
	pc := workerv1connect.NewPrefillServiceClient(c.client(c.prefill, c.gateway), peer.BaseURL)
	_, err := pc.Prefill(t.Context(), late)
	r, ok := RefusalOf(err)
	assert.True(t, ok)
	assert.Equal(t, r.GetReason(), "replay")
	assert.Equal(t, r.GetFacts().GetTokens(), uint32(20))
	c.restored()
}

// A prefill leg that goes away while its pages are being read: the decode leg
// gives its own back, although the page server says nothing.
func TestOfferWithdrawn(t *testing.T) {
	t.Parallel()
	c := newCluster(t, "")
	c.pair(nil)
	// The prefill leg of this test: real pages and a real manifest, and a page
	// server that accepts and stays silent.
	who := peer.Worker(peer.Prefill, id.NewEpoch(time.Now()))
	creds := c.as(who)
	conf, err := creds.ServerConfig(peer.Decode.Allow)
	assert.NoError(t, err)
	silent, err := fabric.Listen("unix:"+filepath.Join(c.dir, "silent"), conf)
	assert.NoError(t, err)
	asked := make(chan net.Conn, 1)
	go func() {
		for {
			conn, err := silent.Accept()
			if err != nil {
				return
			}
			_ = conn.(*tls.Conn).HandshakeContext(context.Background())
			asked <- conn
		}
	}()
	defer func() { _ = silent.Close() }()

	j := c.job(1, prompt(20, 1), 5)
	g := j.generate
	manifest := offerOf(t, c, who, j)
	j.prefill = nil
	g.Prefill = &workerv1.Peer{Epoch: who.Epoch[:], FabricAddress: fabric.Address(silent)}
	ctx, cancel := context.WithCancel(t.Context())
	var calls errgroup.Group
	o := c.do(t.Context(), j, func(e string) {
		calls.Go(func() error {
			dc := workerv1connect.NewDecodeServiceClient(c.client(c.decode, creds), peer.BaseURL)
			_, err := dc.Offer(ctx, &workerv1.OfferRequest{RequestId: g.RequestId, TransferId: g.TransferId, Manifest: manifest})
			if connect.CodeOf(err) != connect.CodeCanceled {
				return errors.New("the offer was not given up")
			}
			return nil
		})
		calls.Go(func() error {
			select {
			case conn := <-asked:
				cancel()
				<-t.Context().Done() // the connection stays open
				_ = conn.Close()
			case <-t.Context().Done():
				cancel()
			}
			return nil
		})
	})
	assert.Equal(t, o.reasons()[0], "offer_withdrawn")
	assert.Equal(t, o.events, []string{"reserved"})
	c.restored()
	t.Cleanup(func() { assert.NoError(t, calls.Wait()) })
}

// offerOf makes a manifest for the job, as a prefill worker with the identity
// would.
func offerOf(t *testing.T, c *cluster, who peer.Identity, j *job) []byte {
	t.Helper()
	g := j.generate
	pool, err := kv.New(kv.Config{Geometry: c.decode.pool.Geometry(), Pages: 8})
	assert.NoError(t, err)
	credits, err := pool.Reserve(id.Owner(g.Owner), 2)
	assert.NoError(t, err)
	filler, err := credits.Fill(id.NewLease())
	assert.NoError(t, err)
	assert.NoError(t, filler.Grant(2))
	table, err := filler.Table(0, 20)
	assert.NoError(t, err)
	assert.NoError(t, table.Advance(20))
	table.Close()
	sealed, err := filler.Seal(20)
	assert.NoError(t, err)
	offer := handoff.NewOffer(fabric.NewServer(fabric.ServerOptions{}), handoff.Meta{
		Version: uint16(max(g.HandoffVersion, 1)),
		Request: id.Request(g.RequestId), Transfer: id.Transfer(g.TransferId), Nonce: id.Nonce(g.Nonce),
		PrefillEpoch: who.Epoch, DecodeEpoch: c.decode.who.Epoch, Model: c.digest, TokenDigest: [32]byte(g.TokenDigest),
	})
	assert.NoError(t, offer.Complete(sealed))
	t.Cleanup(func() { offer.Abort(); assert.NoError(t, pool.Close()) })
	return offer.Manifest()
}

func TestDrain(t *testing.T) {
	t.Parallel()
	c := newCluster(t, "")
	c.pair(nil)
	entered, release := c.decode.hook.block(t)
	var g errgroup.Group
	var running *outcome
	g.Go(func() error { running = c.do(t.Context(), c.job(1, prompt(20, 1), 5), nil); return nil })
	<-entered
	cc := workerv1connect.NewControlServiceClient(c.client(c.decode, c.gateway), peer.BaseURL)
	ctx, cancel := context.WithCancel(t.Context())
	var early error
	g.Go(func() error { _, early = cc.Drain(ctx, &workerv1.DrainRequest{}); return nil })
	c.eventually("report", func() bool { return c.front.beat(c.decode.who.Epoch).GetDraining() })
	o := c.do(t.Context(), c.job(1, prompt(20, 1), 5), nil)
	assert.Equal(t, o.reasons()[0], "draining")
	assert.Equal(t, connect.CodeOf(o.err), connect.CodeUnavailable)
	cancel() // Drain ends with its call, the draining does not
	release()
	_, err := cc.Drain(t.Context(), &workerv1.DrainRequest{})
	assert.NoError(t, err)
	assert.NoError(t, g.Wait())
	assert.Equal(t, connect.CodeOf(early), connect.CodeCanceled)
	assert.NoError(t, running.err)
	assert.Equal(t, len(running.ids), 5)
}

// When a worker is told to end, what runs is finished first.
func TestEndFinishesWhatRuns(t *testing.T) {
	t.Parallel()
	c := newCluster(t, "")
	c.pair(nil)
	entered, release := c.decode.hook.block(t)
	var g errgroup.Group
	var running *outcome
	g.Go(func() error { running = c.do(t.Context(), c.job(1, prompt(20, 1), 30), nil); return nil })
	<-entered
	c.decode.stop()
	c.eventually("drain", func() bool { return c.front.beat(c.decode.who.Epoch).GetDraining() })
	release()
	assert.NoError(t, g.Wait())
	assert.NoError(t, running.err)
	assert.Equal(t, len(running.ids), 30)
	<-c.decode.done
	assert.NoError(t, c.decode.err)
}

func TestStartRefuses(t *testing.T) {
	t.Parallel()
	c := newCluster(t, "")
	i := c.start(peer.Decode, func(b *Boot) { b.Pages = 15 })
	<-i.done
	assert.Equal(t, assert.ErrorAs[*CapacityError](t, i.err).Window, 256)

	i = c.start(peer.Decode, func(b *Boot) { b.ModelDigest = "sha256:" + string(make64('a')) })
	<-i.done
	assert.True(t, i.err != nil)

	i = c.start(peer.Decode, func(b *Boot) { b.ModelPath = "/nowhere" })
	<-i.done
	assert.True(t, i.err != nil)

	c.front.mu.Lock()
	c.front.refuse = connect.NewError(connect.CodeFailedPrecondition, errors.New("no"))
	c.front.mu.Unlock()
	i = c.start(peer.Prefill, nil)
	<-i.done
	assert.Equal(t, connect.CodeOf(i.err), connect.CodeFailedPrecondition)
}

func make64(c byte) []byte {
	b := make([]byte, 64)
	for i := range b {
		b[i] = c
	}
	return b
}

// A front that forgot a worker, or was away, hears from it again.
func TestRegistersAgain(t *testing.T) {
	t.Parallel()
	c := newCluster(t, "")
	c.front.mu.Lock()
	c.front.refuse = connect.NewError(connect.CodeUnavailable, errors.New("starting"))
	c.front.mu.Unlock()
	i := c.start(peer.Decode, nil)
	c.eventually("first attempt", func() bool { return len(i.logs.String()) > 0 })
	c.front.mu.Lock()
	c.front.refuse = nil
	c.front.mu.Unlock()
	c.ready(i)
	c.front.mu.Lock()
	clear(c.front.joined)
	c.front.mu.Unlock()
	c.ready(i)
}
