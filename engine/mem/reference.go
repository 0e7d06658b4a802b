package mem

import "encoding/binary"

// level is one implementation. The callers have checked all lengths.
type level struct {
	name string
	// nh adds src to sums, the first of which belongs to the stripe in which
	// src begins, at bytes into it. It copies src to dst, unless that is nil.
	nh   func(key *nhKey, dst, src []byte, at int, sums []uint64)
	copy func(dst, src []byte)
	fill func(dst []byte, b byte)
}

// goLevel is the definition of the sums, and what runs where C does not.
var goLevel = level{
	name: "go",
	nh:   nhGo,
	copy: func(dst, src []byte) { copy(dst, src) },
	fill: func(dst []byte, b byte) {
		if b == 0 {
			clear(dst)
			return
		}
		for i := range dst {
			dst[i] = b
		}
	},
}

func nhGo(key *nhKey, dst, src []byte, at int, sums []uint64) {
	for len(src) > 0 {
		n := min(len(src), stripeBytes-at)
		part := src[:n]
		if dst != nil {
			// Added is the copy, which nobody else writes.
			copy(dst[:n], part)
			part, dst = dst[:n], dst[n:]
		}
		addStripe(key[at/4:at/4+n/4+keyTail], part, (*[lanes]uint64)(sums))
		src, sums, at = src[n:], sums[lanes:], 0
	}
}

// addStripe adds bytes of one stripe. key begins with the word for the first.
func addStripe(key []uint32, b []byte, sum *[lanes]uint64) {
	s0, s1, s2, s3 := sum[0], sum[1], sum[2], sum[3]
	for ; len(b) >= 8 && len(key) >= 2+keyTail; b, key = b[8:], key[2:] {
		x, y := binary.LittleEndian.Uint32(b), binary.LittleEndian.Uint32(b[4:])
		s0 += uint64(x+key[0]) * uint64(y+key[1])
		s1 += uint64(x+key[4]) * uint64(y+key[5])
		s2 += uint64(x+key[8]) * uint64(y+key[9])
		s3 += uint64(x+key[12]) * uint64(y+key[13])
	}
	*sum = [lanes]uint64{s0, s1, s2, s3}
}
