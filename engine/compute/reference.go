package compute

import (
	"encoding/binary"
	"math"
	"unsafe"

	"bulkhead.dev/engine/kv"
)

// reference is the rule of the package comment in Go, one row after another.
// It is the oracle of the kernel tests and what builds without C run on.
type reference struct {
	w    *weights
	geo  kv.Geometry
	rows int
	buf  struct {
		x, n, q, k, v, o, gate, up, y, logits []float32
	}
	dim, qdim, kvdim, hidden, vocab int // strides, padded to tiles

	// One row of quantised activations.
	qa    []int8
	s, ss []float32
}

func newReference(w *weights, rows int) *reference {
	c := w.cfg
	r := &reference{w: w, rows: rows, geo: kv.Geometry{Layers: c.Layers, KVHeads: c.KVHeads, HeadDim: c.HeadDim,
		PageTokens: kv.PageTokens, DType: w.dtype, Layout: kv.Layout1}}
	r.dim, r.qdim, r.kvdim = padded(c.Dim), padded(c.Heads*c.HeadDim), padded(c.KVHeads*c.HeadDim)
	r.hidden, r.vocab = padded(c.Hidden), padded(c.Vocab)
	b := &r.buf
	b.x, b.n, b.y = make([]float32, rows*r.dim), make([]float32, r.dim), make([]float32, r.dim)
	b.q, b.o = make([]float32, rows*r.qdim), make([]float32, r.qdim)
	b.k, b.v = make([]float32, r.kvdim), make([]float32, r.kvdim)
	b.gate, b.up = make([]float32, r.hidden), make([]float32, r.hidden)
	b.logits = make([]float32, rows*r.vocab)
	widest := max(r.dim, r.qdim, r.hidden)
	r.qa, r.s, r.ss = make([]int8, widest), make([]float32, widest/quantK+1), make([]float32, widest/quantK+1)
	return r
}

func (r *reference) x() ([]float32, int)      { return r.buf.x, r.dim }
func (r *reference) logits() ([]float32, int) { return r.buf.logits, r.vocab }
func (r *reference) close()                   { r.w.free() }

func (r *reference) scratch(dst [][]byte, _ int) [][]byte {
	b := &r.buf
	for _, s := range [][]float32{b.x, b.n, b.q, b.k, b.v, b.o, b.gate, b.up, b.y, b.logits, r.s, r.ss} {
		dst = append(dst, unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(s))), 4*len(s)))
	}
	return append(dst, unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(r.qa))), len(r.qa)))
}

func (r *reference) forward(b *batch) {
	c := r.w.cfg
	least := make([][]int32, c.Layers)
	scale := 1 / float32(math.Sqrt(float64(c.HeadDim)))
	for l := range r.w.layers {
		w := &r.w.layers[l]
		least[l] = make([]int32, len(b.first))
		// Keys and values of all rows first: a query reads those of its own
		// span that are before it.
		for row, pos := range b.pos {
			r.rmsnorm(r.buf.x[row*r.dim:], w.attnNorm)
			q := r.buf.q[row*r.qdim : (row+1)*r.qdim]
			r.product(&w.q, r.buf.n, q)
			r.product(&w.k, r.buf.n, r.buf.k)
			r.product(&w.v, r.buf.n, r.buf.v)
			cs := r.w.rope[int(pos)*c.RopeDim : (int(pos)+1)*c.RopeDim]
			rope(q, c.Heads, c.HeadDim, cs, scale)
			rope(r.buf.k, c.KVHeads, c.HeadDim, cs, 1)
			r.store(r.page(b, row, int(pos)/kv.PageTokens), l, int(pos)%kv.PageTokens)
			least[l][b.seq[row]]++
		}
		for row, pos := range b.pos {
			x := r.buf.x[row*r.dim : row*r.dim+c.Dim]
			for h := range c.Heads {
				r.attend(b, row, l, h, int(pos))
			}
			r.product(&w.o, r.buf.o, r.buf.y)
			add(x, r.buf.y)
			r.rmsnorm(x, w.ffnNorm)
			r.product(&w.gate, r.buf.n, r.buf.gate)
			r.product(&w.up, r.buf.n, r.buf.up)
			for i := range c.Hidden {
				r.buf.gate[i] = siluMul(r.buf.gate[i], r.buf.up[i])
			}
			r.product(&w.down, r.buf.gate, r.buf.y)
			add(x, r.buf.y)
		}
	}
	for i, row := range b.wants {
		r.rmsnorm(r.buf.x[int(row)*r.dim:], r.w.norm)
		r.product(&r.w.head, r.buf.n, r.buf.logits[i*r.vocab:(i+1)*r.vocab])
	}
	for s := range b.wrote {
		b.wrote[s] = least[0][s]
		for _, n := range least {
			b.wrote[s] = min(b.wrote[s], n[s])
		}
	}
}

func add(x, y []float32) {
	for i := range x {
		x[i] += y[i]
	}
}

// tree adds sixteen lanes as every level does.
func tree(a *[16]float32) float32 {
	for h := 8; h > 0; h /= 2 {
		for i := range h {
			a[i] += a[i+h]
		}
	}
	return a[0]
}

func (r *reference) rmsnorm(x, w []float32) {
	n := r.w.cfg.Dim
	var lanes [16]float32
	for i := range n {
		lanes[i%16] = fma32(x[i], x[i], lanes[i%16])
	}
	mean := tree(&lanes)/float32(n) + float32(r.w.cfg.NormEps)
	// The square root of a float32 in float64, rounded, is the correctly
	// rounded float32 square root: 53 bits are more than twice 24.
	k := 1 / float32(math.Sqrt(float64(mean)))
	for i := range n {
		r.buf.n[i] = (x[i] * k) * w[i]
	}
}

// exp is the shared polynomial, for x <= 0.
func exp(x float32) float32 {
	if -87 > x { // false for NaN, which stays
		x = -87
	}
	n := float32(math.RoundToEven(float64(x * 1.44269504)))
	t := fma32(n, -0.693145752, x)
	t = fma32(n, -1.42860677e-6, t)
	p := float32(1.0 / 720)
	for _, c := range [...]float32{1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1, 1} {
		p = fma32(p, t, c)
	}
	if p != p {
		return p
	}
	return float32(math.Ldexp(float64(p), int(n)))
}

func siluMul(g, u float32) float32 {
	e := exp(-float32(math.Abs(float64(g))))
	d := 1 + e
	s := e / d
	if g >= 0 {
		s = 1 / d
	}
	return (g * s) * u
}

func rope(x []float32, heads, hd int, cs []float32, scale float32) {
	for h := range heads {
		x := x[h*hd : (h+1)*hd]
		for i := 0; i < len(cs); i += 2 {
			a, b, c, s := x[i], x[i+1], cs[i], cs[i+1]
			t, u := b*s, b*c
			x[i], x[i+1] = fma32(a, c, -t)*scale, fma32(a, s, u)*scale
		}
		for i := len(cs); i < hd; i++ {
			x[i] *= scale
		}
	}
}

// page returns the memory of a page of the sequence of a row.
func (r *reference) page(b *batch, row, i int) []byte {
	addr := uintptr(b.pages[int(b.first[b.seq[row]])+i])
	// The address comes out of Pages.Resolve and is not of Go's heap.
	return unsafe.Slice(*(**byte)(unsafe.Pointer(&addr)), r.geo.PageBytes())
}

func (r *reference) get(page []byte, i int) float32 {
	if r.w.dtype == kv.F32 {
		return math.Float32frombits(binary.LittleEndian.Uint32(page[4*i:]))
	}
	return halfToFloat(binary.LittleEndian.Uint16(page[2*i:]))
}

func (r *reference) put(page []byte, i int, v float32) {
	if r.w.dtype == kv.F32 {
		binary.LittleEndian.PutUint32(page[4*i:], math.Float32bits(v))
		return
	}
	binary.LittleEndian.PutUint16(page[2*i:], floatToHalf(v))
}

func (r *reference) store(page []byte, layer, tok int) {
	hd := r.w.cfg.HeadDim
	for h := range r.w.cfg.KVHeads {
		for d := range hd {
			r.put(page, r.geo.KIndex(layer, h, d, tok), r.buf.k[h*hd+d])
			r.put(page, r.geo.VIndex(layer, h, tok, d), r.buf.v[h*hd+d])
		}
	}
}

// attend computes one query head of a row.
func (r *reference) attend(b *batch, row, layer, head, pos int) {
	c := r.w.cfg
	hd, kvHead := c.HeadDim, head/(c.Heads/c.KVHeads)
	q := r.buf.q[row*r.qdim+head*hd:][:hd]
	out := r.buf.o[head*hd:][:hd]
	clear(out)
	m, sum := float32(math.Inf(-1)), float32(0)
	for p := 0; p*kv.PageTokens <= pos; p++ {
		page := r.page(b, row, p)
		n := min(pos+1-p*kv.PageTokens, kv.PageTokens)
		var w [16]float32
		top := m
		for t := range n {
			var even, odd float32
			for d := 0; d < hd; d += 2 {
				even = fma32(q[d], r.get(page, r.geo.KIndex(layer, kvHead, d, t)), even)
				odd = fma32(q[d+1], r.get(page, r.geo.KIndex(layer, kvHead, d+1, t)), odd)
			}
			w[t] = even + odd
			if w[t] > top {
				top = w[t]
			}
		}
		for t := range n {
			w[t] = exp(w[t] - top)
		}
		if top != m {
			f := exp(m - top)
			for j := range out {
				out[j] *= f
			}
			sum *= f
			m = top
		}
		lanes := w
		sum += tree(&lanes)
		for t := range n {
			for j := range out {
				out[j] = fma32(w[t], r.get(page, r.geo.VIndex(layer, kvHead, t, j)), out[j])
			}
		}
	}
	for j := range out {
		out[j] /= sum
	}
}

// product computes y = x * m^T; y has room for the padded columns.
func (r *reference) product(m *matrix, x, y []float32) {
	switch m.kind {
	case kindQ4, kindQ8:
		r.quantise(x[:m.k])
		for n := range m.n {
			y[n] = r.quantised(m, n)
		}
	default:
		for n := range m.n {
			var acc float32
			at := (n/tileCols*m.k)*tileCols + n%tileCols
			for k := range m.k {
				acc = fma32(x[k], m.float(at+k*tileCols), acc)
			}
			y[n] = acc
		}
	}
}

func (m *matrix) float(i int) float32 {
	switch m.kind {
	case kindF32:
		return math.Float32frombits(binary.LittleEndian.Uint32(m.data[4*i:]))
	case kindF16:
		return halfToFloat(binary.LittleEndian.Uint16(m.data[2*i:]))
	default:
		return math.Float32frombits(uint32(binary.LittleEndian.Uint16(m.data[2*i:])) << 16)
	}
}

func (r *reference) quantise(x []float32) {
	for b := range len(x) / quantK {
		x := x[b*quantK : (b+1)*quantK]
		var top float32
		finite := true
		for _, v := range x {
			a := float32(math.Abs(float64(v)))
			finite = finite && a <= math.MaxFloat32
			top = max(top, a)
		}
		if !finite {
			clear(r.qa[b*quantK : (b+1)*quantK])
			r.s[b] = float32(math.NaN())
			r.ss[b] = r.s[b]
			continue
		}
		var inv float32
		if top > 0 {
			inv = 127 / top
		}
		total := 0
		for i, v := range x {
			q := int8(math.RoundToEven(float64(v * inv)))
			r.qa[b*quantK+i] = q
			total += int(q)
		}
		r.s[b] = top / 127
		r.ss[b] = r.s[b] * float32(total)
	}
}

func (r *reference) quantised(m *matrix, n int) float32 {
	var acc float32
	nb, t, lane := m.k/quantK, n/tileCols, n%tileCols
	for b := range nb {
		q, sum := r.qa[b*quantK:(b+1)*quantK], int32(0)
		if m.kind == kindQ4 {
			o := m.data[(t*nb+b)*tileQ4:]
			for i := range 16 {
				w := o[i/4*64+lane*4+i%4]
				sum += int32(w&15)*int32(q[i]) + int32(w>>4)*int32(q[i+16])
			}
			acc = fma32(float32(sum), halfAt(o, 256+lane*2)*r.s[b], acc)
			acc = fma32(halfAt(o, 288+lane*2), r.ss[b], acc)
			continue
		}
		o := m.data[(t*((nb+1)/2)+b/2)*pairQ8:]
		for i := range quantK {
			sum += int32(int8(o[b%2*512+i/4*64+lane*4+i%4]^0x80)) * int32(q[i])
		}
		acc = fma32(float32(sum), halfAt(o, 1024+b%2*32+lane*2)*r.s[b], acc)
	}
	return acc
}

func halfAt(b []byte, i int) float32 { return halfToFloat(binary.LittleEndian.Uint16(b[i:])) }
