package synth_test

import (
	"encoding/binary"
	"math"
	"testing"

	"bulkhead.dev/engine/model"
	"bulkhead.dev/engine/model/gguf"
	"bulkhead.dev/infra/assert"
)

// reference is the forward pass of llama in float64, written for clarity. Keys
// and values go through store, which a test may make coarse.
type reference struct {
	m            *model.Llama
	keys, values [][][]float64 // by layer and position
	store        func(float64) float64
	rows         map[string][][]float64 // of matrices, decoded once
}

func load(t testing.TB, file []byte) (*model.Llama, *gguf.File) {
	t.Helper()
	f, err := gguf.Parse(file)
	assert.NoError(t, err)
	m, err := model.LoadLlama(f)
	assert.NoError(t, err)
	return m, f
}

func newReference(m *model.Llama) *reference {
	return &reference{m: m, keys: make([][][]float64, m.Config.Layers), values: make([][][]float64, m.Config.Layers),
		store: func(x float64) float64 { return x }, rows: map[string][][]float64{}}
}

// decode reads row r of a matrix in any of the types.
func decode(t gguf.Tensor, r int) []float64 {
	per, size := t.Type.Block()
	n := int(t.Dims[0])
	b := t.Data[r*n/per*size : (r+1)*n/per*size]
	x := make([]float64, n)
	f16 := func(at int) float64 { return fromHalf(binary.LittleEndian.Uint16(b[at:])) }
	for i := range x {
		block, in := i/per*size, i%per
		nibble := func(start int) float64 {
			return float64(b[block+start+in%16] >> (in / 16 * 4) & 15)
		}
		switch t.Type {
		case gguf.F32:
			x[i] = float64(math.Float32frombits(binary.LittleEndian.Uint32(b[block:])))
		case gguf.F16:
			x[i] = f16(block)
		case gguf.BF16:
			x[i] = float64(math.Float32frombits(uint32(binary.LittleEndian.Uint16(b[block:])) << 16))
		case gguf.Q8_0:
			x[i] = f16(block) * float64(int8(b[block+2+in]))
		case gguf.Q4_0:
			x[i] = f16(block) * (nibble(2) - 8)
		case gguf.Q4_1:
			x[i] = f16(block)*nibble(4) + f16(block+2)
		}
	}
	return x
}

func fromHalf(h uint16) float64 {
	exp, frac := int(h>>10&31), float64(h&1023)
	x := math.Ldexp(1+frac/1024, exp-15)
	if exp == 0 {
		x = math.Ldexp(frac/1024, -14)
	}
	if h>>15 == 1 {
		x = -x
	}
	return x
}

func (r *reference) multiply(w gguf.Tensor, x []float64) []float64 {
	rows, ok := r.rows[w.Name]
	if !ok {
		rows = make([][]float64, w.Dims[1])
		for i := range rows {
			rows[i] = decode(w, i)
		}
		r.rows[w.Name] = rows
	}
	out := make([]float64, len(rows))
	for o, row := range rows {
		for i, v := range row {
			out[o] += v * x[i]
		}
	}
	return out
}

func (r *reference) norm(w gguf.Tensor, x []float64) []float64 {
	sum := 0.0
	for _, v := range x {
		sum += v * v
	}
	scale := 1 / math.Sqrt(sum/float64(len(x))+float64(r.m.Config.NormEps))
	out := make([]float64, len(x))
	for i, g := range decode(gguf.Tensor{Type: w.Type, Dims: []uint64{uint64(len(x)), 1}, Data: w.Data}, 0) {
		out[i] = x[i] * scale * g
	}
	return out
}

func (r *reference) rotate(x []float64, pos int) {
	c := r.m.Config
	for h := 0; h < len(x); h += c.HeadDim {
		for i := 0; i < c.RopeDim; i += 2 {
			angle := float64(pos) * math.Pow(c.RopeBase, -float64(i)/float64(c.RopeDim))
			sin, cos := math.Sincos(angle)
			a, b := x[h+i], x[h+i+1]
			x[h+i], x[h+i+1] = a*cos-b*sin, a*sin+b*cos
		}
	}
}

// step runs one token and returns its logits.
func (r *reference) step(token int) []float64 {
	x := decode(r.m.Embed, token)
	for l, b := range r.m.Blocks {
		n := r.norm(b.AttnNorm, x)
		q, k, v := r.multiply(b.Q, n), r.multiply(b.K, n), r.multiply(b.V, n)
		pos := len(r.keys[l])
		r.rotate(q, pos)
		r.rotate(k, pos)
		for i := range k {
			k[i], v[i] = r.store(k[i]), r.store(v[i])
		}
		r.keys[l], r.values[l] = append(r.keys[l], k), append(r.values[l], v)
		for i, o := range r.multiply(b.O, r.attend(l, q)) {
			x[i] += o
		}
		n = r.norm(b.FFNNorm, x)
		gate, up := r.multiply(b.Gate, n), r.multiply(b.Up, n)
		for i := range gate {
			gate[i] = gate[i] / (1 + math.Exp(-gate[i])) * up[i]
		}
		for i, o := range r.multiply(b.Down, gate) {
			x[i] += o
		}
	}
	return r.multiply(r.m.Head, r.norm(r.m.OutNorm, x))
}

func (r *reference) attend(l int, q []float64) []float64 {
	c := r.m.Config
	out := make([]float64, c.Heads*c.HeadDim)
	for h := range c.Heads {
		kv := h / (c.Heads / c.KVHeads) * c.HeadDim
		scores := make([]float64, len(r.keys[l]))
		top, sum := math.Inf(-1), 0.0
		for p, k := range r.keys[l] {
			for i := range c.HeadDim {
				scores[p] += q[h*c.HeadDim+i] * k[kv+i]
			}
			scores[p] /= math.Sqrt(float64(c.HeadDim))
			top = max(top, scores[p])
		}
		for p := range scores {
			scores[p] = math.Exp(scores[p] - top)
			sum += scores[p]
		}
		for p, v := range r.values[l] {
			for i := range c.HeadDim {
				out[h*c.HeadDim+i] += scores[p] / sum * v[kv+i]
			}
		}
	}
	return out
}

// best returns the largest logit, its id, and its lead over the second.
func best(logits []float64) (id int, lead float64) {
	for i, v := range logits {
		if v > logits[id] {
			id = i
		}
	}
	lead = math.Inf(1)
	for i, v := range logits {
		if i != id {
			lead = min(lead, logits[id]-v)
		}
	}
	return id, lead
}
