package gguf

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"math"
)

// Writer builds a GGUF file of version 3. Its zero value is not usable; see
// NewWriter. The order of keys and tensors is that of the calls, so the same
// calls give the same bytes.
type Writer struct {
	keys    []string
	values  map[string][]byte // kind and value, encoded
	tensors []Tensor
	align   uint64
	err     error // the first misuse; WriteTo reports it
}

// NewWriter returns a writer without keys and tensors.
func NewWriter() *Writer {
	return &Writer{values: map[string][]byte{}, align: defaultAlignment}
}

// Set sets a metadata key, or replaces it. The value is a sized integer, a
// float, a bool, a string, or a slice of one of these; anything else makes
// WriteTo fail.
func (w *Writer) Set(key string, v any) {
	var b bytes.Buffer
	if err := putValue(&b, v); err != nil {
		w.fail(fmt.Errorf("gguf: key %q: %w", key, err))
		return
	}
	if a, ok := v.(uint32); ok && key == keyAlignment {
		if a < minAlignment || a > maxAlignment || a&(a-1) != 0 {
			w.fail(fmt.Errorf("gguf: alignment %d is not possible", a))
			return
		}
		w.align = uint64(a)
	}
	if _, ok := w.values[key]; !ok {
		w.keys = append(w.keys, key)
	}
	w.values[key] = b.Bytes()
}

// Add adds a tensor. Data is kept, not copied, and must have the length that
// type and dimensions ask for. It is checked in WriteTo.
func (w *Writer) Add(name string, t Type, dims []uint64, data []byte) {
	ten := Tensor{Name: name, Type: t, Dims: dims, Data: data}
	per, size := t.Block()
	if per == 0 || len(dims) == 0 || len(dims) > maxDims || dims[0]%uint64(per) != 0 {
		w.fail(fmt.Errorf("gguf: tensor %q: type %v with dimensions %v is not possible", name, t, dims))
		return
	}
	if want := ten.Elems() / uint64(per) * uint64(size); want != uint64(len(data)) {
		w.fail(fmt.Errorf("gguf: tensor %q has %d bytes, its dimensions need %d", name, len(data), want))
		return
	}
	w.tensors = append(w.tensors, ten)
}

func (w *Writer) fail(err error) {
	if w.err == nil {
		w.err = err
	}
}

// WriteTo implements io.WriterTo. It fails, before writing anything, if an
// earlier call was wrong.
func (w *Writer) WriteTo(out io.Writer) (int64, error) {
	if w.err != nil {
		return 0, w.err
	}
	var b bytes.Buffer
	b.WriteString(magic)
	put(&b, uint32(3), uint64(len(w.tensors)), uint64(len(w.keys)))
	for _, k := range w.keys {
		putString(&b, k)
		b.Write(w.values[k])
	}
	seen, offset := map[string]bool{}, uint64(0)
	for _, t := range w.tensors {
		if seen[t.Name] {
			return 0, fmt.Errorf("gguf: tensor %q was added twice", t.Name)
		}
		seen[t.Name] = true
		putString(&b, t.Name)
		put(&b, uint32(len(t.Dims)), t.Dims, uint32(t.Type), offset)
		offset = w.alignUp(offset + uint64(len(t.Data)))
	}
	c := &counter{out: out}
	c.write(b.Bytes())
	for _, t := range w.tensors {
		c.pad(w.align)
		c.write(t.Data)
	}
	return c.n, c.err
}

func (w *Writer) alignUp(n uint64) uint64 { return (n + w.align - 1) / w.align * w.align }

// counter writes until the first error and counts the bytes.
type counter struct {
	out io.Writer
	n   int64
	err error
}

func (c *counter) write(b []byte) {
	if c.err != nil {
		return
	}
	n, err := c.out.Write(b)
	c.n += int64(n)
	if err != nil {
		c.err = fmt.Errorf("write gguf: %w", err)
	}
}

func (c *counter) pad(align uint64) {
	if over := uint64(c.n) % align; over != 0 {
		c.write(make([]byte, align-over))
	}
}

// put appends fixed-size values, little-endian.
func put(b *bytes.Buffer, vs ...any) {
	for _, v := range vs {
		// Writing into a Buffer fails only for values without a fixed size.
		if err := binary.Write(b, binary.LittleEndian, v); err != nil {
			panic("gguf: " + err.Error())
		}
	}
}

func putString(b *bytes.Buffer, s string) {
	put(b, uint64(len(s)))
	b.WriteString(s)
}

// putValue appends the kind of v and v.
func putValue(b *bytes.Buffer, v any) error {
	switch v := v.(type) {
	case string:
		put(b, uint32(kindString))
		putString(b, v)
		return nil
	case []string:
		put(b, uint32(kindArray), uint32(kindString), uint64(len(v)))
		for _, s := range v {
			putString(b, s)
		}
		return nil
	}
	k, n := kindOf(v)
	switch {
	case k == math.MaxUint32:
		return fmt.Errorf("%T is not a value of the format", v)
	case n >= 0:
		put(b, uint32(kindArray), uint32(k), uint64(n), v)
	default:
		put(b, uint32(k), v)
	}
	return nil
}

// kindOf returns the kind of a number or of the elements of a slice, and the
// length of the slice, -1 for a single value.
func kindOf(v any) (kind, int) {
	switch v := v.(type) {
	case uint8:
		return kindU8, -1
	case int8:
		return kindI8, -1
	case uint16:
		return kindU16, -1
	case int16:
		return kindI16, -1
	case uint32:
		return kindU32, -1
	case int32:
		return kindI32, -1
	case uint64:
		return kindU64, -1
	case int64:
		return kindI64, -1
	case float32:
		return kindF32, -1
	case float64:
		return kindF64, -1
	case bool:
		return kindBool, -1
	case []uint8:
		return kindU8, len(v)
	case []int8:
		return kindI8, len(v)
	case []uint16:
		return kindU16, len(v)
	case []int16:
		return kindI16, len(v)
	case []uint32:
		return kindU32, len(v)
	case []int32:
		return kindI32, len(v)
	case []uint64:
		return kindU64, len(v)
	case []int64:
		return kindI64, len(v)
	case []float32:
		return kindF32, len(v)
	case []float64:
		return kindF64, len(v)
	case []bool:
		return kindBool, len(v)
	}
	return math.MaxUint32, 0
}
