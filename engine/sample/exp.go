package sample

import "math"

// Beyond this an exponential is 0 as a float32.
const expUnderflow = -104

// exp returns e to the power x for x <= 0, with a relative error below 1e-8,
// and 0 below expUnderflow. It is faster than math.Exp, and unlike that has the
// same bits on every architecture: each product is rounded on its own, so no
// compiler may fuse it with a sum. A seed then gives the same draws everywhere.
func exp(x float64) float64 {
	if !(x >= expUnderflow) {
		return 0
	}
	const ln2Hi, ln2Lo = 6.93147180369123816490e-01, 1.90821492927058770002e-10
	k := int64(float64(x*math.Log2E) - 0.5) // nearest, as x is not positive
	r := x - float64(float64(k)*ln2Hi) - float64(float64(k)*ln2Lo)
	// Taylor up to r^8, |r| is at most ln(2)/2; in pairs, so that the products
	// do not wait for one another.
	r2 := r * r
	r4 := r2 * r2
	a := (1 + r) + float64(r2*(0.5+float64(r*(1.0/6))))
	b := (1.0/24 + float64(r*(1.0/120))) + float64(r2*(1.0/720+float64(r*(1.0/5040))))
	p := a + float64(r4*(b+float64(r4*(1.0/40320))))
	const bias, mantissa = 1023, 52
	return p * math.Float64frombits(uint64(k+bias)<<mantissa)
}
