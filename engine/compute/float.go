package compute

import "math"

// fma32 returns a*b+c rounded once to float32, as the fma instruction does.
//
// The product of two float32 is exact in float64. The sum is rounded to odd
// there: where it is not exact, its last bit is made one. A float64 that was
// rounded to odd rounds to the float32 that the exact sum would round to,
// since it has more than two bits to spare (Boldo and Melquiond, "Emulation of
// a FMA and correctly rounded sums", 2008). Rounding twice to nearest would be
// wrong now and then.
func fma32(a, b, c float32) float32 {
	p, z := float64(a)*float64(b), float64(c)
	s := p + z
	// The error of the sum, exactly (Knuth's two-sum).
	v := s - p
	e := (p - (s - v)) + (z - v)
	if e != 0 && !math.IsInf(s, 0) { // not for NaN: e is NaN then, and so is s
		bits := math.Float64bits(s)
		if bits&1 == 0 {
			if (e > 0) == (s > 0) {
				bits++
			} else {
				bits--
			}
			s = math.Float64frombits(bits)
		}
	}
	return float32(s)
}

// halfToFloat widens an IEEE 754 binary16.
func halfToFloat(h uint16) float32 {
	sign, exp, frac := uint32(h&0x8000)<<16, uint32(h>>10)&31, uint32(h)&1023
	switch exp {
	case 0: // zero and subnormal: frac * 2^-24 is exact
		f := float32(frac) * (1.0 / (1 << 24))
		return math.Float32frombits(math.Float32bits(f) | sign)
	case 31:
		return math.Float32frombits(sign | 0x7f800000 | frac<<13)
	}
	return math.Float32frombits(sign | (exp+112)<<23 | frac<<13)
}

// floatToHalf rounds to binary16, to nearest and ties to even.
func floatToHalf(f float32) uint16 {
	u := math.Float32bits(f)
	s, a := uint16(u>>16&0x8000), u&0x7fffffff
	up := func(q, rest, half uint32) uint16 {
		if rest > half || rest == half && q&1 == 1 {
			q++
		}
		return s | uint16(q)
	}
	switch {
	case a > 0x7f800000:
		return s | 0x7e00 | uint16(a>>13&0x1ff)
	case a >= 0x477ff000: // 65520 and more
		return s | 0x7c00
	case a < 0x33000000: // below half of the smallest subnormal
		return s
	case a < 0x38800000: // subnormal: align to 2^-24
		m, sh := a&0x7fffff|0x800000, 126-a>>23
		return up(m>>sh, m&(1<<sh-1), 1<<(sh-1))
	}
	return up((a-0x38000000)>>13, a&0x1fff, 0x1000)
}
