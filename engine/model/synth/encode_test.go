package synth_test

import (
	"math"
	"testing"

	"bulkhead.dev/engine/model/gguf"
	"bulkhead.dev/engine/model/synth"
	"bulkhead.dev/infra/assert"
)

func TestEncodeHalf(t *testing.T) {
	t.Parallel()
	inf := float32(math.Inf(1))
	for _, c := range []struct {
		x    float32
		want uint16
	}{
		{0, 0}, {1, 0x3c00}, {-2, 0xc000}, {65504, 0x7bff}, {65519, 0x7bff}, {65520, 0x7c00}, {-inf, 0xfc00},
		{1 + 1.0/2048, 0x3c00}, {1 + 3.0/2048, 0x3c02}, {1 + 1.01/2048, 0x3c01}, // ties to even
		{0x1p-14, 0x0400}, {0x1p-24, 1}, {0x1p-25, 0}, {0x1.8p-24, 2}, {0x1.1p-25, 1}, {-0x1p-30, 0x8000},
	} {
		b := synth.Encode(gguf.F16, []float32{c.x})
		if got := uint16(b[0]) | uint16(b[1])<<8; got != c.want {
			t.Errorf("%g is %04x, want %04x", c.x, got, c.want)
		}
	}
	for h := range 1 << 16 { // every half that is a number comes back
		x := fromHalf(uint16(h))
		if h>>10&31 == 31 {
			continue
		}
		b := synth.Encode(gguf.F16, []float32{float32(x)})
		if got := int(b[0]) | int(b[1])<<8; got != h && x != 0 {
			t.Fatalf("%04x came back as %04x", h, got)
		}
	}
}

func TestEncodeBlocks(t *testing.T) {
	t.Parallel()
	x := make([]float32, 64)
	for i := range x {
		x[i] = float32(i%32)/4 - 3
	}
	for typ, step := range map[gguf.Type]float64{gguf.F32: 0, gguf.F16: 0, gguf.BF16: 0, gguf.Q8_0: 5.0 / 127, gguf.Q4_0: 5.0 / 8, gguf.Q4_1: 7.75 / 15} {
		ten := gguf.Tensor{Type: typ, Dims: []uint64{32, 2}, Data: synth.Encode(typ, x)}
		per, size := typ.Block()
		assert.Equal(t, len(ten.Data), len(x)/per*size)
		for r := range 2 {
			for i, got := range decode(ten, r) {
				// Half a step of rounding, and the rounding of the scale. Q4_0
				// reaches only seven steps to the side away from its largest.
				limit := step*0.51 + 0.002
				if want := float64(x[32*r+i]); math.Abs(got-want) > limit {
					t.Errorf("%v: %g came back as %g", typ, want, got)
				}
			}
		}
	}
	zero := gguf.Tensor{Type: gguf.Q4_0, Dims: []uint64{32, 1}, Data: synth.Encode(gguf.Q4_0, make([]float32, 32))}
	assert.Equal(t, decode(zero, 0), make([]float64, 32))
}
