package gguf

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"math/bits"
	"slices"
)

const magic = "GGUF"

// Parse reads a file that lies in memory. Tensor data points into b, which
// must stay unchanged for as long as the File is used. The error is a
// *FormatError.
func Parse(b []byte) (*File, error) {
	p := &parser{b: b}
	f := &File{size: int64(len(b)), values: map[string]value{}, byName: map[string]int{}}
	if err := p.file(f); err != nil {
		return nil, err
	}
	return f, nil
}

// parser walks over the bytes of a file. at never exceeds len(b).
type parser struct {
	b  []byte
	at int
}

func (p *parser) errorf(format string, args ...any) error {
	return &FormatError{Offset: int64(p.at), Reason: fmt.Sprintf(format, args...)}
}

// take returns the next n bytes.
func (p *parser) take(n uint64, what string) ([]byte, error) {
	if left := uint64(len(p.b) - p.at); n > left {
		return nil, &FormatError{Offset: int64(p.at), Truncated: true,
			Reason: fmt.Sprintf("file ends at byte %d, %s needs %d more: the file is truncated", len(p.b), what, n-left)}
	}
	b := p.b[p.at : p.at+int(n) : p.at+int(n)]
	p.at += int(n)
	return b, nil
}

func (p *parser) u32(what string) (uint32, error) {
	b, err := p.take(4, what)
	if err != nil {
		return 0, err
	}
	return binary.LittleEndian.Uint32(b), nil
}

func (p *parser) u64(what string) (uint64, error) {
	b, err := p.take(8, what)
	if err != nil {
		return 0, err
	}
	return binary.LittleEndian.Uint64(b), nil
}

// count reads a number that may not exceed limit.
func (p *parser) count(limit uint64, what string) (int, error) {
	n, err := p.u64(what)
	if err != nil {
		return 0, err
	}
	if n > limit {
		return 0, p.errorf("%s is %d, the limit is %d", what, n, limit)
	}
	return int(n), nil
}

// str reads a string of at most limit bytes.
func (p *parser) str(limit uint64, what string) ([]byte, error) {
	n, err := p.count(limit, "the length of "+what)
	if err != nil {
		return nil, err
	}
	return p.take(uint64(n), what)
}

func (p *parser) file(f *File) error {
	if len(p.b) < len(magic) || string(p.b[:len(magic)]) != magic {
		return p.errorf("the file does not begin with %q", magic)
	}
	p.at = len(magic)
	version, err := p.u32("the version")
	if err != nil {
		return err
	}
	if version != 2 && version != 3 {
		return p.errorf("version %d is not supported, versions 2 and 3 are", version)
	}
	tensors, err := p.count(maxTensors, "the number of tensors")
	if err != nil {
		return err
	}
	keys, err := p.count(maxKeys, "the number of metadata keys")
	if err != nil {
		return err
	}
	for range keys {
		if err := p.entry(f); err != nil {
			return err
		}
	}
	align, err := p.alignment(f)
	if err != nil {
		return err
	}
	return p.tensors(f, tensors, align)
}

// entry reads one key and its value.
func (p *parser) entry(f *File) error {
	start := p.at
	b, err := p.str(maxKeyLen, "a metadata key")
	if err != nil {
		return err
	}
	key := string(b)
	if _, dup := f.values[key]; dup {
		p.at = start
		return p.errorf("metadata key %q appears twice", key)
	}
	k, err := p.u32("the kind of a value")
	if err != nil {
		return err
	}
	v, err := p.value(kind(k), key)
	if err != nil {
		return err
	}
	f.values[key] = v
	return nil
}

func (p *parser) value(k kind, key string) (value, error) {
	what := fmt.Sprintf("the value of %q", key)
	switch k {
	case kindString:
		b, err := p.str(maxStringLen, what)
		return value{kind: k, raw: b}, err
	case kindArray:
		return p.array(key, what)
	}
	if k.size() == 0 {
		return value{}, p.errorf("%s has unknown kind %d", what, uint32(k))
	}
	b, err := p.take(uint64(k.size()), what)
	return value{kind: k, raw: b}, err
}

func (p *parser) array(key, what string) (value, error) {
	e, err := p.u32("the element kind of an array")
	if err != nil {
		return value{}, err
	}
	n, err := p.count(maxArrayLen, "the length of array "+key)
	if err != nil {
		return value{}, err
	}
	elem := kind(e)
	if elem == kindString {
		start := p.at
		for range n {
			if _, err := p.str(maxStringLen, what); err != nil {
				return value{}, err
			}
		}
		return value{kind: elem, list: true, n: n, raw: p.b[start:p.at:p.at]}, nil
	}
	if elem.size() == 0 {
		return value{}, p.errorf("%s is an array of kind %d, which is not supported", what, e)
	}
	b, err := p.take(uint64(n)*uint64(elem.size()), what)
	return value{kind: elem, list: true, n: n, raw: b}, err
}

func (p *parser) alignment(f *File) (uint64, error) {
	if !f.Has(keyAlignment) {
		return defaultAlignment, nil
	}
	a, ok := f.Uint(keyAlignment)
	if !ok || a < minAlignment || a > maxAlignment || bits.OnesCount64(a) != 1 {
		return 0, p.errorf("%s is not a power of two from %d to %d", keyAlignment, minAlignment, maxAlignment)
	}
	return a, nil
}

// extent is the place of a tensor, relative to the start of the tensor data.
type extent struct {
	tensor     int
	start, end uint64
}

func (p *parser) tensors(f *File, n int, align uint64) error {
	var extents []extent
	for i := range n {
		t, offset, size, err := p.info()
		if err != nil {
			return err
		}
		if _, dup := f.byName[t.Name]; dup {
			return p.errorf("tensor %q appears twice", t.Name)
		}
		if offset%align != 0 {
			return p.errorf("tensor %q begins at %d, which is not a multiple of %d", t.Name, offset, align)
		}
		end, carry := bits.Add64(offset, size, 0)
		if carry != 0 {
			return p.errorf("tensor %q ends behind every file", t.Name)
		}
		f.byName[t.Name] = i
		f.tensors = append(f.tensors, t)
		extents = append(extents, extent{i, offset, end})
	}
	if n == 0 {
		return nil
	}
	return p.place(f, extents, (uint64(p.at)+align-1)/align*align)
}

// info reads the description of one tensor and returns its offset and its
// size in bytes, which is 0 for a type that is not supported.
func (p *parser) info() (t Tensor, offset, size uint64, err error) {
	b, err := p.str(maxNameLen, "a tensor name")
	if err != nil {
		return t, 0, 0, err
	}
	t.Name = string(b)
	dims, err := p.u32("the number of dimensions")
	if err != nil {
		return t, 0, 0, err
	}
	if dims < 1 || dims > maxDims {
		return t, 0, 0, p.errorf("tensor %q has %d dimensions, 1 to %d are possible", t.Name, dims, maxDims)
	}
	elems := uint64(1)
	for range dims {
		d, err := p.u64("a dimension")
		if err != nil {
			return t, 0, 0, err
		}
		hi, lo := bits.Mul64(elems, d)
		// 2^59 elements of at most 4 bytes cannot overflow below.
		if d == 0 || hi != 0 || lo > 1<<59 {
			return t, 0, 0, p.errorf("tensor %q has an impossible dimension %d", t.Name, d)
		}
		elems, t.Dims = lo, append(t.Dims, d)
	}
	id, err := p.u32("the type of a tensor")
	if err != nil {
		return t, 0, 0, err
	}
	t.Type = Type(id)
	if offset, err = p.u64("the offset of a tensor"); err != nil {
		return t, 0, 0, err
	}
	if per, bytes := t.Type.Block(); per > 0 {
		if t.Dims[0]%uint64(per) != 0 {
			return t, 0, 0, p.errorf("tensor %q of type %v has rows of %d, which is not a multiple of %d", t.Name, t.Type, t.Dims[0], per)
		}
		size = elems / uint64(per) * uint64(bytes)
	}
	return t, offset, size, nil
}

// place gives each tensor its data, which begin at byte base of the file.
func (p *parser) place(f *File, extents []extent, base uint64) error {
	slices.SortFunc(extents, func(a, b extent) int {
		if a.start != b.start {
			return cmp.Compare(a.start, b.start)
		}
		return cmp.Compare(a.end, b.end)
	})
	have := uint64(len(p.b))
	for i, e := range extents {
		t := &f.tensors[e.tensor]
		if i > 0 && e.start < extents[i-1].end {
			return p.errorf("tensors %q and %q overlap", f.tensors[extents[i-1].tensor].Name, t.Name)
		}
		end, carry := bits.Add64(base, e.end, 0)
		if carry != 0 {
			return p.errorf("tensor %q ends behind every file", t.Name)
		}
		if end > have {
			return &FormatError{Offset: int64(have), Truncated: true,
				Reason: fmt.Sprintf("file ends at byte %d, tensor %q needs %d: the file is truncated", have, t.Name, end)}
		}
		if per, _ := t.Type.Block(); per > 0 {
			t.Data = p.b[base+e.start : end : end]
		}
	}
	return nil
}
