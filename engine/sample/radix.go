package sample

import "math"

// The 32 bits of a number are looked at in digits of 11, 11 and 10 bits.
const (
	digitBits = 11
	digits    = 1 << digitBits
)

// histogram selects the largest candidates without sorting them. Its memory is
// part of the sampler that owns it.
type histogram struct {
	mass [digits]float64
	used [digits]bool
}

// topK keeps the k largest candidates, the lowest ids among equals, in the
// order they came in. k is at least 1.
func (h *histogram) topK(c []candidate, k int) []candidate {
	return h.largest(c, float64(k), func(candidate) float64 { return 1 })
}

// topMass keeps the largest candidates, at least one, that together have the
// goal as their weight, in the order they came in.
func (h *histogram) topMass(c []candidate, goal float64) []candidate {
	return h.largest(c, goal, func(x candidate) float64 { return float64(x.w) })
}

// largest keeps the smallest set of the largest candidates whose masses reach
// the goal, at least one. Candidates of equal value are taken in the order of c.
func (h *histogram) largest(c []candidate, goal float64, mass func(candidate) float64) []candidate {
	// Find the key at which the goal is reached, one digit after the other.
	// Each round drops what is below, so all but the first look at few.
	var key, known uint32 // the digits found so far, and a mask over them
	var above float64     // mass of the candidates whose key is larger
	for _, d := range [...]struct{ shift, width int }{{21, 11}, {10, 11}, {0, 10}} {
		low := uint32(1)<<d.width - 1
		h.mass, h.used = [digits]float64{}, [digits]bool{}
		for _, x := range c {
			if b := ordered(x.w); b&known == key {
				i := b >> d.shift & low
				h.mass[i] += mass(x)
				h.used[i] = true
			}
		}
		at, reached := 0, false
		for i := int(low); i >= 0 && !reached; i-- {
			if !h.used[i] {
				continue
			}
			at, reached = i, above+h.mass[i] >= goal
			if !reached {
				above += h.mass[i]
			}
		}
		if !reached {
			// Sums in another order may miss the goal by a rounding; the
			// lowest candidates are then needed too.
			above -= h.mass[at]
		}
		key |= uint32(at) << d.shift
		known |= low << d.shift
		kept := c[:0]
		for _, x := range c {
			if ordered(x.w) >= key {
				kept = append(kept, x)
			}
		}
		c = kept
	}
	// What is left has the key or a larger one; take only as many of the
	// former as the goal needs.
	kept, some := c[:0], false
	for _, x := range c {
		if ordered(x.w) == key {
			if some && above >= goal {
				continue
			}
			above, some = above+mass(x), true
		}
		kept = append(kept, x)
	}
	return kept
}

// ordered maps a number to bits that compare, as unsigned integers, like the
// numbers do.
func ordered(f float32) uint32 {
	const sign = 1 << 31
	b := math.Float32bits(f + 0) // -0 becomes 0
	return b ^ (uint32(int32(b)>>31) | sign)
}
