package gguf

import "fmt"

// Type is the number format of a tensor, with the ids of ggml.
type Type uint32

// The formats that Bulkhead computes with. A file may hold tensors of other
// types: the reader lists them without data.
const (
	F32  Type = 0  // IEEE 754 binary32, little-endian
	F16  Type = 1  // IEEE 754 binary16
	Q4_0 Type = 2  // 32 numbers of 4 bits with one f16 scale
	Q4_1 Type = 3  // 32 numbers of 4 bits with f16 scale and minimum
	Q8_0 Type = 8  // 32 numbers of 8 bits with one f16 scale
	BF16 Type = 30 // the upper half of an F32
)

// names holds the ids that ggml has given out, for messages.
var names = map[Type]string{
	F32: "F32", F16: "F16", Q4_0: "Q4_0", Q4_1: "Q4_1", 6: "Q5_0", 7: "Q5_1",
	Q8_0: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K",
	14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
	19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
	24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M",
	BF16: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}

// String names the type as ggml does, "type(N)" if it is not known.
func (t Type) String() string {
	if s, ok := names[t]; ok {
		return s
	}
	return fmt.Sprintf("type(%d)", uint32(t))
}

// Block returns how many elements one block of the type holds and how many
// bytes it takes. Both are 0 for a type that Bulkhead cannot compute with.
func (t Type) Block() (elems, bytes int) {
	switch t {
	case F32:
		return 1, 4
	case F16, BF16:
		return 1, 2
	case Q4_0:
		return 32, 2 + 16
	case Q4_1:
		return 32, 2 + 2 + 16
	case Q8_0:
		return 32, 2 + 32
	}
	return 0, 0
}

// Supported lists the types for which Block is not zero, for messages.
func Supported() []Type { return []Type{F32, F16, BF16, Q8_0, Q4_0, Q4_1} }
