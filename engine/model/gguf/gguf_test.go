package gguf_test

import (
	"bytes"
	"encoding/binary"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"bulkhead.dev/engine/model/gguf"
	"bulkhead.dev/infra/assert"
)

// fill returns n bytes that differ.
func fill(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i * 7)
	}
	return b
}

// sample writes a file with a value of each kind and a tensor of each type.
func sample(t testing.TB) []byte {
	t.Helper()
	w := gguf.NewWriter()
	w.Set("general.architecture", "llama")
	for key, v := range numbers {
		w.Set(key, v)
	}
	w.Set("yes", true)
	w.Set("no", false)
	w.Set("text", "h\u00e9llo")
	w.Set("empty", "")
	w.Set("strings", []string{"", "a", "b c", "\xff"})
	w.Set("floats", []float32{1.5, -2, float32(math.Inf(1))})
	w.Set("doubles", []float64{0.25})
	w.Set("ints", []int32{1, -1, math.MaxInt32})
	w.Set("longs", []uint64{7, 1 << 40})
	w.Set("bytes", []uint8{1, 255})
	w.Set("none", []string{})
	w.Add("f32", gguf.F32, []uint64{3}, fill(12))
	w.Add("f16", gguf.F16, []uint64{3, 2}, fill(12))
	w.Add("bf16", gguf.BF16, []uint64{1, 1, 1, 5}, fill(10))
	w.Add("q8_0", gguf.Q8_0, []uint64{64, 2}, fill(136))
	w.Add("q4_0", gguf.Q4_0, []uint64{32, 3}, fill(54))
	w.Add("q4_1", gguf.Q4_1, []uint64{32}, fill(20))
	return write(t, w)
}

var numbers = map[string]any{
	"u8": uint8(200), "i8": int8(-3), "u16": uint16(60000), "i16": int16(-300), "u32": uint32(4e9),
	"i32": int32(-70000), "u64": uint64(1 << 63), "i64": int64(1 << 40), "f32": float32(0.5), "f64": 0.1,
}

func write(t testing.TB, w *gguf.Writer) []byte {
	t.Helper()
	var b bytes.Buffer
	n, err := w.WriteTo(&b)
	assert.NoError(t, err)
	assert.Equal(t, n, int64(b.Len()))
	return b.Bytes()
}

func TestRoundTrip(t *testing.T) {
	t.Parallel()
	raw := sample(t)
	f, err := gguf.Parse(raw)
	assert.NoError(t, err)
	assert.Equal(t, f.Size(), int64(len(raw)))

	for key, want := range map[string]uint64{"u8": 200, "u16": 60000, "u32": 4e9, "i64": 1 << 40} {
		got, ok := f.Uint(key)
		assert.True(t, ok)
		assert.Equal(t, got, want)
	}
	for _, key := range []string{"i8", "i16", "i32", "u64", "f32", "yes", "text", "empty", "ints", "absent"} {
		_, ok := f.Uint(key)
		assert.False(t, ok)
	}
	for key, want := range map[string]float64{"f32": 0.5, "f64": 0.1} {
		got, ok := f.Float(key)
		assert.True(t, ok)
		assert.Equal(t, got, want)
	}
	for _, key := range []string{"u8", "text", "empty", "floats", "absent"} {
		_, ok := f.Float(key)
		assert.False(t, ok)
	}
	yes, ok1 := f.Bool("yes")
	no, ok2 := f.Bool("no")
	_, ok3 := f.Bool("u8")
	assert.True(t, yes && ok1 && !no && ok2 && !ok3)
	for key, want := range map[string]string{"text": "h\u00e9llo", "empty": ""} {
		got, ok := f.Str(key)
		assert.True(t, ok)
		assert.Equal(t, got, want)
	}
	_, ok := f.Str("strings")
	assert.False(t, ok)
	assert.Equal(t, f.Strs("strings"), []string{"", "a", "b c", "\xff"})
	assert.Equal(t, f.Strs("none"), []string{})
	assert.Equal(t, f.Strs("text"), nil)
	assert.Equal(t, f.Floats("floats"), []float32{1.5, -2, float32(math.Inf(1))})
	assert.Equal(t, f.Floats("doubles"), []float32{0.25})
	assert.Equal(t, f.Floats("ints"), nil)
	assert.Equal(t, f.Ints("ints"), []int32{1, -1, math.MaxInt32})
	assert.Equal(t, f.Ints("bytes"), []int32{1, 255})
	assert.Equal(t, f.Ints("longs"), nil)
	assert.Equal(t, f.Ints("strings"), nil)
	assert.Equal(t, f.Len("strings"), 4)
	assert.Equal(t, f.Len("text"), 0)
	assert.True(t, f.Has("none") && !f.Has("absent"))

	assert.Equal(t, len(f.Tensors()), 6)
	q, ok := f.Tensor("q4_0")
	assert.True(t, ok)
	assert.Equal(t, q, gguf.Tensor{Name: "q4_0", Type: gguf.Q4_0, Dims: []uint64{32, 3}, Data: fill(54)})
	assert.Equal(t, q.Elems(), uint64(96))
	_, ok = f.Tensor("absent")
	assert.False(t, ok)
	assert.NoError(t, f.Close())
}

func TestOpen(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "m.gguf")
	raw := sample(t)
	assert.NoError(t, os.WriteFile(path, raw, 0o600))
	f, err := gguf.Open(path)
	assert.NoError(t, err)
	q, _ := f.Tensor("q8_0")
	assert.Equal(t, q.Data, fill(136))
	assert.NoError(t, f.Close())
	assert.NoError(t, f.Close())

	assert.NoError(t, os.WriteFile(path, raw[:100], 0o600))
	_, err = gguf.Open(path)
	assert.ErrorAs[*gguf.FormatError](t, err)
	assert.NoError(t, os.WriteFile(path, nil, 0o600))
	_, err = gguf.Open(path)
	assert.ErrorAs[*gguf.FormatError](t, err)
	_, err = gguf.Open(filepath.Dir(path))
	assert.ErrorAs[*gguf.FormatError](t, err)
	_, err = gguf.Open(path + ".absent")
	assert.ErrorIs(t, err, os.ErrNotExist)
}

func TestTruncation(t *testing.T) {
	t.Parallel()
	raw := sample(t)
	for n := range raw {
		_, err := gguf.Parse(raw[:n])
		e := assert.ErrorAs[*gguf.FormatError](t, err)
		if n >= 4 && !e.Truncated {
			t.Fatalf("cut at %d of %d: %v", n, len(raw), err)
		}
	}
	_, err := gguf.Parse(raw[:len(raw)-1])
	e := assert.ErrorAs[*gguf.FormatError](t, err)
	assert.Equal(t, e.Offset, int64(len(raw)-1))
	for _, part := range []string{"file ends at byte", `tensor "q4_1" needs`, "the file is truncated"} {
		assert.True(t, strings.Contains(err.Error(), part))
	}
}

func TestAlignment(t *testing.T) {
	t.Parallel()
	for _, align := range []uint32{8, 64, 4096} {
		w := gguf.NewWriter()
		w.Set("general.alignment", align)
		w.Add("a", gguf.F32, []uint64{1}, fill(4))
		w.Add("b", gguf.F32, []uint64{2}, fill(8))
		raw := write(t, w)
		assert.Equal(t, len(raw)%int(align), 8%int(align))
		f, err := gguf.Parse(raw)
		assert.NoError(t, err)
		b, _ := f.Tensor("b")
		assert.Equal(t, b.Data, fill(8))
	}
}

// image builds files by hand, also wrong ones.
type image struct{ bytes.Buffer }

func (m *image) num(vs ...any) *image {
	for _, v := range vs {
		if s, ok := v.(string); ok {
			m.num(uint64(len(s)))
			m.WriteString(s)
			continue
		}
		if err := binary.Write(m, binary.LittleEndian, v); err != nil {
			panic(err)
		}
	}
	return m
}

// head begins a file of version 3.
func head(tensors, keys uint64) *image {
	m := &image{}
	m.WriteString("GGUF")
	return m.num(uint32(3), tensors, keys)
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	const str, arr, u32 = uint32(8), uint32(9), uint32(4)
	one := uint32(1)
	pad := make([]byte, 128)
	for name, c := range map[string]struct {
		file *image
		want string
	}{
		"magic":              {(&image{}).num(uint32(0x46554748), uint32(3)), `does not begin with "GGUF"`},
		"version 1":          {&image{*bytes.NewBufferString("GGUF\x01\x00\x00\x00")}, "version 1 is not supported"},
		"big-endian":         {&image{*bytes.NewBufferString("GGUF\x00\x00\x00\x03")}, "is not supported"},
		"many tensors":       {head(1<<40, 0), "the number of tensors is"},
		"many keys":          {head(0, 1<<40), "the number of metadata keys is"},
		"long key":           {head(0, 1).num(uint64(1 << 60)), "the length of a metadata key"},
		"long string":        {head(0, 1).num("k", str, uint64(math.MaxUint64)), `the value of "k"`},
		"long array":         {head(0, 1).num("k", arr, u32, uint64(1<<63)), "the length of array k"},
		"array past the end": {head(0, 1).num("k", arr, u32, uint64(1<<20)), "the file is truncated"},
		"strings past end":   {head(0, 1).num("k", arr, str, uint64(1<<20)), "the file is truncated"},
		"array of arrays":    {head(0, 1).num("k", arr, arr, uint64(1), u32, uint64(0)), "array of kind 9"},
		"kind":               {head(0, 1).num("k", uint32(13)), "unknown kind 13"},
		"two keys":           {head(0, 2).num("k", u32, one, "k", u32, one), `"k" appears twice`},
		"alignment 0":        {head(0, 1).num("general.alignment", u32, uint32(0)), "power of two"},
		"alignment 48":       {head(0, 1).num("general.alignment", u32, uint32(48)), "power of two"},
		"alignment text":     {head(0, 1).num("general.alignment", str, "32"), "power of two"},
		"long name":          {head(1, 0).num(strings.Repeat("x", 256)), "the length of a tensor name"},
		"no dimensions":      {head(1, 0).num("t", uint32(0)), "has 0 dimensions"},
		"five dimensions":    {head(1, 0).num("t", uint32(5)), "has 5 dimensions"},
		"dimension 0":        {head(1, 0).num("t", one, uint64(0)), "impossible dimension 0"},
		"product":            {head(1, 0).num("t", uint32(2), uint64(1<<32), uint64(1<<32)), "impossible dimension"},
		"odd rows":           {head(1, 0).num("t", one, uint64(33), uint32(gguf.Q8_0), uint64(0)), "rows of 33"},
		"odd offset":         {head(1, 0).num("t", one, uint64(1), uint32(0), uint64(4)), "not a multiple of 32"},
		"far offset":         {head(1, 0).num("t", one, uint64(1<<50), uint32(0), uint64(math.MaxUint64-31)), "behind every file"},
		"far end":            {head(1, 0).num("t", one, uint64(1), uint32(0), uint64(1<<63)).num(pad), "the file is truncated"},
		"unknown type far":   {head(1, 0).num("t", one, uint64(1), uint32(12), uint64(1<<30)), "the file is truncated"},
		"two tensors": {head(2, 0).num("t", one, uint64(1), uint32(0), uint64(0), "t", one, uint64(1), uint32(0), uint64(32)).num(pad),
			`"t" appears twice`},
		"overlap": {head(2, 0).num("a", one, uint64(9), uint32(0), uint64(0), "b", one, uint64(1), uint32(0), uint64(32)).num(pad),
			`"a" and "b" overlap`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := gguf.Parse(c.file.Bytes())
			e := assert.ErrorAs[*gguf.FormatError](t, err)
			if !strings.Contains(e.Reason, c.want) {
				t.Fatalf("%v, want something about %q", err, c.want)
			}
			assert.True(t, e.Offset <= int64(c.file.Len()))
		})
	}
}

func TestUnknownTypeHasNoData(t *testing.T) {
	t.Parallel()
	m := head(1, 0).num("t", uint32(1), uint64(256), uint32(12), uint64(0)).num(make([]byte, 300))
	f, err := gguf.Parse(m.Bytes())
	assert.NoError(t, err)
	q, ok := f.Tensor("t")
	assert.True(t, ok && q.Data == nil)
	assert.Equal(t, q.Type.String(), "Q4_K")
	assert.Equal(t, gguf.Type(999).String(), "type(999)")
}

func TestVersion2(t *testing.T) {
	t.Parallel()
	raw := sample(t)
	raw[4] = 2
	_, err := gguf.Parse(raw)
	assert.NoError(t, err)
}

func TestWriterMisuse(t *testing.T) {
	t.Parallel()
	for name, use := range map[string]func(*gguf.Writer){
		"int":       func(w *gguf.Writer) { w.Set("k", 1) },
		"map":       func(w *gguf.Writer) { w.Set("k", map[string]int{}) },
		"alignment": func(w *gguf.Writer) { w.Set("general.alignment", uint32(24)) },
		"length":    func(w *gguf.Writer) { w.Add("t", gguf.F32, []uint64{2}, fill(4)) },
		"type":      func(w *gguf.Writer) { w.Add("t", 12, []uint64{256}, fill(144)) },
		"rows":      func(w *gguf.Writer) { w.Add("t", gguf.Q4_0, []uint64{16, 2}, fill(18)) },
		"no shape":  func(w *gguf.Writer) { w.Add("t", gguf.F32, nil, fill(4)) },
		"twice": func(w *gguf.Writer) {
			w.Add("t", gguf.F16, []uint64{1}, fill(2))
			w.Add("t", gguf.F16, []uint64{1}, fill(2))
		},
	} {
		w := gguf.NewWriter()
		use(w)
		var b bytes.Buffer
		_, err := w.WriteTo(&b)
		if err == nil || b.Len() != 0 {
			t.Errorf("%s: error %v after %d bytes", name, err, b.Len())
		}
	}
	w := gguf.NewWriter()
	w.Set("k", "one")
	w.Set("k", "two")
	f, err := gguf.Parse(write(t, w))
	assert.NoError(t, err)
	got, _ := f.Str("k")
	assert.Equal(t, got, "two")
}

func TestSharedFiles(t *testing.T) {
	t.Parallel()
	for name, tensors := range map[string]int{
		"stories260K/converted/stories260K-f32.gguf": 48, "stories260K/converted/stories260K-q8_0.gguf": 48,
		"llama.cpp-vocab/ggml-vocab-gpt-2.gguf": 0, "llama.cpp-vocab/ggml-vocab-phi-3.gguf": 0,
	} {
		f, err := gguf.Open(assert.SharedData(t, name))
		assert.NoError(t, err)
		assert.Equal(t, len(f.Tensors()), tensors)
		assert.NoError(t, f.Close())
	}
}

func FuzzParse(f *testing.F) {
	raw := sample(f)
	f.Add(raw)
	f.Add(raw[:len(raw)/2])
	f.Add(head(1, 1).num("general.alignment", uint32(4), uint32(8), "t", uint32(1), uint64(1), uint32(0), uint64(0)).num(make([]byte, 16)).Bytes())
	f.Fuzz(func(t *testing.T, b []byte) {
		file, err := gguf.Parse(b)
		if err != nil {
			e := assert.ErrorAs[*gguf.FormatError](t, err)
			assert.True(t, e.Offset >= 0 && e.Offset <= int64(len(b)))
			return
		}
		for _, ten := range file.Tensors() {
			got, ok := file.Tensor(ten.Name)
			assert.True(t, ok && len(got.Data) == len(ten.Data))
			if per, size := ten.Type.Block(); per > 0 {
				assert.Equal(t, uint64(len(ten.Data)), ten.Elems()/uint64(per)*uint64(size))
			}
		}
		for _, key := range []string{"general.architecture", "general.alignment", "strings", "floats", "ints", "u8", "f64", "k"} {
			file.Uint(key)
			file.Float(key)
			file.Bool(key)
			file.Str(key)
			assert.True(t, len(file.Strs(key)) <= file.Len(key))
			assert.True(t, len(file.Floats(key)) <= file.Len(key))
			assert.True(t, len(file.Ints(key)) <= file.Len(key))
		}
	})
}
