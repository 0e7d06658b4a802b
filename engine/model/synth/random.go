package synth

import (
	"fmt"
	"math"
	"math/rand/v2"

	"bulkhead.dev/engine/model/gguf"
)

// Shape holds the sizes of a random model.
type Shape struct {
	// Layers to Context are as in model.Config. Vocab is at least MinVocab.
	Layers, Dim, Heads, KVHeads, HeadDim, Hidden, Vocab, Context int
	// Type is the format of the matrices. A matrix whose rows do not fill
	// blocks of the type is F32.
	Type gguf.Type
	// Tied leaves out the head, so that the embeddings serve as head.
	Tied bool
	// Words, where there are any, are tokens, and so are all their beginnings.
	// Vocab is then what they take.
	Words []string
}

const (
	// attentionGain makes queries and keys larger than the norm would, so that
	// attention is not flat and every position matters.
	attentionGain = 1.5
	// logitGain is about the standard deviation of the logits: enough that
	// greedy choices do not hang on the last bits.
	logitGain = 3
)

// RandomLlama returns the bytes of a GGUF file with random weights, the same
// for the same arguments, with a byte-level tokenizer and a chat template with
// marks of turns. It panics if the shape is impossible.
func RandomLlama(seed uint64, s Shape) []byte {
	words := beginnings(s.Words)
	if len(words) > 0 {
		s.Vocab = MinVocab + printable + len(words)
	}
	if s.Vocab < MinVocab {
		panic(fmt.Sprintf("synth: a vocabulary of %d, at least %d are needed", s.Vocab, MinVocab))
	}
	w := gguf.NewWriter()
	setShape(w, "random", s)
	setVocab(w, s.Vocab, chatTemplate, words)
	// The second word keeps these numbers apart from other uses of a seed.
	g := &generator{w: w, r: rand.New(rand.NewPCG(seed, 0x73796e7468)), s: s}
	head := 1.0
	if s.Tied {
		head = logitGain
	}
	g.matrix("token_embd", s.Dim, s.Vocab, head)
	for i := range s.Layers {
		p := fmt.Sprintf("blk.%d.", i)
		q, kv := s.Heads*s.HeadDim, s.KVHeads*s.HeadDim
		g.norm(p + "attn_norm")
		g.matrix(p+"attn_q", s.Dim, q, attentionGain)
		g.matrix(p+"attn_k", s.Dim, kv, attentionGain)
		g.matrix(p+"attn_v", s.Dim, kv, 1)
		g.matrix(p+"attn_output", q, s.Dim, 1)
		g.norm(p + "ffn_norm")
		g.matrix(p+"ffn_gate", s.Dim, s.Hidden, 1)
		g.matrix(p+"ffn_up", s.Dim, s.Hidden, 1)
		g.matrix(p+"ffn_down", s.Hidden, s.Dim, 1)
	}
	g.norm("output_norm")
	if !s.Tied {
		g.matrix("output", s.Dim, s.Vocab, logitGain)
	}
	return file(w)
}

// generator draws tensors. It uses no function whose last bit depends on the
// machine.
type generator struct {
	w *gguf.Writer
	r *rand.Rand
	s Shape
}

// matrix draws a matrix that keeps the size of its input, times gain: even
// numbers of standard deviation gain/sqrt(in).
func (g *generator) matrix(name string, in, out int, gain float64) {
	limit := gain * math.Sqrt(3/float64(in))
	x := make([]float32, in*out)
	for i := range x {
		x[i] = float32(limit * g.uniform())
	}
	t := g.s.Type
	if per, _ := t.Block(); in%per != 0 {
		t = gguf.F32
	}
	g.w.Add(name+".weight", t, []uint64{uint64(in), uint64(out)}, Encode(t, x))
}

// norm draws the weights of a norm around 1.
func (g *generator) norm(name string) {
	x := make([]float32, g.s.Dim)
	for i := range x {
		x[i] = float32(1 + g.uniform()/4)
	}
	g.w.Add(name+".weight", gguf.F32, []uint64{uint64(len(x))}, Encode(gguf.F32, x))
}

// uniform draws from -1 to 1.
func (g *generator) uniform() float64 { return 2*g.r.Float64() - 1 }
