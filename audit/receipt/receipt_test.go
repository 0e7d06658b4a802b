package receipt_test

import (
	"bytes"
	"encoding/hex"
	"flag"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/fxamacker/cbor/v2"

	"bulkhead.dev/audit/receipt"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
)

var update = flag.Bool("update", false, "rewrite testdata")

func fill[T ~[16]byte](b byte) (v T) {
	for i := range v {
		v[i] = b
	}
	return v
}

func digest(b byte) (d receipt.Digest) {
	for i := range d {
		d[i] = b
	}
	return d
}

// full has every field set.
func full() receipt.Receipt {
	at := time.Date(2026, 3, 1, 12, 0, 0, 123456000, time.UTC)
	h := receipt.NewHasher("d1", [32]byte{1})
	h.IDs([]uint32{1, 2, 70000})
	h.Text("answer")
	return receipt.Receipt{
		Version: receipt.Version,
		Request: fill[id.Request](1), Tenant: fill[id.Tenant](2), Project: fill[id.Project](3), Key: fill[id.Key](4),
		Model: "smollm2-135m", ModelDigest: digest(5), Surface: "openai.chat", Streamed: true,
		Received: receipt.At(at), Admitted: receipt.At(at.Add(time.Millisecond)), Committed: receipt.At(at.Add(20 * time.Millisecond)),
		FirstByte: receipt.At(at.Add(25 * time.Millisecond)), Finished: receipt.At(at.Add(time.Second)),
		EdgeTokens: new(uint32(40)),
		Prefill: &receipt.Leg{Worker: fill[id.Epoch](6), Build: "v1+abc", Tokens: new(uint32(40)), ManifestRoot: digest(7),
			Extents: []receipt.Extent{{First: 10, Count: 3, Generation: 1 << 40, Scrubbed: 2}}, ComputeUS: 9000, QueueUS: 3},
		Decode: &receipt.Leg{Worker: fill[id.Epoch](8), Build: "v1+abc", Tokens: new(uint32(40)), ManifestRoot: digest(7),
			Extents:      []receipt.Extent{{First: 0, Count: 2, Generation: 7}, {First: 9, Count: 1, Generation: 7, Scrubbed: 1}},
			HandoffBytes: 1105920, HandoffUS: 800, ComputeUS: 70000, QueueUS: 1},
		Transport: "unix", Output: 3, MaxOutput: 1024, Outcome: receipt.Completed, Finish: "stop",
		Response: h.Response(), Isolation: receipt.Shared, Replica: fill[id.Epoch](9),
	}
}

// lost is the smallest receipt: what an intent tells.
func lost() receipt.Receipt {
	return receipt.Receipt{Version: receipt.Version, Request: fill[id.Request](1), Tenant: fill[id.Tenant](2),
		Project: fill[id.Project](3), Key: fill[id.Key](4), Outcome: receipt.Lost, Replica: fill[id.Epoch](9)}
}

func refused() receipt.Receipt {
	r := lost()
	r.Outcome, r.Refusal = receipt.Refused, &receipt.Refusal{Leg: "decode", Reason: "recompute_mismatch"}
	r.EdgeTokens, r.Decode = new(uint32(0)), &receipt.Leg{Worker: fill[id.Epoch](8)}
	return r
}

var vectors = map[string]func() receipt.Receipt{
	"full": full, "lost": lost, "refused": refused,
	"withheld": func() receipt.Receipt { return full().Withhold() },
}

// The vectors pin the encoding: a receipt written by one version must have the
// same bytes, and so the same digest, in all later ones.
func TestVectors(t *testing.T) {
	t.Parallel()
	for name, make := range vectors {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := make()
			body, err := r.Encode()
			assert.NoError(t, err)
			text, err := r.JSON()
			assert.NoError(t, err)
			for file, got := range map[string][]byte{
				"testdata/" + name + ".cbor.hex": []byte(hex.EncodeToString(body) + "\n"),
				"testdata/" + name + ".json":     text,
			} {
				if *update {
					assert.NoError(t, os.WriteFile(file, got, 0o644))
				}
				want, err := os.ReadFile(file)
				assert.NoError(t, err)
				assert.Equal(t, string(got), string(want))
			}
			back, err := receipt.Decode(body)
			assert.NoError(t, err)
			assert.Equal(t, back, r)
			d, err := r.Digest()
			assert.NoError(t, err)
			assert.Equal(t, d, receipt.DigestOf(body))
		})
	}
}

// An independent reader, which knows CBOR and the table of the package comment
// but not our struct, finds the values where the table says.
func TestIndependentDecode(t *testing.T) {
	t.Parallel()
	body, err := full().Encode()
	assert.NoError(t, err)
	var m map[uint64]any
	assert.NoError(t, cbor.Unmarshal(body, &m))
	same16 := func(key uint64, b byte) {
		t.Helper()
		assert.Equal(t, m[key].([]byte), bytes.Repeat([]byte{b}, 16))
	}
	assert.Equal(t, m[1].(uint64), 1)
	same16(2, 1)
	same16(3, 2)
	same16(4, 3)
	same16(5, 4)
	same16(27, 9)
	assert.Equal(t, m[6].(string), "smollm2-135m")
	assert.Equal(t, m[7].([]byte), bytes.Repeat([]byte{5}, 32))
	assert.Equal(t, m[9].(bool), true)
	assert.Equal(t, m[10].(uint64), uint64(time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC).UnixMicro()+123456))
	assert.Equal(t, m[15].(uint64), 40)
	assert.Equal(t, m[21].(string), "completed")
	decode := m[17].(map[any]any)
	assert.Equal(t, decode[uint64(3)].(uint64), 40)
	assert.Equal(t, decode[uint64(4)].([]any)[1].([]any), []any{uint64(9), uint64(1), uint64(7), uint64(1)})
	_, withheld := m[26]
	assert.False(t, withheld) // absent, not false
	keys := 0
	for k := range m {
		assert.True(t, k >= 1 && k <= 27)
		keys++
	}
	assert.Equal(t, keys, 25) // all but 22 and 26
}

func TestDecodeRefuses(t *testing.T) {
	t.Parallel()
	good, err := full().Encode()
	assert.NoError(t, err)
	small, err := lost().Encode()
	assert.NoError(t, err)
	edit := func(change func(m map[uint64]any)) []byte {
		var m map[uint64]any
		assert.NoError(t, cbor.Unmarshal(small, &m))
		change(m)
		mode, err := cbor.CoreDetEncOptions().EncMode()
		assert.NoError(t, err)
		b, err := mode.Marshal(m)
		assert.NoError(t, err)
		return b
	}
	same := edit(func(map[uint64]any) {})
	assert.Equal(t, same, small) // the editing itself changes nothing
	for name, b := range map[string][]byte{
		"empty":              nil,
		"truncated":          good[:len(good)-1],
		"trailing byte":      append(bytes.Clone(good), 0),
		"unknown key":        edit(func(m map[uint64]any) { m[28] = true }),
		"other version":      edit(func(m map[uint64]any) { m[1] = 2 }),
		"explicit zero":      edit(func(m map[uint64]any) { m[19] = 0 }),
		"explicit false":     edit(func(m map[uint64]any) { m[26] = false }),
		"explicit null":      edit(func(m map[uint64]any) { m[15] = nil }),
		"short id":           edit(func(m map[uint64]any) { m[2] = make([]byte, 15) }),
		"long id":            edit(func(m map[uint64]any) { m[2] = bytes.Repeat([]byte{1}, 17) }),
		"id as array":        edit(func(m map[uint64]any) { m[2] = []int{1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1} }),
		"no tenant":          edit(func(m map[uint64]any) { delete(m, 3) }),
		"unknown outcome":    edit(func(m map[uint64]any) { m[21] = "fine" }),
		"float":              edit(func(m map[uint64]any) { m[19] = 1.5 }),
		"tagged":             append([]byte{0xd9, 0xd9, 0xf7}, small...),
		"indefinite length":  append(append([]byte{0xbf}, small[1:]...), 0xff),
		"long form of a key": append([]byte{small[0], 0x18, 0x01}, small[2:]...),
		"key twice":          append(append([]byte{small[0] + 1}, small[1:]...), small[1:3]...),
		"too large":          make([]byte, receipt.MaxBytes+1),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := receipt.Decode(b)
			assert.ErrorIs(t, err, receipt.ErrMalformed)
		})
	}
}

func TestValidate(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(r *receipt.Receipt){
		"no prefill count":     func(r *receipt.Receipt) { r.Prefill.Tokens = nil },
		"decode saw one token": func(r *receipt.Receipt) { r.Decode.Tokens = new(uint32(1)) },
		"edge differs":         func(r *receipt.Receipt) { r.EdgeTokens = new(uint32(41)) },
		"another manifest":     func(r *receipt.Receipt) { r.Decode.ManifestRoot[0]++ },
		"no manifest": func(r *receipt.Receipt) {
			r.Prefill.ManifestRoot, r.Decode.ManifestRoot = receipt.Digest{}, receipt.Digest{}
		},
		"no leg":                     func(r *receipt.Receipt) { r.Decode = nil },
		"completed and withheld":     func(r *receipt.Receipt) { r.Withheld = true },
		"completed with a refusal":   func(r *receipt.Receipt) { r.Refusal = &receipt.Refusal{Leg: "edge", Reason: "x"} },
		"refused without a reason":   func(r *receipt.Receipt) { r.Outcome = receipt.Refused },
		"withheld without the mark":  func(r *receipt.Receipt) { r.Outcome = receipt.Withheld },
		"more scrubbed than granted": func(r *receipt.Receipt) { r.Prefill.Extents[0].Scrubbed = 4 },
		"empty extent":               func(r *receipt.Receipt) { r.Prefill.Extents[0] = receipt.Extent{} },
		"long text":                  func(r *receipt.Receipt) { r.Surface = strings.Repeat("x", 257) },
		"not UTF-8":                  func(r *receipt.Receipt) { r.Model = "\xff" },
		"no key":                     func(r *receipt.Receipt) { r.Key = id.Key{} },
		"negative time":              func(r *receipt.Receipt) { r.Received = -1 },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := full()
			change(&r)
			_, err := r.Encode()
			assert.ErrorIs(t, err, receipt.ErrInvalid)
		})
	}
}

// The digests tell the ids from the text, depend on the key, and do not depend
// on how the text was cut into pieces.
func TestHasher(t *testing.T) {
	t.Parallel()
	of := func(key byte, ids []uint32, texts ...string) *receipt.Response {
		h := receipt.NewHasher("d1", [32]byte{key})
		h.IDs(ids)
		for _, s := range texts {
			h.Text(s)
		}
		return h.Response()
	}
	a := of(1, []uint32{1, 2}, "hello")
	assert.Equal(t, of(1, []uint32{1, 2}, "he", "llo"), a)
	assert.True(t, of(2, []uint32{1, 2}, "hello").Text != a.Text)
	assert.True(t, of(1, []uint32{1, 3}, "hello").IDs != a.IDs)
	assert.True(t, of(1, []uint32{1, 2}, "hellp").Text != a.Text)
	empty := of(1, nil)
	assert.True(t, empty.IDs != empty.Text)
}

// Withholding marks every outcome and renames only a completed one.
func TestWithhold(t *testing.T) {
	t.Parallel()
	r := full().Withhold()
	assert.Equal(t, r.Outcome, receipt.Withheld)
	assert.True(t, r.Withheld)
	l := refused().Withhold()
	assert.Equal(t, l.Outcome, receipt.Refused)
	assert.True(t, l.Withheld)
	_, err := l.Encode()
	assert.NoError(t, err)
}

func FuzzDecode(f *testing.F) {
	for _, make := range vectors {
		b, err := make().Encode()
		assert.NoError(f, err)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := receipt.Decode(b)
		if err != nil {
			return
		}
		again, err := r.Encode()
		assert.NoError(t, err)
		if !bytes.Equal(again, b) {
			t.Fatalf("two encodings of one receipt")
		}
		_, err = r.JSON()
		assert.NoError(t, err)
	})
}
