package compute

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/model"
	"bulkhead.dev/engine/model/gguf"
	"bulkhead.dev/engine/model/synth"
	"bulkhead.dev/engine/model/tokenizer"
	"bulkhead.dev/infra/assert"
)

// pages are the pages of one sequence, in memory that is not Go's.
type pages struct {
	geo  kv.Geometry
	addr []uintptr
	err  error
}

func (p *pages) Resolve(dst []uintptr, positions int) ([]uintptr, error) {
	if p.err != nil {
		return nil, p.err
	}
	return append(dst, p.addr[:p.geo.PagesFor(positions)]...), nil
}

// newPages maps room for the given positions. Pages lie in random order, and
// every byte of them is 0xff, which is NaN in both formats: whoever reads a slot
// that was not written computes NaN.
func newPages(t testing.TB, g kv.Geometry, positions int, rng *rand.Rand) *pages {
	t.Helper()
	n, size := g.PagesFor(positions), g.PageBytes()
	mem, err := unix.Mmap(-1, 0, n*size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	assert.NoError(t, err)
	t.Cleanup(func() { _ = unix.Munmap(mem) })
	for i := range mem {
		mem[i] = 0xff
	}
	p := &pages{geo: g}
	for _, i := range rng.Perm(n) {
		p.addr = append(p.addr, uintptr(unsafe.Pointer(&mem[i*size])))
	}
	return p
}

// bytes returns the keys and values of positions [0, n), layer by layer.
func (p *pages) bytes(n int) []byte {
	var out []byte
	size := p.geo.DType.Bytes()
	for pos := range n {
		addr := p.addr[pos/16]
		page := unsafe.Slice(*(**byte)(unsafe.Pointer(&addr)), p.geo.PageBytes())
		for l := range p.geo.Layers {
			for h := range p.geo.KVHeads {
				for d := range p.geo.HeadDim {
					k, v := p.geo.KIndex(l, h, d, pos%16)*size, p.geo.VIndex(l, h, pos%16, d)*size
					out = append(out, page[k:k+size]...)
					out = append(out, page[v:v+size]...)
				}
			}
		}
	}
	return out
}

func llama(t testing.TB, b []byte) *model.Llama {
	t.Helper()
	f, err := gguf.Parse(b)
	assert.NoError(t, err)
	l, err := model.LoadLlama(f)
	assert.NoError(t, err)
	return l
}

func load(t testing.TB, l *model.Llama, o Options) *Model {
	t.Helper()
	m, err := Load(l, o)
	assert.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, m.Close()) })
	return m
}

func tokens(rng *rand.Rand, n, vocab int) []int32 {
	out := make([]int32, n)
	for i := range out {
		out[i] = int32(rng.IntN(vocab))
	}
	return out
}

// run computes ids in chunks of the given size and returns the logits after the
// last token and the pages.
func run(t testing.TB, m *Model, ids []int32, chunk int, rng *rand.Rand) ([]float32, []byte) {
	t.Helper()
	p := newPages(t, m.Geometry(), len(ids), rng)
	logits := make([]float32, m.Vocab())
	for at := 0; at < len(ids); at += chunk {
		s := []Span{{Tokens: ids[at:min(at+chunk, len(ids))], Pos: at, Pages: p}}
		if at+chunk >= len(ids) {
			s[0].Logits = logits
		}
		assert.NoError(t, m.Forward(s))
		assert.Equal(t, s[0].Wrote, len(s[0].Tokens))
	}
	return logits, p.bytes(len(ids))
}

func same(t testing.TB, what string, got, want []float32) {
	t.Helper()
	for i := range want {
		if math.Float32bits(got[i]) != math.Float32bits(want[i]) {
			t.Fatalf("%s: logit %d is %v, want %v", what, i, got[i], want[i])
		}
		if math.IsNaN(float64(want[i])) {
			t.Fatalf("%s: logit %d is NaN", what, i)
		}
	}
}

// shapes cover odd sizes: heads of 8, 16 and 64, groups of 1 to 5, widths that
// are no multiple of a tile.
var shapes = []synth.Shape{
	{Layers: 2, Dim: 64, Heads: 8, KVHeads: 4, HeadDim: 8, Hidden: 172, Vocab: 301, Context: 128},
	{Layers: 2, Dim: 96, Heads: 3, KVHeads: 1, HeadDim: 64, Hidden: 160, Vocab: 263, Context: 128},
	{Layers: 1, Dim: 160, Heads: 10, KVHeads: 2, HeadDim: 16, Hidden: 96, Vocab: 320, Context: 128},
	{Layers: 1, Dim: 256, Heads: 2, KVHeads: 2, HeadDim: 128, Hidden: 64, Vocab: 280, Context: 128},
}

var types = []gguf.Type{gguf.F32, gguf.F16, gguf.BF16, gguf.Q8_0, gguf.Q4_0, gguf.Q4_1}

// Every level computes the bits of the Go reference: logits, keys and values.
func TestLevelsAgree(t *testing.T) {
	t.Parallel()
	for si, shape := range shapes {
		for _, typ := range types {
			for _, dtype := range []kv.DType{kv.F32, kv.F16} {
				t.Run(fmt.Sprintf("%d %v %v", si, typ, dtype), func(t *testing.T) {
					t.Parallel()
					s := shape
					s.Type = typ
					l := llama(t, synth.RandomLlama(uint64(si)+1, s))
					rng := rand.New(rand.NewPCG(1, uint64(si)))
					ids := tokens(rng, 37, s.Vocab)
					ref := load(t, l, Options{Level: levelGo, DType: dtype})
					want, wantKV := run(t, ref, ids, len(ids), rng)
					for _, level := range Levels()[1:] {
						for _, threads := range []int{1, 3} {
							m := load(t, l, Options{Level: level, DType: dtype, Threads: threads})
							got, gotKV := run(t, m, ids, len(ids), rng)
							same(t, level, got, want)
							if !slices.Equal(gotKV, wantKV) {
								t.Fatalf("%s: keys and values differ", level)
							}
						}
					}
				})
			}
		}
	}
}

// Neither chunking, nor neighbours, nor threads, nor slices of a long call
// change a bit.
func TestBatchInvariance(t *testing.T) {
	t.Parallel()
	for _, typ := range []gguf.Type{gguf.F32, gguf.Q4_1, gguf.Q8_0} {
		for _, level := range Levels() {
			t.Run(fmt.Sprintf("%v %s", typ, level), func(t *testing.T) {
				t.Parallel()
				s := shapes[1]
				s.Type = typ
				l := llama(t, synth.RandomLlama(7, s))
				rng := rand.New(rand.NewPCG(2, 3))
				n := 61
				if level == levelGo {
					n = 21
				}
				ids := tokens(rng, n, s.Vocab)
				m := load(t, l, Options{Level: level, DType: kv.F16, Threads: 2})
				want, wantKV := run(t, m, ids, n, rng)
				for _, chunk := range []int{1, 7, 16, 20, n - 1} {
					got, gotKV := run(t, m, ids, chunk, rng)
					same(t, fmt.Sprintf("chunks of %d", chunk), got, want)
					assert.True(t, slices.Equal(gotKV, wantKV))
				}
				for _, o := range []Options{{Threads: 1}, {Threads: 3}, {Threads: 2, MaxRows: 5}} {
					o.Level, o.DType = level, kv.F16
					got, gotKV := run(t, load(t, l, o), ids, n, rng)
					same(t, fmt.Sprintf("%+v", o), got, want)
					assert.True(t, slices.Equal(gotKV, wantKV))
				}
				// Beside others of all lengths, in any place of the batch.
				for place := range 4 {
					spans := make([]Span, 4)
					for i := range spans {
						other := tokens(rng, 1+rng.IntN(n), s.Vocab)
						spans[i] = Span{Tokens: other, Pages: newPages(t, m.Geometry(), n, rng), Logits: make([]float32, s.Vocab)}
					}
					p := newPages(t, m.Geometry(), n, rng)
					assert.NoError(t, m.Forward([]Span{{Tokens: ids[:n-1], Pages: p}}))
					spans[place] = Span{Tokens: ids[n-1:], Pos: n - 1, Pages: p, Logits: make([]float32, s.Vocab)}
					assert.NoError(t, m.Forward(spans))
					same(t, "beside others", spans[place].Logits, want)
				}
			})
		}
	}
}

// Many more threads than CPUs, over many short passes: whoever sleeps through a
// task, or wakes up in the next, must not show.
func TestManyThreads(t *testing.T) {
	t.Parallel()
	s := shapes[0]
	s.Type = gguf.Q4_0
	l := llama(t, synth.RandomLlama(3, s))
	rng := rand.New(rand.NewPCG(8, 8))
	ids := tokens(rng, 100, s.Vocab)
	want, wantKV := run(t, load(t, l, Options{DType: kv.F16, Threads: 1}), ids, 1, rng)
	for _, threads := range []int{2, 5, 16} {
		m := load(t, l, Options{DType: kv.F16, Threads: threads})
		for range 5 {
			got, gotKV := run(t, m, ids, 1, rng)
			same(t, fmt.Sprintf("%d threads", threads), got, want)
			assert.True(t, slices.Equal(gotKV, wantKV))
		}
	}
}

// A slot that was never written holds NaN here. Reading one must show, whatever
// the number format and however int8 activations come in between.
func TestUnwrittenSlotsShow(t *testing.T) {
	t.Parallel()
	for _, typ := range []gguf.Type{gguf.F32, gguf.Q8_0} {
		for _, level := range Levels() {
			s := shapes[0]
			s.Type = typ
			m := load(t, llama(t, synth.RandomLlama(9, s)), Options{Level: level, DType: kv.F16})
			p := newPages(t, m.Geometry(), 40, rand.New(rand.NewPCG(1, 1)))
			logits := make([]float32, s.Vocab)
			assert.NoError(t, m.Forward([]Span{{Tokens: []int32{5}, Pos: 20, Pages: p, Logits: logits}}))
			for _, v := range logits {
				if !math.IsNaN(float64(v)) {
					t.Fatalf("%v at %s: attention over unwritten slots gave %v", typ, level, v)
				}
			}
		}
	}
}

func TestRefusedCallsWriteNothing(t *testing.T) {
	t.Parallel()
	s := shapes[0]
	s.Type = gguf.F32
	m := load(t, llama(t, synth.RandomLlama(1, s)), Options{DType: kv.F32})
	rng := rand.New(rand.NewPCG(4, 4))
	p := newPages(t, m.Geometry(), 16, rng)
	before := p.bytes(16)
	gone := errors.New("gone")
	good := Span{Tokens: []int32{1, 2}, Pages: p}
	for name, bad := range map[string]Span{
		"no tokens":       {Pages: p},
		"negative token":  {Tokens: []int32{-1}, Pages: p},
		"big token":       {Tokens: []int32{int32(s.Vocab)}, Pages: p},
		"before":          {Tokens: []int32{1}, Pos: -1, Pages: p},
		"past the window": {Tokens: []int32{1, 1}, Pos: s.Context - 1, Pages: p},
		"no pages":        {Tokens: []int32{1}},
		"short logits":    {Tokens: []int32{1}, Pages: p, Logits: make([]float32, 3)},
		"stale pages":     {Tokens: []int32{1}, Pages: &pages{geo: m.Geometry(), err: gone}},
	} {
		err := m.Forward([]Span{good, bad})
		if name == "stale pages" {
			assert.ErrorIs(t, err, gone)
		} else {
			assert.ErrorIs(t, err, ErrSpan)
		}
		assert.True(t, slices.Equal(p.bytes(16), before))
	}
	assert.NoError(t, m.Close())
	assert.ErrorIs(t, m.Forward([]Span{good}), ErrClosed)
}

func TestOptions(t *testing.T) {
	t.Parallel()
	s := shapes[0]
	l := llama(t, synth.RandomLlama(1, s))
	for _, o := range []Options{{}, {DType: kv.F16, Backend: "cuda"}, {DType: kv.F16, Level: "sse9"}, {DType: kv.F16, Backend: "go", Level: levelScalar}, {DType: kv.F16, MaxRows: -1}} {
		_, err := Load(l, o)
		assert.ErrorIs(t, err, ErrOptions)
	}
	m := load(t, l, Options{DType: kv.F16, Backend: "go"})
	assert.Equal(t, m.Level(), levelGo)
}

// seen is a backend that notes, when it is asked for its scratch after a pass,
// which buffers hold anything.
type seen struct {
	backend
	dirty map[int]bool
}

func (s *seen) scratch(dst [][]byte, rows int) [][]byte {
	dst = s.backend.scratch(dst, rows)
	for i, b := range dst {
		s.dirty[i] = s.dirty[i] || !zero(b)
	}
	return dst
}

func zero(b []byte) bool { return !slices.ContainsFunc(b, func(c byte) bool { return c != 0 }) }

// Scratch is a way to leak like any other: after a pass nothing of it is left in
// any buffer. Each is looked at whole, and each but those of attention, which
// clears its own, must have held something before it was wiped.
func TestScratchIsCleared(t *testing.T) {
	t.Parallel()
	s := shapes[0]
	s.Type = gguf.Q8_0
	for _, level := range Levels() {
		m := load(t, llama(t, synth.RandomLlama(1, s)), Options{Level: level, DType: kv.F16, MaxRows: 32, Threads: 2})
		spy := &seen{m.back, map[int]bool{}}
		m.back = spy
		rng := rand.New(rand.NewPCG(5, 5))
		for _, n := range []int{32, 5, 1} { // a pass clears its own rows only
			run(t, m, tokens(rng, n, s.Vocab), n, rng)
			for i, b := range spy.backend.scratch(nil, 32) {
				if !zero(b) {
					t.Fatalf("%s: after a pass over %d rows something is left in buffer %d", level, n, i)
				}
			}
		}
		for i, dirty := range spy.dirty {
			if attention := level != levelGo && i == len(spy.dirty)-1; dirty == attention {
				t.Errorf("%s: buffer %d held something before it was wiped: %v", level, i, dirty)
			}
		}
	}
}

// Nothing that scratch held before a pass shows in its result. Every byte is set
// to 0xff, which is NaN, between the passes.
func TestScratchIsNotRead(t *testing.T) {
	t.Parallel()
	for _, s := range shapes {
		for _, typ := range types {
			s.Type = typ
			l := llama(t, synth.RandomLlama(3, s))
			for _, level := range Levels() {
				m := load(t, l, Options{Level: level, DType: kv.F16, MaxRows: 24, Threads: 2})
				ids := tokens(rand.New(rand.NewPCG(8, 8)), 40, s.Vocab)
				pass := func(poison bool) ([]float32, []byte) {
					rng := rand.New(rand.NewPCG(9, 9))
					p := newPages(t, m.Geometry(), len(ids), rng)
					logits := make([]float32, m.Vocab())
					for at := 0; at < len(ids); at += 10 {
						if poison {
							for _, b := range m.back.scratch(nil, 24) {
								for i := range b {
									b[i] = 0xff
								}
							}
						}
						span := Span{Tokens: ids[at : at+10], Pos: at, Pages: p, Logits: logits}
						assert.NoError(t, m.Forward([]Span{span}))
					}
					return logits, p.bytes(len(ids))
				}
				logits, wrote := pass(false)
				again, rewrote := pass(true)
				same(t, level+" over poison", again, logits)
				if !slices.Equal(rewrote, wrote) {
					t.Fatalf("%s, %v: other keys and values over poison", level, typ)
				}
			}
		}
	}
}

func TestFMA(t *testing.T) {
	t.Parallel()
	rng := rand.New(rand.NewPCG(6, 6))
	for range 200_000 {
		f := func() float32 {
			return float32(math.Ldexp(float64(rng.Uint32()|1)*float64(1-2*(rng.IntN(2))), rng.IntN(60)-60))
		}
		a, b, c := f(), f(), f()
		if rng.IntN(2) == 0 { // nearly cancelling sums are the hard ones
			c = -a * b * float32(1+math.Ldexp(float64(rng.IntN(3)-1), -20))
		}
		exact := new(big.Float).SetPrec(400)
		exact.Mul(big.NewFloat(float64(a)).SetPrec(400), big.NewFloat(float64(b)).SetPrec(400))
		exact.Add(exact, big.NewFloat(float64(c)).SetPrec(400))
		want, _ := exact.Float32()
		if got := fma32(a, b, c); got != want {
			t.Fatalf("fma(%v, %v, %v) = %v, want %v", a, b, c, got, want)
		}
	}
}

func TestHalf(t *testing.T) {
	t.Parallel()
	for h := range 1 << 16 {
		f := halfToFloat(uint16(h))
		if f == f && floatToHalf(f) != uint16(h) {
			t.Fatalf("%#x does not survive", h)
		}
	}
	for f, want := range map[float32]uint16{65519.99: 0x7bff, 65520: 0x7c00, 1e-8: 0, 2.9802322e-8: 0, 2.9802326e-8: 1, 1.00048828125: 0x3c00, 1.0014648: 0x3c02} {
		assert.Equal(t, floatToHalf(f), want)
	}
}

type golden struct {
	Runs []struct {
		Model     string       `json:"model"`
		Prompt    string       `json:"prompt"`
		PromptIDs []int32      `json:"prompt_ids"`
		Top       [][2]float64 `json:"top"`
		GreedyIDs []int32      `json:"greedy_ids"`
	} `json:"runs"`
}

func greedy(logits []float32) int32 {
	best := 0
	for i, v := range logits {
		if v > logits[best] {
			best = i
		}
	}
	return int32(best)
}

// Greedy ids and probabilities of stories260K equal those of llama.cpp.
func TestGoldenStories(t *testing.T) {
	t.Parallel()
	path := assert.SharedData(t, "stories260K/golden_llamacpp.json")
	b, err := os.ReadFile(path)
	assert.NoError(t, err)
	var g golden
	assert.NoError(t, json.Unmarshal(b, &g))
	for _, level := range Levels() {
		for _, r := range g.Runs {
			t.Run(level+" "+r.Model+" "+r.Prompt, func(t *testing.T) {
				t.Parallel()
				f, err := gguf.Open(filepath.Join(filepath.Dir(path), "converted", r.Model))
				assert.NoError(t, err)
				l, err := model.LoadLlama(f)
				assert.NoError(t, err)
				m := load(t, l, Options{Level: level, DType: kv.F32, Threads: 2})
				assert.NoError(t, f.Close()) // nothing points into the file any more
				exact := strings.Contains(r.Model, "f32")
				tolerance, steps := 1e-4, len(r.GreedyIDs)
				if !exact { // llama.cpp rounds int8 activations in its own way: compare probabilities only
					tolerance, steps = 3e-2, 0
				}
				p := newPages(t, m.Geometry(), len(r.PromptIDs)+len(r.GreedyIDs), rand.New(rand.NewPCG(1, 2)))
				logits := make([]float32, m.Vocab())
				assert.NoError(t, m.Forward([]Span{{Tokens: r.PromptIDs, Pages: p, Logits: logits}}))
				var sum float64
				for _, v := range logits {
					sum += math.Exp(float64(v))
				}
				for _, top := range r.Top {
					if got := math.Exp(float64(logits[int(top[0])])) / sum; math.Abs(got-top[1]) > tolerance {
						t.Fatalf("token %v has probability %v, want %v", top[0], got, top[1])
					}
				}
				for i := range steps {
					id := greedy(logits)
					if id != r.GreedyIDs[i] {
						t.Fatalf("token %d is %d, want %d", i, id, r.GreedyIDs[i])
					}
					assert.NoError(t, m.Forward([]Span{{Tokens: []int32{id}, Pos: len(r.PromptIDs) + i, Pages: p, Logits: logits}}))
				}
			})
		}
	}
}

func smollm(t testing.TB) (*gguf.File, *model.Llama) {
	t.Helper()
	path := os.Getenv("BULKHEAD_TEST_MODEL")
	if path == "" {
		assert.Skip(t, "BULKHEAD_TEST_MODEL does not name the default model")
	}
	f, err := gguf.Open(path)
	assert.NoError(t, err)
	t.Cleanup(func() { _ = f.Close() })
	l, err := model.LoadLlama(f)
	assert.NoError(t, err)
	return f, l
}

func TestSmolLM(t *testing.T) {
	f, l := smollm(t)
	if len(Levels()) == 1 {
		t.Log("the reference is slow: this takes a while")
	}
	tok, err := tokenizer.FromGGUF(f)
	assert.NoError(t, err)
	m := load(t, l, Options{DType: kv.F16, Threads: 2})
	ids := tok.Encode(nil, "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n", tokenizer.Markup)
	p := newPages(t, m.Geometry(), len(ids)+24, rand.New(rand.NewPCG(1, 2)))
	logits := make([]float32, m.Vocab())
	assert.NoError(t, m.Forward([]Span{{Tokens: ids, Pages: p, Logits: logits}}))
	var text strings.Builder
	dec := tok.NewDecoder()
	for i := range 24 {
		id := greedy(logits)
		if tok.IsEOG(id) {
			break
		}
		text.WriteString(dec.Push(id))
		assert.NoError(t, m.Forward([]Span{{Tokens: []int32{id}, Pos: len(ids) + i, Pages: p, Logits: logits}}))
	}
	if !strings.Contains(text.String(), "Paris") {
		t.Fatalf("the answer is %q", text.String())
	}
}
