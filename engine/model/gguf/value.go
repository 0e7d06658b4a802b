package gguf

import (
	"encoding/binary"
	"math"
)

// kind is the type of a metadata value.
type kind uint32

const (
	kindU8 kind = iota
	kindI8
	kindU16
	kindI16
	kindU32
	kindI32
	kindF32
	kindBool
	kindString
	kindArray
	kindU64
	kindI64
	kindF64
)

// size returns the bytes of one value, 0 for strings, arrays and unknown kinds.
func (k kind) size() int {
	switch k {
	case kindU8, kindI8, kindBool:
		return 1
	case kindU16, kindI16:
		return 2
	case kindU32, kindI32, kindF32:
		return 4
	case kindU64, kindI64, kindF64:
		return 8
	}
	return 0
}

// value is one metadata value as it lies in the file, already checked.
type value struct {
	kind kind // of the value, or of the elements of an array
	list bool
	n    int    // elements of an array
	raw  []byte // numbers, the bytes of a string, or the elements of an array
}

// integer returns element i as a whole number; ok is false for other kinds and
// for numbers that int64 cannot hold.
func (v value) integer(i int) (n int64, ok bool) {
	s := v.kind.size()
	b := v.raw[i*s:]
	switch v.kind {
	case kindU8:
		return int64(b[0]), true
	case kindI8:
		return int64(int8(b[0])), true
	case kindU16:
		return int64(binary.LittleEndian.Uint16(b)), true
	case kindI16:
		return int64(int16(binary.LittleEndian.Uint16(b))), true
	case kindU32:
		return int64(binary.LittleEndian.Uint32(b)), true
	case kindI32:
		return int64(int32(binary.LittleEndian.Uint32(b))), true
	case kindU64, kindI64:
		u := binary.LittleEndian.Uint64(b)
		return int64(u), v.kind == kindI64 || u <= math.MaxInt64
	}
	return 0, false
}

// number returns element i as a floating-point number.
func (v value) number(i int) (x float64, ok bool) {
	switch v.kind {
	case kindF32:
		return float64(math.Float32frombits(binary.LittleEndian.Uint32(v.raw[i*4:]))), true
	case kindF64:
		return math.Float64frombits(binary.LittleEndian.Uint64(v.raw[i*8:])), true
	}
	return 0, false
}

// strs cuts the elements of an array of strings. It copies the bytes once, so
// that the result outlives the mapping.
func (v value) strs() []string {
	all, out := string(v.raw), make([]string, 0, v.n)
	for at := 0; len(out) < v.n; {
		n := int(binary.LittleEndian.Uint64(v.raw[at:]))
		out = append(out, all[at+8:at+8+n])
		at += 8 + n
	}
	return out
}
