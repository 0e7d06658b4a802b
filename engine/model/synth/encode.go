package synth

import (
	"encoding/binary"
	"math"

	"bulkhead.dev/engine/model/gguf"
)

// Encode writes numbers in a tensor type, rounding to nearest. The length must
// be a multiple of the block of the type. Blocks are made as ggml makes them.
func Encode(t gguf.Type, x []float32) []byte {
	per, size := t.Block()
	if per == 0 || len(x)%per != 0 {
		panic("synth: numbers do not fill blocks of " + t.String())
	}
	out := make([]byte, 0, len(x)/per*size)
	for ; len(x) > 0; x = x[per:] {
		out = appendBlock(out, t, x[:per])
	}
	return out
}

func appendBlock(out []byte, t gguf.Type, x []float32) []byte {
	le := binary.LittleEndian
	switch t {
	case gguf.F16:
		return le.AppendUint16(out, half(x[0]))
	case gguf.BF16:
		bits := math.Float32bits(x[0])
		return le.AppendUint16(out, uint16((bits+0x7fff+bits>>16&1)>>16))
	case gguf.Q8_0:
		scale := largest(x) / 127
		out = le.AppendUint16(out, half(abs(scale)))
		for _, v := range x {
			out = append(out, byte(int8(math.RoundToEven(float64(ratio(v, abs(scale)))))))
		}
		return out
	case gguf.Q4_0:
		scale := largest(x) / -8
		return appendNibbles(le.AppendUint16(out, half(scale)), x, 8, scale)
	case gguf.Q4_1:
		lo, hi := x[0], x[0]
		for _, v := range x {
			lo, hi = min(lo, v), max(hi, v)
		}
		scale := (hi - lo) / 15
		out = le.AppendUint16(le.AppendUint16(out, half(scale)), half(lo))
		shifted := make([]float32, len(x))
		for i, v := range x {
			shifted[i] = v - lo
		}
		return appendNibbles(out, shifted, 0, scale)
	}
	return le.AppendUint32(out, math.Float32bits(x[0]))
}

// appendNibbles writes 32 numbers of 4 bits: byte i has number i below and
// number i+16 above.
func appendNibbles(out []byte, x []float32, zero, scale float32) []byte {
	q := func(v float32) byte { return byte(min(15, int(ratio(v, scale)+zero+0.5))) }
	for i := range len(x) / 2 {
		out = append(out, q(x[i])|q(x[i+len(x)/2])<<4)
	}
	return out
}

func ratio(v, scale float32) float32 {
	if scale == 0 {
		return 0
	}
	return v / scale
}

func abs(x float32) float32 { return math.Float32frombits(math.Float32bits(x) &^ (1 << 31)) }

// largest returns the number of the largest magnitude, with its sign.
func largest(x []float32) float32 {
	m := x[0]
	for _, v := range x {
		if abs(v) > abs(m) {
			m = v
		}
	}
	return m
}

// half rounds to the nearest IEEE 754 binary16, ties to even.
func half(x float32) uint16 {
	bits := math.Float32bits(x)
	sign := uint16(bits >> 16 & 0x8000)
	switch mag := bits &^ (1 << 31); {
	case mag > 0x7f800000: // not a number
		return sign | 0x7e00
	case mag >= 0x477ff000: // rounds to infinity
		return sign | 0x7c00
	case mag >= 0x38800000: // normal
		mag -= 0x38000000
		return sign | uint16((mag+0xfff+mag>>13&1)>>13)
	default: // subnormal: adding 0.5 aligns the bits at the right place
		return sign | uint16(math.Float32bits(math.Float32frombits(mag)+0.5)-math.Float32bits(0.5))
	}
}
