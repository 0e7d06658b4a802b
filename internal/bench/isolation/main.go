//go:build faulty

// Command isolation measures what it costs that tenants are kept apart: owner
// tags, scrubs, digests, manifests, verification and receipts, for prompts of 512
// tokens of a real model, both legs in one process.
//
// It counts the CPU and wall time of exactly that work, as a share of all, and
// runs every request a second time on a plain path without any of it (which
// only this build has), interleaved, for an interval of the difference.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"bulkhead.dev/audit/receipt"
	"bulkhead.dev/engine/compute"
	"bulkhead.dev/engine/fabric"
	"bulkhead.dev/engine/handoff"
	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/mem"
	"bulkhead.dev/engine/model"
	"bulkhead.dev/engine/model/gguf"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/internal/faulty/walls"
)

const (
	promptTokens = 512
	chunk        = 256
)

func main() {
	path := flag.String("model", os.Getenv("BULKHEAD_TEST_MODEL"), "GGUF file")
	pairs := flag.Int("pairs", 40, "requests with isolation, and as many without")
	threads := flag.Int("threads", runtime.NumCPU(), "threads of the forward pass")
	flag.Parse()
	if err := run(*path, *pairs, *threads); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// bench is both legs.
type bench struct {
	model           *compute.Model
	prefill, decode *kv.Pool
	server          *fabric.Server
	receiver        *handoff.Receiver
	epochs          [2]id.Epoch
	tokens          []int32
	logits          []float32
	n               int // requests so far; every one is of another tenant than the last
}

func run(path string, pairs, threads int) (err error) {
	if path == "" {
		return errors.New("name a model with -model")
	}
	runtime.LockOSThread() // thread CPU time is that of this goroutine
	f, err := gguf.Open(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	llama, err := model.LoadLlama(f)
	if err != nil {
		return err
	}
	b := &bench{server: fabric.NewServer(fabric.ServerOptions{}), epochs: [2]id.Epoch{id.NewEpoch(time.Now()), id.NewEpoch(time.Now())}}
	if b.model, err = compute.Load(llama, compute.Options{Threads: threads, DType: kv.F16, MaxRows: chunk}); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.model.Close()) }()
	g := b.model.Geometry()
	for _, pool := range []**kv.Pool{&b.prefill, &b.decode} {
		// As many pages as a request takes: each has to be scrubbed for the next.
		if *pool, err = kv.New(kv.Config{Geometry: g, Pages: g.PagesFor(promptTokens + 1)}); err != nil {
			return err
		}
	}
	b.receiver = handoff.NewReceiver(handoff.ReceiverConfig{Epoch: b.epochs[1], Geometry: g})
	b.logits = make([]float32, b.model.Vocab())
	for i := range promptTokens {
		b.tokens = append(b.tokens, int32(100+i*37%20000))
	}
	for range 3 { // warm up
		if _, err := b.both(); err != nil {
			return err
		}
	}
	var all []pair
	for range pairs {
		p, err := b.both()
		if err != nil {
			return err
		}
		all = append(all, p)
	}
	print(b, all, threads)
	return nil
}

// cost is what something took.
type cost struct{ cpu, wall time.Duration }

func (c *cost) add(o cost) { c.cpu += o.cpu; c.wall += o.wall }

func cpuTime(clock int32) time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(clock, &ts); err != nil {
		panic(err)
	}
	return time.Duration(ts.Nano())
}

// spent measures what f takes on this thread.
func spent(f func() error) (cost, error) {
	cpu, wall := cpuTime(unix.CLOCK_THREAD_CPUTIME_ID), time.Now()
	err := f()
	return cost{cpuTime(unix.CLOCK_THREAD_CPUTIME_ID) - cpu, time.Since(wall)}, err
}

// whole measures what f takes in the process.
func whole(f func() error) (cost, error) {
	cpu, wall := cpuTime(unix.CLOCK_PROCESS_CPUTIME_ID), time.Now()
	err := f()
	return cost{cpuTime(unix.CLOCK_PROCESS_CPUTIME_ID) - cpu, time.Since(wall)}, err
}

// pair is a request with isolation and one without. parts are the work of
// isolation in the first.
type pair struct {
	with, without cost
	parts         [numParts]cost
}

type part int

const (
	scrub part = iota
	seal
	digest
	verify
	proof
	record
	numParts
)

var partNames = [numParts]string{
	"grant and scrub, prefill", "seal", "digests and manifest, prefill", "scrub, digests, verification, decode", "proof of the last position", "receipt",
}

func (b *bench) both() (p pair, err error) {
	run := []func() error{
		func() (err error) {
			p.with, err = whole(func() error { return b.request(&p.parts) })
			return err
		},
		func() (err error) {
			if err := walls.TakeDown(string(walls.Scrub)); err != nil {
				return err
			}
			p.without, err = whole(b.plain)
			return errors.Join(err, walls.TakeDown(""))
		},
	}
	if b.n%4 < 2 { // neither is always first
		slices.Reverse(run)
	}
	return p, errors.Join(run[0](), run[1]())
}

// owner is another one than that of the request before.
func (b *bench) owner() id.Owner {
	b.n++
	return id.Owner{1, byte(b.n)}
}

// fill computes the prompt into pages.
func (b *bench) fill(filler *kv.Filler) error {
	for pos := 0; pos < len(b.tokens); pos += chunk {
		table, err := filler.Table(pos, chunk)
		if err != nil {
			return err
		}
		spans := []compute.Span{{Tokens: b.tokens[pos : pos+chunk], Pos: pos, Pages: table}}
		err = errors.Join(b.model.Forward(spans), table.Advance(chunk))
		table.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

// first computes the last position again, which gives the first token.
func (b *bench) first(seq *kv.Sequence) error {
	last := len(b.tokens) - 1
	table, err := seq.Table(last, 1)
	if err != nil {
		return err
	}
	defer table.Close()
	spans := []compute.Span{{Tokens: b.tokens[last:], Pos: last, Pages: table, Logits: b.logits}}
	return errors.Join(b.model.Forward(spans), table.Advance(1))
}

// request serves one prompt up to its first token, as the workers do.
func (b *bench) request(parts *[numParts]cost) error {
	o := b.owner()
	g := b.prefill.Geometry()
	pages := g.PagesFor(promptTokens)
	count := func(p part, f func() error) error {
		c, err := spent(f)
		parts[p].add(c)
		return err
	}
	var filler *kv.Filler
	if err := count(scrub, func() error {
		credits, err := b.prefill.Reserve(o, pages)
		if err != nil {
			return err
		}
		if filler, err = credits.Fill(id.NewLease()); err != nil {
			return err
		}
		return filler.Grant(pages)
	}); err != nil {
		return err
	}
	defer filler.Abort()
	if err := b.fill(filler); err != nil {
		return err
	}
	var sealed *kv.Sealed
	if err := count(seal, func() (err error) { sealed, err = filler.Seal(promptTokens); return err }); err != nil {
		return err
	}
	meta := handoff.Meta{
		Version: handoff.Early, Request: id.NewRequest(time.Now()), Transfer: id.NewTransfer(), Nonce: id.NewNonce(),
		PrefillEpoch: b.epochs[0], DecodeEpoch: b.epochs[1], TokenDigest: handoff.TokenDigest(b.tokens),
	}
	offer := handoff.NewOffer(b.server, meta)
	defer offer.Abort()
	if err := count(digest, func() error { return offer.Complete(sealed) }); err != nil {
		return err
	}
	credits, err := b.decode.Reserve(o, pages)
	if err != nil {
		return err
	}
	in, err := b.receiver.Expect(handoff.Expect{
		Version: meta.Version, Request: meta.Request, Transfer: meta.Transfer, Nonce: meta.Nonce, Owner: o, Lease: id.NewLease(),
		PrefillEpoch: meta.PrefillEpoch, TokenDigest: meta.TokenDigest, Tokens: promptTokens,
	}, credits, b.server.Local())
	if err != nil {
		return err
	}
	defer in.Close()
	// The pull is scrub, copy, digest and verification; the copy is no isolation,
	// and is measured by itself on the plain path.
	var root [32]byte
	if err := count(verify, func() (err error) {
		root, err = b.receiver.Pull(context.Background(), meta.Transfer, offer.Manifest())
		return err
	}); err != nil {
		return err
	}
	if err := offer.Ack(root); err != nil {
		return err
	}
	c, err := in.Wait(context.Background())
	if err != nil {
		return err
	}
	seq, err := c.Sequence()
	if err != nil {
		return err
	}
	defer seq.Release()
	var before []byte
	if err := count(proof, func() (err error) { before, err = seq.TokenBytes(promptTokens-1, nil); return err }); err != nil {
		return err
	}
	if err := b.first(seq); err != nil {
		return err
	}
	if err := count(proof, func() error {
		after, err := seq.TokenBytes(promptTokens-1, nil)
		if err == nil && string(before) != string(after) {
			err = errors.New("the last position came out differently")
		}
		return err
	}); err != nil {
		return err
	}
	return count(record, func() error { return b.receipt(meta, offer, c) })
}

func (b *bench) receipt(meta handoff.Meta, offer *handoff.Offer, c *handoff.Committed) error {
	n := uint32(promptTokens)
	h := receipt.NewHasher("bench", [32]byte{1})
	h.IDs([]uint32{5})
	h.Text("answer")
	leg := func(epoch id.Epoch, extents []kv.Extent) *receipt.Leg {
		l := &receipt.Leg{Worker: epoch, Tokens: &n, ManifestRoot: receipt.Digest(offer.Root()), HandoffBytes: c.Bytes()}
		for _, e := range extents {
			l.Extents = append(l.Extents, receipt.Extent{First: e.First, Count: e.Count, Generation: e.Generation, Scrubbed: e.Scrubbed})
		}
		return l
	}
	now := receipt.At(time.Now())
	r := receipt.Receipt{
		Request: meta.Request, Tenant: id.Tenant{1}, Project: id.Project{1}, Key: id.Key{1}, Model: "bench", Surface: "bench",
		Received: now, Admitted: now, Committed: now, FirstByte: now, Finished: now, EdgeTokens: &n,
		Prefill: leg(b.epochs[0], offer.Extents()), Decode: leg(b.epochs[1], c.Extents()), Output: 1, MaxOutput: 1,
		Outcome: receipt.Completed, Finish: "length", Isolation: receipt.Shared, Response: h.Response(), Replica: b.epochs[0],
	}
	_, err := r.Encode()
	return err
}

// plain serves one prompt without scrubs, digests, manifest, proof or receipt:
// pages are granted, computed, copied and used.
func (b *bench) plain() error {
	o := b.owner()
	g := b.prefill.Geometry()
	pages := g.PagesFor(promptTokens)
	credits, err := b.prefill.Reserve(o, pages)
	if err != nil {
		return err
	}
	filler, err := credits.Fill(id.NewLease())
	if err != nil {
		return err
	}
	defer filler.Abort()
	if err := filler.Grant(pages); err != nil {
		return err
	}
	if err := b.fill(filler); err != nil {
		return err
	}
	sealed, err := filler.Seal(promptTokens)
	if err != nil {
		return err
	}
	defer sealed.Release()
	if credits, err = b.decode.Reserve(o, pages); err != nil {
		return err
	}
	landing, err := credits.Land(id.NewLease())
	if err != nil {
		return err
	}
	if err := landing.Grant(pages); err != nil {
		return err
	}
	b.copy(sealed, landing, pages)
	seq := landing.CommitBlindly(promptTokens)
	defer seq.Release()
	return b.first(seq)
}

// copied is what copying the pages takes, by itself.
var copied []cost

func (b *bench) copy(sealed *kv.Sealed, landing *kv.Landing, pages int) {
	var refs []kv.PageRef
	for _, e := range sealed.Extents() {
		for k := range e.Count {
			refs = append(refs, kv.PageRef{Index: e.First + k, Generation: e.Generation})
		}
	}
	c, _ := spent(func() error {
		landing.ReceiveBlindly(pages, func(i int, memory []byte) {
			_ = sealed.View(refs[i], func(page []byte) error { mem.Copy(memory, page); return nil })
		})
		return nil
	})
	copied = append(copied, c)
}

func median(of []float64) float64 {
	s := slices.Sorted(slices.Values(of))
	return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}

func print(b *bench, all []pair, threads int) {
	of := func(f func(p pair) time.Duration) float64 {
		var v []float64
		for _, p := range all {
			v = append(v, f(p).Seconds())
		}
		return median(v)
	}
	var copyCPU, copyWall []float64
	for _, c := range copied {
		copyCPU, copyWall = append(copyCPU, c.cpu.Seconds()), append(copyWall, c.wall.Seconds())
	}
	plainCopy := cost{time.Duration(median(copyCPU) * 1e9), time.Duration(median(copyWall) * 1e9)}
	cpu, ttft := of(func(p pair) time.Duration { return p.with.cpu }), of(func(p pair) time.Duration { return p.with.wall })
	fmt.Printf("%d tokens, %d pages of %d bytes on each leg, %s kernels, %d threads, %d pairs, medians\n\n",
		promptTokens, b.prefill.Geometry().PagesFor(promptTokens), b.prefill.Geometry().PageBytes(), b.model.Level(), threads, len(all))
	fmt.Printf("request up to its first token: %.1f ms, %.1f ms of CPU\n\n%-36s %10s %8s %10s %8s\n", ttft*1e3, cpu*1e3, "work of isolation", "CPU us", "of all", "wall us", "of TTFT")
	line := func(name string, c cost) {
		fmt.Printf("%-36s %10.0f %7.3f%% %10.0f %7.3f%%\n", name, c.cpu.Seconds()*1e6, 100*c.cpu.Seconds()/cpu, c.wall.Seconds()*1e6, 100*c.wall.Seconds()/ttft)
	}
	var sum cost
	for i := range numParts {
		c := cost{time.Duration(of(func(p pair) time.Duration { return p.parts[i].cpu }) * 1e9), time.Duration(of(func(p pair) time.Duration { return p.parts[i].wall }) * 1e9)}
		if i == verify {
			c.cpu, c.wall = max(c.cpu-plainCopy.cpu, 0), max(c.wall-plainCopy.wall, 0)
		}
		sum.add(c)
		line(partNames[i], c)
	}
	line("all of it", sum)
	line("(the copy itself, not counted)", plainCopy)
	verdict := "within"
	if sum.cpu.Seconds()/cpu > 0.01 || sum.wall.Seconds()/ttft > 0.01 {
		verdict = "ABOVE"
	}
	fmt.Printf("%s the bound of 1 %% of CPU and 1 %% of TTFT\n\n", verdict)
	interval("CPU", all, func(p pair) (time.Duration, time.Duration) { return p.with.cpu, p.without.cpu })
	interval("TTFT", all, func(p pair) (time.Duration, time.Duration) { return p.with.wall, p.without.wall })
}

// interval prints how much more the requests with isolation took than those
// without, pair by pair, with the 95 % interval of the mean.
func interval(what string, all []pair, f func(pair) (time.Duration, time.Duration)) {
	var mean, square float64
	for _, p := range all {
		with, without := f(p)
		d := 100 * (with.Seconds()/without.Seconds() - 1)
		mean += d
		square += d * d
	}
	n := float64(len(all))
	mean /= n
	half := 1.96 * math.Sqrt((square/n-mean*mean)/(n-1))
	fmt.Printf("%s against the plain path, A/B: %+.2f %% (95 %% interval %+.2f %% to %+.2f %%)\n", what, mean, mean-half, mean+half)
}
