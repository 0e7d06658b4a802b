package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sync/errgroup"

	"bulkhead.dev/engine/compute"
	"bulkhead.dev/engine/fabric"
	"bulkhead.dev/engine/model/gguf"
	"bulkhead.dev/engine/model/synth"
	"bulkhead.dev/engine/model/tokenizer"
	"bulkhead.dev/engine/worker/peer"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
	workerv1 "bulkhead.dev/services/gen/bulkhead/worker/v1"
	"bulkhead.dev/services/gen/bulkhead/worker/v1/workerv1connect"
)

// The greedy ids of a trained model, over two processes' worth of machinery, are
// those that llama.cpp computes, with all prompts in one batch.
func TestGoldenIDs(t *testing.T) {
	t.Parallel()
	for _, scrub := range []string{"zero", "nan"} {
		t.Run(scrub, func(t *testing.T) {
			t.Parallel()
			file := assert.SharedData(t, "stories260K/converted/stories260K-f32.gguf")
			raw, err := os.ReadFile(assert.SharedData(t, "stories260K/golden_llamacpp.json"))
			assert.NoError(t, err)
			var golden struct {
				Runs []struct {
					Model  string
					Prompt []int32 `json:"prompt_ids"`
					Greedy []int32 `json:"greedy_ids"`
					Text   string
				}
			}
			assert.NoError(t, json.Unmarshal(raw, &golden))
			c := newCluster(t, file)
			c.pair(func(b *Boot) { b.ScrubWith = scrub })
			var g errgroup.Group
			n := 0
			for i, run := range golden.Runs {
				if run.Model != "stories260K-f32.gguf" {
					continue
				}
				n++
				g.Go(func() error {
					o := c.do(t.Context(), c.job(byte(i), run.Prompt, len(run.Greedy)), nil)
					if err := errors.Join(o.err, o.prefillErr); err != nil {
						return err
					}
					// Answers keep the space that begins them; the golden text may not.
					return same(o, run.Greedy, run.Text, strings.TrimPrefix(o.text, " ") == strings.TrimPrefix(run.Text, " "))
				})
			}
			assert.NoError(t, g.Wait())
			assert.True(t, n > 3)
			c.restored()
		})
	}
}

// same reports an answer that is not the wanted one.
func same(o *outcome, ids []int32, text string, textSame bool) error {
	if !slices.Equal(o.ids, ids) || !textSame {
		return fmt.Errorf("answer is %v %q, want %v %q", o.ids, o.text, ids, text)
	}
	return nil
}

// Every number that the legs report was measured, and they agree.
func TestFacts(t *testing.T) {
	t.Parallel()
	c := newCluster(t, "")
	c.pair(nil)
	for i, n := range []int{1, 16, 17, 100, 240} {
		j := c.job(1, prompt(n, i), 16)
		o := c.do(t.Context(), j, nil)
		assert.NoError(t, o.err)
		assert.NoError(t, o.prefillErr)
		assert.Equal(t, o.events, []string{"reserved", "committed", "delta", "finished"})
		pages := (n + 16 + 15) / 16
		assert.Equal(t, o.reserved, pages)
		for _, f := range []interface{ GetTokens() uint32 }{o.prefilled, o.committed, o.finished.GetFacts()} {
			assert.Equal(t, f.GetTokens(), uint32(n))
		}
		assert.Equal(t, o.prefilled.GetEpoch(), c.prefill.who.Epoch[:])
		assert.Equal(t, o.committed.GetEpoch(), c.decode.who.Epoch[:])
		assert.Equal(t, len(o.committed.GetManifestRoot()), 32)
		assert.Equal(t, o.prefilled.GetManifestRoot(), o.committed.GetManifestRoot())
		assert.Equal(t, o.finished.GetFacts().GetManifestRoot(), o.committed.GetManifestRoot())
		bytes := uint64((n + 15) / 16 * c.decode.pool.Geometry().PageBytes())
		assert.Equal(t, o.prefilled.GetHandoffBytes(), bytes)
		assert.Equal(t, o.committed.GetHandoffBytes(), bytes)
		assert.True(t, o.prefilled.GetComputeUs() > 0 && o.finished.GetFacts().GetComputeUs() > 0)
		assert.Equal(t, granted(o.prefilled), uint32((n+15)/16))
		assert.Equal(t, granted(o.committed), uint32((n+15)/16))
		// The last id is not fed back, so its position needs no page.
		assert.Equal(t, granted(o.finished.GetFacts()), uint32((n+int(o.finished.GetOutputTokens())-1+15)/16))
		assert.Equal(t, int(o.finished.GetOutputTokens()), len(o.ids))
	}
	c.restored()
	c.eventually("counters", func() bool {
		p, d := c.front.beat(c.prefill.who.Epoch), c.front.beat(c.decode.who.Epoch)
		return p.GetPrefillTokens() == 1+16+17+100+240 && d.GetDecodeTokens() > 0 && d.GetDecodeTokens() <= 5*16 &&
			p.GetHandoffBytes() == d.GetHandoffBytes() && p.GetHandoffBytes() > 0 && d.GetGrantedPages() >= p.GetGrantedPages()
	})
	beat := c.front.beat(c.decode.who.Epoch)
	sum := uint32(0)
	for _, s := range beat.GetPages() {
		sum += s.GetPages()
	}
	assert.Equal(t, sum, uint32(c.decode.boot.Pages))
	// Both run on this host, so no page went through a socket.
	readers := c.decode.leg.readers
	assert.Equal(t, len(readers.clients), 1)
	for _, reader := range readers.clients {
		assert.Equal(t, reader.Transport(), fabric.SharedMemory)
	}
	r := c.front.joinedAs(c.prefill.who.Epoch)
	assert.Equal(t, r.GetContextWindow(), uint32(256))
	assert.Equal(t, r.GetPages(), uint32(c.prefill.boot.Pages))
	assert.Equal(t, r.GetAddress(), c.prefill.boot.Listen)
	assert.Equal(t, r.GetFabricAddress(), c.prefill.boot.FabricListen)
	assert.Equal(t, r.GetModelDigest(), c.digest[:])
}

func granted(f *workerv1.LegFacts) (n uint32) {
	for _, e := range f.GetExtents() {
		n += e.GetCount()
	}
	return n
}

// The same request gives the same answer, alone and beside others, whatever the
// pages were used for before.
func TestSameAnswerUnderLoad(t *testing.T) {
	t.Parallel()
	c := newCluster(t, "")
	c.pair(func(b *Boot) { b.ScrubWith = "nan" })
	ask := func(owner byte) *outcome {
		j := c.job(owner, prompt(70, 3), 60)
		j.generate.Sampling.Temperature, j.generate.Sampling.Seed = 1, 99
		return c.do(t.Context(), j, nil)
	}
	want := ask(1)
	assert.NoError(t, want.err)
	var g errgroup.Group
	for i := range 8 {
		g.Go(func() error {
			got := ask(byte(2 + i%3))
			if got.err != nil {
				return got.err
			}
			return same(got, want.ids, want.text, got.text == want.text)
		})
		g.Go(func() error { return c.do(t.Context(), c.job(byte(i), prompt(10+20*i, i), 40), nil).err })
	}
	assert.NoError(t, g.Wait())
	c.restored()
}

// copyPrompt is BOS and a text that the copy model answers with itself.
func copyPrompt(t *testing.T, file, text string) []int32 {
	t.Helper()
	f, err := gguf.Open(file)
	assert.NoError(t, err)
	defer func() { assert.NoError(t, f.Close()) }()
	tok, err := tokenizer.FromGGUF(f)
	assert.NoError(t, err)
	bos, ok := tok.BOS()
	assert.True(t, ok)
	return tok.Encode([]int32{bos}, text, tokenizer.Plain)
}

func TestStopString(t *testing.T) {
	t.Parallel()
	c := newCluster(t, "")
	c.useModel(synth.CopyModel(256))
	c.pair(nil)
	const text = "the canary of this test is mauve!" // longer than the distance of the copy
	want := text[len(text)-synth.CopyDistance:]
	ids := copyPrompt(t, c.model, text)
	free := c.do(t.Context(), c.job(1, ids, 32), nil)
	assert.NoError(t, free.err)
	assert.Equal(t, free.text, want)
	assert.Equal(t, free.finished.GetDetail(), "max_tokens")
	assert.Equal(t, free.finished.GetFinishReason(), "length")

	j := c.job(1, ids, 100)
	j.generate.Stop = []string{"never", "test is"}
	o := c.do(t.Context(), j, nil)
	assert.NoError(t, o.err)
	assert.Equal(t, o.text, want[:strings.Index(want, "test is")])
	assert.Equal(t, o.finished.GetDetail(), "stop_string")
	assert.Equal(t, o.finished.GetFinishReason(), "stop")
	assert.Equal(t, len(o.ids), strings.Index(want, "test is")+len("test is"))

	// Content stays out of the logs; the ids of the request are in them.
	for _, i := range []*instance{c.prefill, c.decode} {
		logs := i.logs.String()
		assert.False(t, strings.Contains(logs, "canary") || strings.Contains(logs, "test is") || strings.Contains(logs, "mauve"))
		assert.True(t, strings.Contains(logs, "req_"))
	}
	c.restored()
}

// A request that waits for the prefill leg is withdrawn when its caller leaves.
func TestCancel(t *testing.T) {
	t.Parallel()
	for _, at := range []string{"reserved", "committed", "delta"} {
		t.Run(at, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t, "")
			c.pair(nil)
			ctx, cancel := context.WithCancel(t.Context())
			j := c.job(1, prompt(200, 1), 50)
			o := c.do(ctx, j, func(e string) {
				if e == at {
					cancel()
				}
			})
			cancel()
			assert.True(t, o.err != nil && o.finished == nil)
			c.restored()
			// The transfer is used up, and the worker is well.
			o = c.do(t.Context(), j, nil)
			assert.Equal(t, o.reasons()[0], "replay")
			assert.NoError(t, c.do(t.Context(), c.job(1, prompt(20, 1), 5), nil).err)
			c.restored()
		})
	}
}

// While a long prompt is computed its finished pages are pulled already, and
// the answer is the same as without. A fleet in which one of the legs is a
// version behind goes on, with what both speak.
func TestRollingUpgrade(t *testing.T) {
	t.Parallel()
	var want *outcome
	for _, tc := range []struct {
		name            string
		prefill, decode int
		early           bool
	}{
		{"both new", 0, 0, true},
		{"old prefill", 1, 0, false},
		{"old decode", 0, 1, false},
		{"both old", 1, 1, false},
	} {
		c := newCluster(t, "")
		c.prefill = c.start(peer.Prefill, func(b *Boot) { b.Handoff, b.Chunk = tc.prefill, 24 })
		c.decode = c.start(peer.Decode, func(b *Boot) { b.Handoff = tc.decode })
		c.ready(c.prefill)
		c.ready(c.decode)
		o := c.do(t.Context(), c.job(1, prompt(200, 1), 20), nil)
		assert.NoError(t, errors.Join(o.err, o.prefillErr))
		assert.Equal(t, o.committed.GetTokens(), uint32(200))
		assert.Equal(t, o.prefilled.GetManifestRoot(), o.committed.GetManifestRoot())
		if want == nil {
			want = o
		}
		assert.Equal(t, o.ids, want.ids)
		c.restored()
		// How many pages came early depends on the timing, that there were some
		// does not: the last preview is pulled before the offer is made.
		if got := !strings.Contains(c.decode.logs.String(), "early_pages=0"); got != tc.early {
			t.Errorf("%s: pages were pulled early: %v\n%s", tc.name, got, c.decode.logs)
		}
	}
}

// A worker refuses a version that it does not speak.
func TestUnknownVersion(t *testing.T) {
	t.Parallel()
	c := newCluster(t, "")
	c.pair(func(b *Boot) { b.Handoff = 1 })
	j := c.job(1, prompt(20, 1), 5)
	j.generate.HandoffVersion = 2
	assert.Equal(t, c.do(t.Context(), j, nil).reasons()[0], "wrong_version")
	j = c.job(1, prompt(20, 1), 5)
	j.prefill.HandoffVersion = 2
	assert.Equal(t, c.do(t.Context(), j, nil).reasons()[1], "wrong_version")
	c.restored()
}

// The second prompt that begins like one before computes less, says so, and is
// answered as it would be without. Another tenant's computes everything.
func TestPrefixCache(t *testing.T) {
	t.Parallel()
	c := newCluster(t, "")
	c.pair(func(b *Boot) {
		if b.Role == peer.Prefill {
			b.CachePages, b.Chunk = 32, 24
		}
	})
	ask := func(owner byte, n int) *outcome {
		o := c.do(t.Context(), c.job(owner, prompt(n, 1), 20), nil)
		assert.NoError(t, errors.Join(o.err, o.prefillErr))
		assert.Equal(t, o.prefilled.GetTokens(), uint32(n))
		return o
	}
	first := ask(1, 200)
	assert.Equal(t, first.prefilled.GetCachedTokens(), uint32(0))
	assert.Equal(t, first.committed.GetTransport(), "shm")
	second := ask(1, 200)
	assert.Equal(t, second.prefilled.GetCachedTokens(), uint32(192))
	assert.Equal(t, second.ids, first.ids)
	longer := ask(1, 220)
	assert.Equal(t, longer.prefilled.GetCachedTokens(), uint32(192))
	other := ask(2, 220)
	assert.Equal(t, other.prefilled.GetCachedTokens(), uint32(0))
	assert.Equal(t, other.ids, longer.ids)

	// The work of another tenant is the same as if nobody had been there.
	before := c.prefill.pool.Stats().CacheHits
	third := ask(3, 220)
	assert.Equal(t, third.prefilled.GetCachedTokens(), uint32(0))
	assert.Equal(t, c.prefill.pool.Stats().CacheHits, before)

	// What decode refuses is not remembered.
	j := c.job(4, prompt(100, 9), 5)
	j.generate.TokenDigest[0] ^= 1
	assert.True(t, c.do(t.Context(), j, nil).err != nil)
	cached := c.prefill.pool.Stats().CachedPages
	o := c.do(t.Context(), c.job(4, prompt(100, 9), 5), nil)
	assert.NoError(t, errors.Join(o.err, o.prefillErr))
	assert.Equal(t, o.prefilled.GetCachedTokens(), uint32(0))
	c.eventually("remembered", func() bool { return c.prefill.pool.Stats().CachedPages == cached+6 })
}

// With pages wiped ahead and every page at every grant, answers stay the same,
// and in the end no page is dirty.
func TestScrubAhead(t *testing.T) {
	t.Parallel()
	c := newCluster(t, "")
	c.pair(func(b *Boot) { b.ScrubRate, b.ScrubWith = 1<<40, "nan" })
	var want *outcome
	for owner := range 6 {
		o := c.do(t.Context(), c.job(byte(owner), prompt(100, 1), 30), nil)
		assert.NoError(t, errors.Join(o.err, o.prefillErr))
		if want == nil {
			want = o
		}
		assert.Equal(t, o.ids, want.ids)
	}
	for _, i := range []*instance{c.prefill, c.decode} {
		c.eventually("wiped", func() bool { return i.pool.Stats().Clean == i.pool.Stats().Pages })
	}
}

// Everything that happens to pages reaches the front while the worker lives, and
// the rest when it ends.
func TestPageHistoryArrives(t *testing.T) {
	t.Parallel()
	c := newCluster(t, "")
	c.pair(nil)
	o := c.do(t.Context(), c.job(1, prompt(100, 1), 20), nil)
	assert.NoError(t, errors.Join(o.err, o.prefillErr))
	seen := func(i *instance) uint64 {
		c.front.mu.Lock()
		defer c.front.mu.Unlock()
		return c.front.history[i.who.Epoch].LastSeq
	}
	for _, i := range []*instance{c.prefill, c.decode} {
		c.eventually("history", func() bool { return seen(i) > 0 })
		before := seen(i)
		// Two events that no tick will carry any more.
		credits, err := i.pool.Reserve(id.Owner{7}, 1)
		assert.NoError(t, err)
		filler, err := credits.Fill(id.NewLease())
		assert.NoError(t, err)
		assert.NoError(t, filler.Grant(1))
		filler.Abort()
		i.stop()
		<-i.done
		assert.NoError(t, i.err)
		assert.True(t, seen(i) >= before+2)
	}
}

// A gateway that gave a request up learns what each leg measured, once it has
// let go; a transfer that never came is refused when it comes too late.
func TestEndIsAcknowledged(t *testing.T) {
	t.Parallel()
	c := newCluster(t, "")
	c.pair(nil)
	control := func(i *instance) workerv1connect.ControlServiceClient {
		return workerv1connect.NewControlServiceClient(c.client(i, c.gateway), peer.BaseURL)
	}
	ctx, cancel := context.WithCancel(t.Context())
	j := c.job(1, prompt(40, 1), 200)
	// A model so slow that the answer cannot be complete before the end is heard of.
	c.decode.hook.set(func(next func([]compute.Span) error, spans []compute.Span) error {
		time.Sleep(10 * time.Millisecond)
		return next(spans)
	})
	n := 0
	o := c.do(ctx, j, func(event string) {
		if n++; event == "delta" && n > 8 {
			cancel()
		}
	})
	assert.True(t, o.err != nil)
	c.decode.hook.set(nil)
	end := &workerv1.EndRequest{TransferId: j.generate.TransferId}
	for _, i := range []*instance{c.prefill, c.decode} {
		r, err := control(i).End(t.Context(), end)
		assert.NoError(t, err)
		assert.Equal(t, r.GetFacts().GetTokens(), uint32(40))
		assert.Equal(t, r.GetQuarantined(), uint32(0))
		assert.Equal(t, i.pool.Stats().Free, i.pool.Stats().Pages) // not some time later: now
		if i == c.decode {
			assert.True(t, int(r.GetFacts().GetOutputTokens()) >= len(o.ids))
		}
	}

	late := c.job(1, prompt(40, 1), 5)
	for _, i := range []*instance{c.prefill, c.decode} {
		r, err := control(i).End(t.Context(), &workerv1.EndRequest{TransferId: late.generate.TransferId})
		assert.NoError(t, err)
		assert.True(t, r.GetFacts() == nil)
	}
	assert.Equal(t, c.do(t.Context(), late, nil).reasons()[0], "canceled")

	// While a call runs, the answer waits.
	entered, release := c.decode.hook.block(t)
	var g errgroup.Group
	slow := c.job(1, prompt(20, 1), 5)
	g.Go(func() error { return c.do(t.Context(), slow, nil).err })
	<-entered
	short, stop := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer stop()
	_, err := control(c.decode).End(short, &workerv1.EndRequest{TransferId: slow.generate.TransferId})
	assert.Equal(t, connect.CodeOf(err), connect.CodeDeadlineExceeded)
	release()
	assert.NoError(t, g.Wait())
	r, err := control(c.decode).End(t.Context(), &workerv1.EndRequest{TransferId: slow.generate.TransferId})
	assert.NoError(t, err)
	assert.Equal(t, r.GetFacts().GetOutputTokens(), uint32(5))
}

// What is remembered of ended calls is bounded, and what runs is not forgotten.
func TestCallsAreBounded(t *testing.T) {
	t.Parallel()
	var c calls
	running := id.NewTransfer()
	end, err := c.begin(running)
	assert.NoError(t, err)
	for range 2 * maxEnded {
		f, err := c.begin(id.NewTransfer())
		assert.NoError(t, err)
		f(&workerv1.LegFacts{})
	}
	assert.True(t, len(c.known) <= maxEnded+1)
	assert.Equal(t, len(c.order), len(c.known))
	end(&workerv1.LegFacts{Tokens: 7})
	f, err := c.wait(t.Context(), running)
	assert.NoError(t, err)
	assert.Equal(t, f.GetTokens(), uint32(7))
}
