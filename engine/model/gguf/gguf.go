// Package gguf reads and writes GGUF model files.
package gguf

import "io"

// Type is a ggml tensor type id.
type Type uint32

// The tensor types that Bulkhead computes with.
const (
	F32  Type = 0
	F16  Type = 1
	Q4_0 Type = 2
	Q4_1 Type = 3
	Q8_0 Type = 8
	BF16 Type = 30
)

// String names the type as ggml does.
func (t Type) String() string { return "" }

// Block returns elements and bytes of one block.
func (t Type) Block() (elems, bytes int) { return 0, 0 }

// Tensor is one tensor of a file.
type Tensor struct {
	Name string
	Type Type
	Dims []uint64
	Data []byte
}

// FormatError reports a file that is not well formed.
type FormatError struct {
	Offset int64
	Reason string
}

// Error implements error.
func (e *FormatError) Error() string { return e.Reason }

// File is an open file.
type File struct{}

// Open maps the file at path.
func Open(path string) (*File, error) { return nil, &FormatError{} }

// Parse reads a file in memory.
func Parse(b []byte) (*File, error) { return nil, &FormatError{} }

// Close unmaps the file.
func (f *File) Close() error { return nil }

// Uint returns a whole number.
func (f *File) Uint(key string) (uint64, bool) { return 0, false }

// Float returns a number.
func (f *File) Float(key string) (float64, bool) { return 0, false }

// Bool returns a truth value.
func (f *File) Bool(key string) (v, ok bool) { return false, false }

// Str returns a string.
func (f *File) Str(key string) (string, bool) { return "", false }

// Strs returns an array of strings.
func (f *File) Strs(key string) []string { return nil }

// Floats returns an array of numbers.
func (f *File) Floats(key string) []float32 { return nil }

// Ints returns an array of whole numbers.
func (f *File) Ints(key string) []int32 { return nil }

// Tensor returns the tensor of that name.
func (f *File) Tensor(name string) (Tensor, bool) { return Tensor{}, false }

// Tensors returns all tensors in the order of the file.
func (f *File) Tensors() []Tensor { return nil }

// Size returns the length of the file in bytes.
func (f *File) Size() int64 { return 0 }

// Writer builds a file.
type Writer struct{}

// NewWriter starts an empty file.
func NewWriter() *Writer { return &Writer{} }

// Set sets a metadata key.
func (w *Writer) Set(key string, value any) {}

// Add adds a tensor.
func (w *Writer) Add(name string, t Type, dims []uint64, data []byte) {}

// WriteTo writes the file.
func (w *Writer) WriteTo(out io.Writer) (int64, error) { return 0, nil }
