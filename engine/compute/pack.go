package compute

import (
	"encoding/binary"
	"fmt"
	"math"
	"unsafe"

	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/model"
	"bulkhead.dev/engine/model/gguf"
)

// kind is how a matrix is stored: kernels.h has the same numbers.
type kind int

const (
	kindQ4 kind = iota
	kindQ8
	kindF32
	kindF16
	kindBF16
)

const (
	tileCols  = 16   // output columns of a tile
	quantK    = 32   // of a quantised block
	tileQ4    = 320  // bytes of a tile-block: 4 x 64 of nibbles, d[16], m[16]
	pairQ8    = 1088 // bytes of two tile-blocks: 2 x 8 x 64 of q^0x80, 2 x d[16]
	alignment = 64
)

// matrix is a weight in tiles of sixteen output columns, each sequential in K,
// padded with columns of zeros. The layouts are described in matmul.c.
type matrix struct {
	kind kind
	n, k int // n is padded to whole tiles
	data []byte
}

// weights are everything that a backend needs.
type weights struct {
	cfg    model.Config
	dtype  kv.DType
	layers []layerWeights
	head   matrix
	norm   []float32
	rope   []float32 // [context][ropeDim/2][cos, sin]
	arena  *arena
}

type layerWeights struct {
	q, k, v, o, gate, up, down matrix
	attnNorm, ffnNorm          []float32
}

func (w *weights) free() { w.arena.free() }

// pack lays the weights out anew in memory that C may keep pointers into.
func pack(l *model.Llama, dtype kv.DType) (*weights, error) {
	w := &weights{cfg: l.Config, dtype: dtype}
	total := 0
	reserve := func(n int) { total += (n + alignment - 1) / alignment * alignment }
	tensors := []gguf.Tensor{l.Head}
	floats := []int{l.Config.Dim, l.Config.Context * l.Config.RopeDim}
	for _, b := range l.Blocks {
		tensors = append(tensors, b.Q, b.K, b.V, b.O, b.Gate, b.Up, b.Down)
		floats = append(floats, l.Config.Dim, l.Config.Dim)
	}
	for _, t := range tensors {
		n, err := packedBytes(t)
		if err != nil {
			return nil, err
		}
		reserve(n)
	}
	for _, f := range floats {
		reserve(4 * f)
	}
	var err error
	// Kernels prefetch past the end of a tile; the slack keeps that inside.
	if w.arena, err = newArena(total + 1<<16); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrMemory, err)
	}
	mat := func(t gguf.Tensor) matrix { return w.arena.matrix(t) }
	vec := func(t gguf.Tensor) []float32 {
		v := w.arena.floats(int(t.Dims[0]))
		widen(t.Type, v, t.Data)
		return v
	}
	w.head, w.norm = mat(l.Head), vec(l.OutNorm)
	w.rope = w.arena.floats(l.Config.Context * l.Config.RopeDim)
	fillRope(w.rope, l.Config)
	for _, b := range l.Blocks {
		w.layers = append(w.layers, layerWeights{
			q: mat(b.Q), k: mat(b.K), v: mat(b.V), o: mat(b.O), gate: mat(b.Gate), up: mat(b.Up), down: mat(b.Down),
			attnNorm: vec(b.AttnNorm), ffnNorm: vec(b.FFNNorm),
		})
	}
	return w, nil
}

func kindOf(t gguf.Type) (kind, error) {
	switch t {
	case gguf.Q4_0, gguf.Q4_1:
		return kindQ4, nil
	case gguf.Q8_0:
		return kindQ8, nil
	case gguf.F32:
		return kindF32, nil
	case gguf.F16:
		return kindF16, nil
	case gguf.BF16:
		return kindBF16, nil
	}
	return 0, fmt.Errorf("%w: weights of type %v", ErrOptions, t)
}

func padded(n int) int { return (n + tileCols - 1) / tileCols * tileCols }

func packedBytes(t gguf.Tensor) (int, error) {
	kd, err := kindOf(t.Type)
	if err != nil {
		return 0, err
	}
	n, k := padded(int(t.Dims[1])), int(t.Dims[0])
	switch kd {
	case kindQ4:
		return n / tileCols * (k / quantK) * tileQ4, nil
	case kindQ8:
		return n / tileCols * ((k/quantK + 1) / 2) * pairQ8, nil
	case kindF32:
		return n * k * 4, nil
	default:
		return n * k * 2, nil
	}
}

// matrix packs a tensor.
func (a *arena) matrix(t gguf.Tensor) matrix {
	kd, _ := kindOf(t.Type)   // packedBytes has refused the others
	size, _ := packedBytes(t) // the same
	rows, k := int(t.Dims[1]), int(t.Dims[0])
	m := matrix{kind: kd, n: padded(rows), k: k, data: a.bytes(size)}
	elems, blockBytes := t.Type.Block()
	rowBytes := k / elems * blockBytes
	for row := range rows {
		src := t.Data[row*rowBytes : (row+1)*rowBytes]
		switch kd {
		case kindQ4:
			m.packQ4(t.Type, row, src)
		case kindQ8:
			m.packQ8(row, src)
		default:
			m.packFloat(row, src)
		}
	}
	return m
}

func (m *matrix) packQ4(t gguf.Type, row int, src []byte) {
	nb, head := m.k/quantK, 4
	if t == gguf.Q4_0 {
		head = 2
	}
	r := row % tileCols
	for b := range nb {
		block := src[b*(head+16):]
		o := m.data[(row/tileCols*nb+b)*tileQ4:]
		for g := range 4 {
			copy(o[g*64+r*4:g*64+r*4+4], block[head+g*4:])
		}
		copy(o[256+r*2:258+r*2], block[:2])
		if t == gguf.Q4_1 {
			copy(o[288+r*2:290+r*2], block[2:4])
			continue
		}
		// A power of two: exact in fp16 unless d is beyond any sane weight,
		// and then the product is infinite as it would be in the file's terms.
		d := halfToFloat(binary.LittleEndian.Uint16(block))
		binary.LittleEndian.PutUint16(o[288+r*2:], floatToHalf(-8*d))
	}
}

func (m *matrix) packQ8(row int, src []byte) {
	nb := m.k / quantK
	r := row % tileCols
	for b := range nb {
		block := src[b*34:]
		o := m.data[(row/tileCols*((nb+1)/2)+b/2)*pairQ8:]
		for i := range quantK {
			o[b%2*512+i/4*64+r*4+i%4] = block[2+i] ^ 0x80
		}
		copy(o[1024+b%2*32+r*2:], block[:2])
	}
}

func (m *matrix) packFloat(row int, src []byte) {
	size := 2
	if m.kind == kindF32 {
		size = 4
	}
	o := m.data[row/tileCols*m.k*tileCols*size:]
	for k := range m.k {
		copy(o[(k*tileCols+row%tileCols)*size:][:size], src[k*size:])
	}
}

// fillRope computes the angles of every position. The frequency of pair i is
// base^(-2i/dim), divided by the factor of the pair where the file has them
// and scaled where it says so (Su et al., RoFormer; llama.cpp for factors).
func fillRope(out []float32, c model.Config) {
	for pos := range c.Context {
		for i := range c.RopeDim / 2 {
			freq := math.Pow(c.RopeBase, -2*float64(i)/float64(c.RopeDim))
			if c.RopeFactors != nil {
				freq /= float64(c.RopeFactors[i])
			}
			angle := float64(pos) * float64(c.RopeScale) * freq
			sin, cos := math.Sincos(angle)
			out[pos*c.RopeDim+2*i], out[pos*c.RopeDim+2*i+1] = float32(cos), float32(sin)
		}
	}
}

// widen turns stored numbers into float32, exactly for every type.
func widen(t gguf.Type, dst []float32, src []byte) {
	le := binary.LittleEndian
	switch t {
	case gguf.F32:
		for i := range dst {
			dst[i] = math.Float32frombits(le.Uint32(src[4*i:]))
		}
	case gguf.F16:
		for i := range dst {
			dst[i] = halfToFloat(le.Uint16(src[2*i:]))
		}
	case gguf.BF16:
		for i := range dst {
			dst[i] = math.Float32frombits(uint32(le.Uint16(src[2*i:])) << 16)
		}
	case gguf.Q8_0:
		for i := range dst {
			b := src[i/quantK*34:]
			dst[i] = halfToFloat(le.Uint16(b)) * float32(int8(b[2+i%quantK]))
		}
	case gguf.Q4_0, gguf.Q4_1:
		head := 2
		if t == gguf.Q4_1 {
			head = 4
		}
		for i := range dst {
			b := src[i/quantK*(head+16):]
			q := b[head+i%16]
			if i%quantK >= 16 {
				q >>= 4
			}
			d := halfToFloat(le.Uint16(b))
			if t == gguf.Q4_0 {
				dst[i] = d * float32(int(q&15)-8)
			} else {
				// The conversion keeps the compiler from fusing the two.
				dst[i] = float32(d*float32(q&15)) + halfToFloat(le.Uint16(b[2:]))
			}
		}
	}
}

// arena hands out pieces of one mapping.
type arena struct {
	mem []byte
	at  int
}

func (a *arena) bytes(n int) []byte {
	b := a.mem[a.at : a.at+n : a.at+n]
	a.at += (n + alignment - 1) / alignment * alignment
	return b
}

func (a *arena) floats(n int) []float32 {
	b := a.bytes(4 * n)
	if n == 0 {
		return nil
	}
	return unsafe.Slice((*float32)(unsafe.Pointer(&b[0])), n)
}
