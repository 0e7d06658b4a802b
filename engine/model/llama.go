package model

import (
	"encoding/binary"
	"fmt"
	"math"
	"strings"

	"bulkhead.dev/engine/model/gguf"
)

// Block holds the weights of one layer. Matrices have Dims {inputs, outputs}
// and one of the types of gguf.Supported; norms are F32 vectors.
type Block struct {
	// AttnNorm scales the input of the attention.
	AttnNorm gguf.Tensor
	// Q, K, V and O are the projections of the attention.
	Q, K, V, O gguf.Tensor
	// FFNNorm scales the input of the feed-forward layer.
	FFNNorm gguf.Tensor
	// Gate, Up and Down are its projections: Down(silu(Gate x) * Up x).
	Gate, Up, Down gguf.Tensor
}

// Llama is a model whose every shape and type has been checked. The tensors
// belong to the file it was loaded from.
type Llama struct {
	// Config holds the hyperparameters.
	Config Config
	// Embed has one row of Dim for each token.
	Embed gguf.Tensor
	// OutNorm scales the input of the head.
	OutNorm gguf.Tensor
	// Head makes logits; it is Embed where the file has no head of its own.
	Head gguf.Tensor
	// Blocks holds one entry for each layer.
	Blocks []Block
}

// keyChatTemplate holds the Jinja source of the chat template.
const keyChatTemplate = "tokenizer.chat_template"

// ChatTemplate returns the source of the chat template of a model file. It is
// untrusted code.
func ChatTemplate(f *gguf.File) (string, bool) { return f.Str(keyChatTemplate) }

// LoadLlama reads a model out of f, which must stay open for as long as the
// model is used. Errors wrap ErrInvalid or ErrUnsupported.
func LoadLlama(f *gguf.File) (*Llama, error) {
	c, err := readConfig(f)
	if err != nil {
		return nil, err
	}
	l := &loader{f: f, used: map[string]bool{}}
	embed, ok := f.Tensor("token_embd.weight")
	if !ok || len(embed.Dims) != 2 || embed.Dims[1] > maxVocab {
		return nil, invalid("tensor token_embd.weight is missing or is no matrix of at most %d tokens", maxVocab)
	}
	c.Vocab = int(embed.Dims[1])
	if n, ok := f.Uint(archLlama + ".vocab_size"); ok && n != uint64(c.Vocab) {
		return nil, invalid("key llama.vocab_size is %d, but there are embeddings of %d tokens", n, c.Vocab)
	}
	if n := f.Len("tokenizer.ggml.tokens"); n != 0 && n != c.Vocab {
		return nil, invalid("the tokenizer has %d tokens, the embeddings %d", n, c.Vocab)
	}
	m := &Llama{
		Embed:   l.matrix("token_embd.weight", c.Dim, c.Vocab),
		OutNorm: l.norm("output_norm.weight", c.Dim),
		Blocks:  make([]Block, c.Layers),
	}
	m.Head = m.Embed
	if _, ok := f.Tensor("output.weight"); ok {
		m.Head = l.matrix("output.weight", c.Dim, c.Vocab)
	}
	for i := range m.Blocks {
		m.Blocks[i] = l.block(i, c)
	}
	c.RopeFactors = l.ropeFactors(c.RopeDim / 2)
	l.refuseUnused()
	if l.err != nil {
		return nil, l.err
	}
	m.Config = c
	return m, nil
}

// loader takes tensors out of a file and keeps the first error.
type loader struct {
	f    *gguf.File
	used map[string]bool
	err  error
}

func (l *loader) fail(err error) {
	if l.err == nil {
		l.err = err
	}
}

func (l *loader) block(i int, c Config) Block {
	name := func(part string) string { return fmt.Sprintf("blk.%d.%s.weight", i, part) }
	q, kv := c.Heads*c.HeadDim, c.KVHeads*c.HeadDim
	return Block{
		AttnNorm: l.norm(name("attn_norm"), c.Dim),
		Q:        l.matrix(name("attn_q"), c.Dim, q),
		K:        l.matrix(name("attn_k"), c.Dim, kv),
		V:        l.matrix(name("attn_v"), c.Dim, kv),
		O:        l.matrix(name("attn_output"), q, c.Dim),
		FFNNorm:  l.norm(name("ffn_norm"), c.Dim),
		Gate:     l.matrix(name("ffn_gate"), c.Dim, c.Hidden),
		Up:       l.matrix(name("ffn_up"), c.Dim, c.Hidden),
		Down:     l.matrix(name("ffn_down"), c.Hidden, c.Dim),
	}
}

// take returns the tensor if it has these dimensions and a supported type.
func (l *loader) take(name string, dims ...int) gguf.Tensor {
	t, ok := l.f.Tensor(name)
	if !ok {
		l.fail(invalid("tensor %s is missing", name))
		return t
	}
	l.used[name] = true
	same := len(t.Dims) == len(dims)
	for i := 0; same && i < len(dims); i++ {
		same = t.Dims[i] == uint64(dims[i])
	}
	if !same {
		l.fail(invalid("tensor %s has dimensions %v, the hyperparameters ask for %v", name, t.Dims, dims))
		return t
	}
	if per, _ := t.Type.Block(); per == 0 {
		l.fail(unsupported("tensor %s has type %v; supported: %s", name, t.Type, typeList()))
	}
	return t
}

func (l *loader) matrix(name string, in, out int) gguf.Tensor { return l.take(name, in, out) }

func (l *loader) norm(name string, dim int) gguf.Tensor {
	t := l.take(name, dim)
	if l.err == nil && t.Type != gguf.F32 {
		l.fail(unsupported("tensor %s has type %v; supported for vectors: %v", name, t.Type, gguf.F32))
	}
	return t
}

// ropeFactors reads the divisors of the rotary angles, if there are any.
func (l *loader) ropeFactors(pairs int) []float32 {
	const name = "rope_freqs.weight"
	if _, ok := l.f.Tensor(name); !ok {
		return nil
	}
	t := l.norm(name, pairs)
	if l.err != nil {
		return nil
	}
	out := make([]float32, pairs)
	for i := range out {
		x := math.Float32frombits(binary.LittleEndian.Uint32(t.Data[4*i:]))
		if !(x > 0) || math.IsInf(float64(x), 0) {
			l.fail(invalid("tensor %s has the entry %g", name, x))
		}
		out[i] = x
	}
	return out
}

// refuseUnused refuses tensors that the forward pass would leave out.
func (l *loader) refuseUnused() {
	for _, t := range l.f.Tensors() {
		if !l.used[t.Name] {
			l.fail(unsupported("tensor %.80q is not part of a plain llama model", t.Name))
		}
	}
}

func typeList() string {
	var s []string
	for _, t := range gguf.Supported() {
		s = append(s, t.String())
	}
	return strings.Join(s, ", ")
}
