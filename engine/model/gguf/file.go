package gguf

import "math"

// Tensor is one tensor of a file.
type Tensor struct {
	// Name is the name in the file, such as "blk.0.attn_q.weight".
	Name string
	// Type is the number format of Data.
	Type Type
	// Dims are the dimensions in the order of ggml: Dims[0] is the length of a
	// row, whose elements lie side by side.
	Dims []uint64
	// Data is the content, rows one after the other. It belongs to the File
	// and must not be written. It is nil where Type.Block is zero.
	Data []byte
}

// Elems returns the number of elements.
func (t Tensor) Elems() uint64 {
	n := uint64(1)
	for _, d := range t.Dims {
		n *= d
	}
	return n
}

// File is an open GGUF file. It does not change and is safe for concurrent
// use; no call may overlap Close or come after it.
type File struct {
	size    int64
	values  map[string]value
	tensors []Tensor
	byName  map[string]int
	unmap   func() error // nil when the bytes are not mapped, and after Close
}

// Close releases the mapping. Tensor data must not be used any more. A second
// call does nothing.
func (f *File) Close() error {
	if f.unmap == nil {
		return nil
	}
	unmap := f.unmap
	f.unmap = nil
	return unmap()
}

// Size returns the length of the file in bytes.
func (f *File) Size() int64 { return f.size }

// Has reports whether the metadata has key, of whatever kind.
func (f *File) Has(key string) bool {
	_, ok := f.values[key]
	return ok
}

// scalar returns the value of key unless it is an array.
func (f *File) scalar(key string) (value, bool) {
	v, ok := f.values[key]
	return v, ok && !v.list
}

// Uint returns the whole number at key. It is false where key is absent, has
// another kind, or is negative.
func (f *File) Uint(key string) (uint64, bool) {
	v, ok := f.scalar(key)
	if !ok || v.kind == kindString {
		return 0, false
	}
	n, ok := v.integer(0)
	if !ok || n < 0 {
		return 0, false
	}
	return uint64(n), true
}

// Float returns the floating-point number at key.
func (f *File) Float(key string) (float64, bool) {
	v, ok := f.scalar(key)
	if !ok {
		return 0, false
	}
	return v.number(0)
}

// Bool returns the truth value at key; ok is false where there is none.
func (f *File) Bool(key string) (v, ok bool) {
	x, ok := f.scalar(key)
	if !ok || x.kind != kindBool {
		return false, false
	}
	return x.raw[0] != 0, true
}

// Str returns a copy of the string at key. The format asks for UTF-8; this
// reader does not insist, because pieces of byte-level vocabularies are not
// always whole characters.
func (f *File) Str(key string) (string, bool) {
	v, ok := f.scalar(key)
	if !ok || v.kind != kindString {
		return "", false
	}
	return string(v.raw), true
}

// Strs returns a copy of the strings at key, nil where key is absent or not an
// array of strings.
func (f *File) Strs(key string) []string {
	v, ok := f.values[key]
	if !ok || !v.list || v.kind != kindString {
		return nil
	}
	return v.strs()
}

// Floats returns the floating-point numbers at key, nil where there are none.
func (f *File) Floats(key string) []float32 {
	v, ok := f.values[key]
	if !ok || !v.list || v.kind == kindString {
		return nil
	}
	out := make([]float32, v.n)
	for i := range out {
		x, ok := v.number(i)
		if !ok {
			return nil
		}
		out[i] = float32(x)
	}
	return out
}

// Ints returns the whole numbers at key, nil where there are none or where one
// does not fit.
func (f *File) Ints(key string) []int32 {
	v, ok := f.values[key]
	if !ok || !v.list || v.kind == kindString {
		return nil
	}
	out := make([]int32, v.n)
	for i := range out {
		x, ok := v.integer(i)
		if !ok || x < math.MinInt32 || x > math.MaxInt32 {
			return nil
		}
		out[i] = int32(x)
	}
	return out
}

// Tensor returns the tensor of that name.
func (f *File) Tensor(name string) (Tensor, bool) {
	i, ok := f.byName[name]
	if !ok {
		return Tensor{}, false
	}
	return f.tensors[i], true
}

// Tensors returns all tensors in the order of the file. The slice belongs to
// the File.
func (f *File) Tensors() []Tensor { return f.tensors }

// Len returns the number of elements of the array at key, 0 where there is
// none.
func (f *File) Len(key string) int {
	v, ok := f.values[key]
	if !ok || !v.list {
		return 0
	}
	return v.n
}
