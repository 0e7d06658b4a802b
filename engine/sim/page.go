package sim

import (
	"encoding/binary"
	"math/bits"
	"unsafe"

	"bulkhead.dev/engine/kv"
)

// numbers is how many numbers a key, or a value, has.
const numbers = 4

// Geometry is the geometry of every simulated model.
func Geometry(t kv.DType) kv.Geometry {
	return kv.Geometry{Layers: 1, KVHeads: 1, HeadDim: numbers, PageTokens: kv.PageTokens, DType: t, Layout: kv.Layout1}
}

// A key is the mark, the two halves of the token, and the low bits of the
// position, 16 bits each, from the lowest. A value is a hash. Both are written as
// four numbers of 16 bits.
type (
	key   uint64
	value uint64
)

// mark is 1 in half precision, which neither a page of zeros nor one of NaNs has.
const mark = 0x3C00

func keyOf(token int32, pos int) key {
	return mark | key(uint32(token))<<16 | key(uint16(pos))<<48
}

func (k key) marked() bool { return uint16(k) == mark }

// history is a sum over the keys and values in front of a position. The place
// of a value in it counts, because values depend on what is before them and
// keys on their position.
type history uint64

func (h history) add(k key, v value) history {
	return h + history(mix(uint64(k)^bits.RotateLeft64(uint64(v), 23)))
}

// value is what a position has whose key is k.
func (h history) value(k key) value { return value(mix(uint64(h) ^ mix(uint64(k)))) }

// mix is the finaliser of SplitMix64.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// pageAt returns the memory of a page. The address comes out of Pages.Resolve
// and is not of Go's heap.
func pageAt(addr uintptr, g kv.Geometry) []byte {
	return unsafe.Slice(*(**byte)(unsafe.Pointer(&addr)), g.PageBytes())
}

// Where a position is in a page, counted in numbers, as KIndex and VIndex of the
// geometry say: keys lie by number and then by position, values by position and
// then by number.
const (
	keyStride  = kv.PageTokens
	valueFirst = numbers * kv.PageTokens
)

// slot is the place of a position in a page.
type slot struct {
	page []byte
	wide bool // numbers have 32 bits
	tok  int
}

func (s slot) read() (k key, v value) {
	if !s.wide {
		v = value(binary.LittleEndian.Uint64(s.page[2*(valueFirst+s.tok*numbers):]))
	}
	for d := range numbers {
		k |= key(s.get(d*keyStride+s.tok)) << (16 * d)
		if s.wide {
			v |= value(s.get(valueFirst+s.tok*numbers+d)) << (16 * d)
		}
	}
	return k, v
}

func (s slot) write(k key, v value) {
	for d := range numbers {
		s.put(d*keyStride+s.tok, uint16(k>>(16*d)))
		s.put(valueFirst+s.tok*numbers+d, uint16(v>>(16*d)))
	}
}

// get reads a number; of one that is wider than what put writes, all bytes count.
func (s slot) get(i int) uint16 {
	if s.wide {
		n := binary.LittleEndian.Uint32(s.page[4*i:])
		return uint16(n ^ n>>16)
	}
	return binary.LittleEndian.Uint16(s.page[2*i:])
}

func (s slot) put(i int, n uint16) {
	if s.wide {
		binary.LittleEndian.PutUint32(s.page[4*i:], uint32(n))
		return
	}
	binary.LittleEndian.PutUint16(s.page[2*i:], n)
}
