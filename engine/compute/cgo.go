//go:build cgo && amd64

package compute

// ISO C (-std=c11) keeps gcc from contracting a*b+c behind the back of the rule.

// #cgo CFLAGS: -O3 -std=c11 -Wall -Wno-parentheses -Wno-maybe-uninitialized -Wno-unknown-pragmas
// #cgo LDFLAGS: -lm -lpthread
// #include "kernels.h"
import "C"

import (
	"unsafe"

	"bulkhead.dev/engine/kv"
)

// cLevels returns the levels of the C kernels that run here.
func cLevels() []string {
	return []string{levelScalar, levelAVX2, levelVNNI, levelAMX}[:int(C.bk_cpu_level())+1]
}

var levelNumber = map[string]C.int{levelScalar: C.BK_REF, levelAVX2: C.BK_AVX2, levelVNNI: C.BK_VNNI, levelAMX: C.BK_AMX}

// kernels is the C backend. A pass is one call into C, in which threads that C
// owns work together: handing single matrices to goroutines would cost more
// than the matrices of a small model.
type kernels struct {
	m    *C.bk_model
	w    *weights // C points into its memory
	rows int

	dim, vocab int // strides
}

func newC(w *weights, level string, o Options) (backend, error) {
	c := w.cfg
	f16 := C.int(0)
	if w.dtype == kv.F16 {
		f16 = 1
	}
	m := C.bk_new(&C.bk_config{
		level: levelNumber[level], threads: C.int(o.Threads), layers: C.int(c.Layers), dim: C.int(c.Dim), heads: C.int(c.Heads),
		kv_heads: C.int(c.KVHeads), hd: C.int(c.HeadDim), rope: C.int(c.RopeDim), hidden: C.int(c.Hidden), vocab: C.int(c.Vocab),
		f16: f16, rows: C.int(o.MaxRows), context: C.int(c.Context), eps: C.float(c.NormEps),
	})
	if m == nil {
		return nil, ErrMemory
	}
	for i, l := range w.layers {
		mats := [C.BK_MATS]C.bk_mat{
			C.BK_WQ: cMat(l.q), C.BK_WK: cMat(l.k), C.BK_WV: cMat(l.v), C.BK_WO: cMat(l.o),
			C.BK_GATE: cMat(l.gate), C.BK_UP: cMat(l.up), C.BK_DOWN: cMat(l.down),
		}
		C.bk_set_layer(m, C.int(i), &mats[0], floatPtr(l.attnNorm), floatPtr(l.ffnNorm))
	}
	C.bk_set_head(m, cMat(w.head), floatPtr(w.norm), floatPtr(w.rope))
	return &kernels{m: m, w: w, rows: o.MaxRows, dim: padded(c.Dim), vocab: padded(c.Vocab)}, nil
}

// cMat and floatPtr hand out addresses of the arena, which is not Go memory.
func cMat(m matrix) C.bk_mat {
	return C.bk_mat{_type: C.int(m.kind), n: C.int(m.n), k: C.int(m.k), data: unsafe.Pointer(unsafe.SliceData(m.data))}
}

func floatPtr(f []float32) *C.float { return (*C.float)(unsafe.SliceData(f)) }

func (k *kernels) forward(b *batch) {
	ints := func(s []int32) *C.int32_t { return (*C.int32_t)(unsafe.SliceData(s)) }
	C.bk_forward(k.m, C.int(len(b.pos)), ints(b.pos), ints(b.seq), C.int(len(b.first)), ints(b.first),
		(*C.uint64_t)(unsafe.SliceData(b.pages)), C.int(len(b.wants)), ints(b.wants), ints(b.wrote))
}

func (k *kernels) x() ([]float32, int) {
	return unsafe.Slice((*float32)(C.bk_x(k.m)), k.rows*k.dim), k.dim
}

func (k *kernels) logits() ([]float32, int) {
	return unsafe.Slice((*float32)(C.bk_logits(k.m)), k.rows*k.vocab), k.vocab
}

func (k *kernels) scratch(dst [][]byte, rows int) [][]byte {
	var bufs [C.BK_BUFS]C.bk_buf
	n := C.bk_scratch(k.m, C.int(rows), &bufs[0])
	for _, b := range bufs[:n] {
		dst = append(dst, unsafe.Slice((*byte)(b.p), b.bytes))
	}
	return dst
}

func (k *kernels) close() {
	C.bk_free(k.m)
	k.m = nil
	k.w.free()
}
