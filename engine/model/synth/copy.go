package synth

import (
	"fmt"
	"math"

	"bulkhead.dev/engine/model/gguf"
)

// CopyDistance is how far back the copy model reads, in tokens: greedily, the
// token at position p is the token at position p-CopyDistance. It is two pages
// of the KV cache.
const CopyDistance = 32

// copyTemplate is the contents of the messages and nothing else, so that the
// tokens of a prompt are BOS and the bytes of its text.
const copyTemplate = `{% for message in messages %}{{ message.content }}{% endfor %}`

// Parts of the residual stream of the copy model, by first index.
const (
	queryConst = 0                     // 1 at every position
	keyConst   = 1                     // 1, and -1 for BOS
	ownCode    = 2                     // code of the token at this position
	foundCode  = ownCode + codeWidth   // code that attention found
	codeWidth  = highDigits + base     // of a code
	highDigits = 17                    // values of the first digit, for up to 272 tokens
	base       = 16                    // values of the second digit
	meanCode   = foundCode + codeWidth // mean of the codes so far, in the deep model
	copyDim    = 96                    // the first three parts, rounded up to whole blocks
	deepDim    = 128                   // all four
	copyHead   = 64                    // width of the head
	copyHidden = 32                    // width of the feed-forward layer, which is zero
)

const (
	// copyPeak is what one rotary frequency adds to a score at the peak. The
	// neighbours of the peak lose about copyPeak in all.
	copyPeak = 24
	// copyGain is what a digit that agrees adds to a logit.
	copyGain = 20
	// meanGain is the size of the mean code in the stream. It takes less than a
	// hundredth from what the last norm leaves of the code that was found.
	meanGain = 1.0 / 8
)

// CopyModel returns the bytes of a GGUF file of the copy model with the given
// context length. The package comment explains it.
func CopyModel(context int) []byte {
	return copyModel(Shape{Layers: 1, Dim: copyDim, Heads: 1, Context: context})
}

// DeepCopyModel is CopyModel with a second layer, whose values are a mean over
// all positions so far and go nowhere: as in any model of several layers, keys
// and values of a position depend on everything in front of it.
func DeepCopyModel(context int) []byte {
	return copyModel(Shape{Layers: 2, Dim: deepDim, Heads: 2, Context: context})
}

// copyModel builds the copy model with what is set in s: layers and heads are
// both one or both two.
func copyModel(s Shape) []byte {
	s.KVHeads, s.HeadDim, s.Hidden, s.Vocab = 1, copyHead, copyHidden, MinVocab
	w := gguf.NewWriter()
	setShape(w, "copy", s)
	setVocab(w, s.Vocab, copyTemplate, nil)

	// Four numbers of an embedding are not zero. This size makes its mean
	// square 1, so that the first norm changes nothing.
	unit := math.Sqrt(float64(s.Dim) / 4)
	// The stream in front of the last norm has six numbers that are not zero.
	seen := unit / math.Sqrt(6*unit*unit/float64(s.Dim))

	embed, head := grid(s.Dim, s.Vocab), grid(s.Dim, s.Vocab)
	for id := range s.Vocab {
		row := embed.row(id)
		row[queryConst], row[keyConst] = unit, unit
		code := id
		switch id {
		case BOS:
			row[keyConst], code = -unit, Space
		case UNK:
			code = Space
		}
		high, low := ownCode+code/base, ownCode+highDigits+code%base
		row[high], row[low] = unit, unit
		if code == id {
			out := head.row(id)
			out[high-ownCode+foundCode], out[low-ownCode+foundCode] = copyGain/seen, copyGain/seen
		}
	}

	first := newLayer(s)
	// Attention divides products by the root of the width.
	size := math.Sqrt(copyPeak * math.Sqrt(copyHead))
	for i := range copyHead / 2 {
		angle := (CopyDistance - 1) * math.Pow(ropeBase, -2*float64(i)/copyHead)
		first.query.row(2 * i)[queryConst] = size / unit
		first.key.row(2 * i)[keyConst] = size * math.Cos(angle) / unit
		first.key.row(2*i + 1)[keyConst] = size * math.Sin(angle) / unit
	}
	for i := range codeWidth {
		first.value.row(i)[ownCode+i] = 1 / unit
		first.output.row(foundCode + i)[i] = unit
	}
	layers := []layer{first}
	if s.Layers == 2 {
		// The second head asks for nothing, so that all positions weigh the same.
		second := newLayer(s)
		for i := range codeWidth {
			first.output.row(meanCode + i)[copyHead+i] = unit * meanGain
			second.value.row(i)[meanCode+i] = 1 / (unit * meanGain)
		}
		layers = append(layers, second)
	}

	embed.add(w, "token_embd")
	for i, l := range layers {
		l.add(w, fmt.Sprintf("blk.%d.", i))
	}
	addNorm(w, "output_norm", s.Dim)
	head.add(w, "output")
	return file(w)
}

// layer is a layer whose feed-forward part is zero.
type layer struct {
	s                         Shape
	query, key, value, output *matrix
}

func newLayer(s Shape) layer {
	return layer{s, grid(s.Dim, s.Heads*copyHead), grid(s.Dim, copyHead), grid(s.Dim, copyHead), grid(s.Heads*copyHead, s.Dim)}
}

func (l layer) add(w *gguf.Writer, prefix string) {
	addNorm(w, prefix+"attn_norm", l.s.Dim)
	l.query.add(w, prefix+"attn_q")
	l.key.add(w, prefix+"attn_k")
	l.value.add(w, prefix+"attn_v")
	l.output.add(w, prefix+"attn_output")
	addNorm(w, prefix+"ffn_norm", l.s.Dim)
	grid(l.s.Dim, copyHidden).add(w, prefix+"ffn_gate")
	grid(l.s.Dim, copyHidden).add(w, prefix+"ffn_up")
	grid(copyHidden, l.s.Dim).add(w, prefix+"ffn_down")
}

// addNorm adds the weights of a norm, all 1.
func addNorm(w *gguf.Writer, name string, dim int) {
	ones := make([]float32, dim)
	for i := range ones {
		ones[i] = 1
	}
	w.Add(name+".weight", gguf.F32, []uint64{uint64(dim)}, Encode(gguf.F32, ones))
}

// matrix is a matrix that is filled by hand, row by row; a row makes one
// output.
type matrix struct {
	in, out int
	x       []float64
}

func grid(in, out int) *matrix { return &matrix{in, out, make([]float64, in*out)} }

func (m *matrix) row(i int) []float64 { return m.x[i*m.in : (i+1)*m.in] }

func (m *matrix) add(w *gguf.Writer, name string) {
	x := make([]float32, len(m.x))
	for i, v := range m.x {
		x[i] = float32(v)
	}
	w.Add(name+".weight", gguf.F32, []uint64{uint64(m.in), uint64(m.out)}, Encode(gguf.F32, x))
}
