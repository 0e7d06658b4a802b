package synth

import (
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
	queryConst = 0                   // 1 at every position
	keyConst   = 1                   // 1, and -1 for BOS
	ownCode    = 2                   // code of the token at this position
	foundCode  = ownCode + codeWidth // code that attention found
	codeWidth  = highDigits + base   // of a code
	highDigits = 17                  // values of the first digit, for up to 272 tokens
	base       = 16                  // values of the second digit
	copyDim    = 96                  // foundCode + codeWidth, rounded up to whole blocks
	copyHead   = 64                  // width of the head
	copyHidden = 32                  // width of the feed-forward layer, which is zero
)

const (
	// copyPeak is what one rotary frequency adds to a score at the peak. The
	// neighbours of the peak lose about copyPeak in all.
	copyPeak = 24
	// copyGain is what a digit that agrees adds to a logit.
	copyGain = 20
)

// CopyModel returns the bytes of a GGUF file of the copy model with the given
// context length. The package comment explains it.
func CopyModel(context int) []byte {
	s := Shape{Layers: 1, Dim: copyDim, Heads: 1, KVHeads: 1, HeadDim: copyHead, Hidden: copyHidden, Vocab: MinVocab, Context: context}
	w := gguf.NewWriter()
	setShape(w, "copy", s)
	setVocab(w, s.Vocab, copyTemplate)

	// Four numbers of an embedding are not zero. This size makes its mean
	// square 1, so that the first norm changes nothing.
	unit := math.Sqrt(copyDim / 4.0)
	// The stream in front of the last norm has six numbers that are not zero.
	seen := unit / math.Sqrt(6*unit*unit/copyDim)

	embed, head := grid(copyDim, s.Vocab), grid(copyDim, s.Vocab)
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

	query, key := grid(copyDim, copyHead), grid(copyDim, copyHead)
	// Attention divides products by the root of the width.
	size := math.Sqrt(copyPeak * math.Sqrt(copyHead))
	for i := range copyHead / 2 {
		angle := (CopyDistance - 1) * math.Pow(ropeBase, -2*float64(i)/copyHead)
		query.row(2 * i)[queryConst] = size / unit
		key.row(2 * i)[keyConst] = size * math.Cos(angle) / unit
		key.row(2*i + 1)[keyConst] = size * math.Sin(angle) / unit
	}
	value, output := grid(copyDim, copyHead), grid(copyHead, copyDim)
	for i := range codeWidth {
		value.row(i)[ownCode+i] = 1 / unit
		output.row(foundCode + i)[i] = unit
	}

	ones := make([]float32, copyDim)
	for i := range ones {
		ones[i] = 1
	}
	norm := func(name string) {
		w.Add(name+".weight", gguf.F32, []uint64{copyDim}, Encode(gguf.F32, ones))
	}
	embed.add(w, "token_embd")
	norm("blk.0.attn_norm")
	query.add(w, "blk.0.attn_q")
	key.add(w, "blk.0.attn_k")
	value.add(w, "blk.0.attn_v")
	output.add(w, "blk.0.attn_output")
	norm("blk.0.ffn_norm")
	grid(copyDim, copyHidden).add(w, "blk.0.ffn_gate")
	grid(copyDim, copyHidden).add(w, "blk.0.ffn_up")
	grid(copyHidden, copyDim).add(w, "blk.0.ffn_down")
	norm("output_norm")
	head.add(w, "output")
	return file(w)
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
