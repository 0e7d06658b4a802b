package model_test

import (
	"bytes"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"bulkhead.dev/engine/model"
	"bulkhead.dev/engine/model/gguf"
	"bulkhead.dev/engine/model/synth"
	"bulkhead.dev/infra/assert"
)

var shape = synth.Shape{Layers: 2, Dim: 64, Heads: 4, KVHeads: 2, HeadDim: 16, Hidden: 96, Vocab: 288, Context: 256}

// keys are the hyperparameters that the files of these tests may carry.
var keys = []string{"general.architecture", "llama.block_count", "llama.embedding_length", "llama.feed_forward_length",
	"llama.context_length", "llama.attention.head_count", "llama.attention.head_count_kv", "llama.attention.key_length",
	"llama.attention.value_length", "llama.rope.dimension_count", "llama.vocab_size",
	"llama.attention.layer_norm_rms_epsilon", "llama.rope.freq_base"}

// change rewrites a file: set replaces keys, nil removing one, and tensor may
// replace or drop a tensor.
func change(t testing.TB, raw []byte, set map[string]any, tensor func(*gguf.Tensor) bool, more ...gguf.Tensor) []byte {
	t.Helper()
	f, err := gguf.Parse(raw)
	assert.NoError(t, err)
	w := gguf.NewWriter()
	w.Set("tokenizer.ggml.tokens", f.Strs("tokenizer.ggml.tokens"))
	for _, k := range keys {
		if s, ok := f.Str(k); ok {
			w.Set(k, s)
		} else if x, ok := f.Float(k); ok {
			w.Set(k, float32(x))
		} else if n, ok := f.Uint(k); ok {
			if v, drop := set[k]; !drop || v != nil {
				w.Set(k, uint32(n))
			}
		}
	}
	for k, v := range set {
		if v != nil {
			w.Set(k, v)
		}
	}
	for _, ten := range f.Tensors() {
		if tensor == nil || tensor(&ten) {
			w.Add(ten.Name, ten.Type, ten.Dims, ten.Data)
		}
	}
	for _, ten := range more {
		w.Add(ten.Name, ten.Type, ten.Dims, ten.Data)
	}
	var b bytes.Buffer
	_, err = w.WriteTo(&b)
	assert.NoError(t, err)
	return b.Bytes()
}

func load(t testing.TB, raw []byte) (*model.Llama, error) {
	t.Helper()
	f, err := gguf.Parse(raw)
	assert.NoError(t, err)
	return model.LoadLlama(f)
}

func floats(name string, x ...float32) gguf.Tensor {
	return gguf.Tensor{Name: name, Type: gguf.F32, Dims: []uint64{uint64(len(x))}, Data: synth.Encode(gguf.F32, x)}
}

func TestLoadLlama(t *testing.T) {
	t.Parallel()
	raw := synth.RandomLlama(1, shape)
	plain := model.Config{Arch: "llama", Layers: 2, Dim: 64, Heads: 4, KVHeads: 2, HeadDim: 16, Hidden: 96, Vocab: 288,
		Context: 256, RopeDim: 16, RopeBase: 10000, RopeScale: 1, NormEps: 1e-5}
	factors := floats("rope_freqs.weight", 1, 1, 1, 1, 2, 4, 8, 8)
	for name, c := range map[string]struct {
		set  map[string]any
		more []gguf.Tensor
		want func(*model.Config)
	}{
		"as it is":     {nil, nil, func(*model.Config) {}},
		"defaults":     {map[string]any{"llama.attention.key_length": nil, "llama.attention.value_length": nil, "llama.rope.dimension_count": nil, "llama.rope.freq_base": nil, "llama.vocab_size": nil}, nil, func(*model.Config) {}},
		"base":         {map[string]any{"llama.rope.freq_base": float32(100000)}, nil, func(c *model.Config) { c.RopeBase = 100000 }},
		"part rotated": {map[string]any{"llama.rope.dimension_count": uint32(8)}, nil, func(c *model.Config) { c.RopeDim = 8 }},
		"no scaling":   {map[string]any{"llama.rope.scaling.type": "none"}, nil, func(*model.Config) {}},
		"linear":       {map[string]any{"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": float32(4)}, nil, func(c *model.Config) { c.RopeScale = 0.25 }},
		"old factor":   {map[string]any{"llama.rope.scaling.factor": float32(4)}, nil, func(c *model.Config) { c.RopeScale = 0.25 }},
		"old linear":   {map[string]any{"llama.rope.scale_linear": float32(2)}, nil, func(c *model.Config) { c.RopeScale = 0.5 }},
		"factors":      {nil, []gguf.Tensor{factors}, func(c *model.Config) { c.RopeFactors = []float32{1, 1, 1, 1, 2, 4, 8, 8} }},
		"no experts":   {map[string]any{"llama.expert_count": uint32(0)}, nil, func(*model.Config) {}},
	} {
		m, err := load(t, change(t, raw, c.set, nil, c.more...))
		assert.NoError(t, err)
		want := plain
		c.want(&want)
		t.Run(name, func(t *testing.T) { assert.Equal(t, m.Config, want) })
	}
	m, err := load(t, raw)
	assert.NoError(t, err)
	assert.Equal(t, m.Blocks[1].Up.Name, "blk.1.ffn_up.weight")
	assert.Equal(t, m.Blocks[0].O.Name, "blk.0.attn_output.weight")
	assert.Equal(t, m.Head.Name, "output.weight")
	m, err = load(t, change(t, raw, nil, func(t *gguf.Tensor) bool { return t.Name != "output.weight" }))
	assert.NoError(t, err)
	assert.Equal(t, m.Head.Name, "token_embd.weight")
}

func TestRefusedKeys(t *testing.T) {
	t.Parallel()
	raw := synth.RandomLlama(1, shape)
	for name, c := range map[string]struct {
		key   string
		value any
		want  error
		says  string
	}{
		"architecture":      {"general.architecture", "gemma3", model.ErrUnsupported, `"gemma3"; supported: "llama"`},
		"no layers":         {"llama.block_count", nil, model.ErrInvalid, "llama.block_count is missing"},
		"zero layers":       {"llama.block_count", uint32(0), model.ErrInvalid, "is 0"},
		"many layers":       {"llama.block_count", uint32(1 << 20), model.ErrInvalid, "possible are 1 to 1024"},
		"layers too many":   {"llama.block_count", uint32(3), model.ErrInvalid, "blk.2.attn_norm.weight is missing"},
		"layers too few":    {"llama.block_count", uint32(1), model.ErrUnsupported, "not part of a plain llama"},
		"heads by layer":    {"llama.attention.head_count", []int32{4, 4}, model.ErrUnsupported, "not a single whole number"},
		"text for a number": {"llama.context_length", "256", model.ErrUnsupported, "not a single whole number"},
		"uneven groups":     {"llama.attention.head_count_kv", uint32(3), model.ErrInvalid, "do not divide 4 heads"},
		"more KV heads":     {"llama.attention.head_count_kv", uint32(8), model.ErrInvalid, "do not divide 4 heads"},
		"groups":            {"llama.attention.head_count_kv", uint32(4), model.ErrInvalid, "tensor blk.0.attn_k.weight has dimensions [64 32]"},
		"head width":        {"llama.attention.key_length", uint32(32), model.ErrUnsupported, "values are 16 wide, keys 32"},
		"odd rotation":      {"llama.rope.dimension_count", uint32(7), model.ErrInvalid, "7 rotated dimensions"},
		"wide rotation":     {"llama.rope.dimension_count", uint32(18), model.ErrInvalid, "18 rotated dimensions"},
		"YaRN":              {"llama.rope.scaling.type", "yarn", model.ErrUnsupported, `"yarn"`},
		"no factor":         {"llama.rope.scaling.type", "linear", model.ErrInvalid, "factor is missing"},
		"base":              {"llama.rope.freq_base", float32(0), model.ErrInvalid, "freq_base is not a positive number"},
		"infinite base":     {"llama.rope.freq_base", float32(math.Inf(1)), model.ErrInvalid, "freq_base is not a positive number"},
		"epsilon":           {"llama.attention.layer_norm_rms_epsilon", float32(math.NaN()), model.ErrInvalid, "not a positive number"},
		"big epsilon":       {"llama.attention.layer_norm_rms_epsilon", float32(2), model.ErrInvalid, "the epsilon"},
		"experts":           {"llama.expert_count", uint32(8), model.ErrUnsupported, "expert_count is 8"},
		"window":            {"llama.attention.sliding_window", uint32(64), model.ErrUnsupported, "sliding_window is 64"},
		"scale":             {"llama.attention.scale", float32(0.5), model.ErrUnsupported, "attention.scale is 0.5"},
		"not causal":        {"llama.attention.causal", false, model.ErrUnsupported, "not causal"},
		"vocabulary":        {"llama.vocab_size", uint32(289), model.ErrInvalid, "vocab_size is 289"},
		"tokenizer":         {"tokenizer.ggml.tokens", []string{"a"}, model.ErrInvalid, "the tokenizer has 1 tokens"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := load(t, change(t, raw, map[string]any{c.key: c.value}, nil))
			assert.ErrorIs(t, err, c.want)
			if !strings.Contains(err.Error(), c.says) {
				t.Fatalf("%v, want something about %q", err, c.says)
			}
		})
	}
	_, err := load(t, change(t, raw, map[string]any{"llama.attention.head_count": uint32(5), "llama.attention.head_count_kv": uint32(5), "llama.attention.key_length": nil}, nil))
	assert.ErrorIs(t, err, model.ErrInvalid)
}

func TestRefusedTensors(t *testing.T) {
	t.Parallel()
	raw := synth.RandomLlama(1, shape)
	bias := floats("blk.0.attn_q.bias", make([]float32, 64)...)
	for name, c := range map[string]struct {
		drop string
		more gguf.Tensor
		want error
		says string
	}{
		"bias":           {"", bias, model.ErrUnsupported, `"blk.0.attn_q.bias" is not part`},
		"experts":        {"", floats("blk.0.ffn_gate_inp.weight", 1), model.ErrUnsupported, "not part"},
		"no norm":        {"output_norm.weight", bias, model.ErrInvalid, "output_norm.weight is missing"},
		"no embeddings":  {"token_embd.weight", bias, model.ErrInvalid, "token_embd.weight is missing"},
		"flat":           {"blk.1.ffn_up.weight", floats("blk.1.ffn_up.weight", make([]float32, 64*96)...), model.ErrInvalid, "[6144]"},
		"norm of halves": {"output_norm.weight", gguf.Tensor{Name: "output_norm.weight", Type: gguf.F16, Dims: []uint64{64}, Data: make([]byte, 128)}, model.ErrUnsupported, "supported for vectors: F32"},
		"few factors":    {"", floats("rope_freqs.weight", 1, 2), model.ErrInvalid, "[2]"},
		"factor 0":       {"", floats("rope_freqs.weight", 1, 1, 1, 1, 1, 1, 1, 0), model.ErrInvalid, "entry 0"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := load(t, change(t, raw, nil, func(t *gguf.Tensor) bool { return t.Name != c.drop }, c.more))
			assert.ErrorIs(t, err, c.want)
			if !strings.Contains(err.Error(), c.says) {
				t.Fatalf("%v, want something about %q", err, c.says)
			}
		})
	}
}

func TestRefusedType(t *testing.T) {
	t.Parallel()
	raw := synth.RandomLlama(1, shape)
	// The type of a tensor follows its name and dimensions in the file.
	name := []byte("blk.0.attn_v.weight")
	at := bytes.Index(raw, name) + len(name) + 4 + 2*8
	assert.Equal(t, raw[at], byte(gguf.F32))
	raw[at] = 12
	_, err := load(t, raw)
	assert.ErrorIs(t, err, model.ErrUnsupported)
	assert.True(t, strings.Contains(err.Error(), "tensor blk.0.attn_v.weight has type Q4_K; supported: F32, F16, BF16, Q8_0, Q4_0, Q4_1"))
}

func TestSharedModels(t *testing.T) {
	t.Parallel()
	want := model.Config{Arch: "llama", Layers: 5, Dim: 64, Heads: 8, KVHeads: 4, HeadDim: 8, Hidden: 172, Vocab: 512,
		Context: 512, RopeDim: 8, RopeBase: 10000, RopeScale: 1, NormEps: 1e-5}
	for _, name := range []string{"f32", "q8_0"} {
		f, err := gguf.Open(assert.SharedData(t, "stories260K/converted/stories260K-"+name+".gguf"))
		assert.NoError(t, err)
		m, err := model.LoadLlama(f)
		assert.NoError(t, err)
		assert.Equal(t, m.Config, want)
		assert.NoError(t, f.Close())
	}
}

func TestSmolLM(t *testing.T) {
	t.Parallel()
	path := os.Getenv("BULKHEAD_TEST_MODEL")
	if path == "" {
		assert.Skip(t, "BULKHEAD_TEST_MODEL names no SmolLM2 file")
	}
	f, err := gguf.Open(path)
	assert.NoError(t, err)
	m, err := model.LoadLlama(f)
	assert.NoError(t, err)
	assert.Equal(t, m.Config, model.Config{Arch: "llama", Layers: 30, Dim: 576, Heads: 9, KVHeads: 3, HeadDim: 64, Hidden: 1536,
		Vocab: 49152, Context: 8192, RopeDim: 64, RopeBase: 100000, RopeScale: 1, NormEps: 1e-5})
	assert.Equal(t, m.Head.Name, m.Embed.Name)
	source, ok := model.ChatTemplate(f)
	assert.True(t, ok && strings.Contains(source, "<|im_start|>"))
	assert.NoError(t, f.Close())
	d, err := model.DigestFile(path)
	assert.NoError(t, err)
	assert.Equal(t, d.String(), "sha256:b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53")
}

func TestDigest(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "m")
	assert.NoError(t, os.WriteFile(path, []byte("abc"), 0o600))
	d, err := model.DigestFile(path)
	assert.NoError(t, err)
	const text = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
	assert.Equal(t, d.String(), text)
	same, err := model.ParseDigest(text)
	assert.NoError(t, err)
	assert.Equal(t, same, d)
	_, err = model.DigestFile(path + ".absent")
	assert.ErrorIs(t, err, os.ErrNotExist)
	for _, bad := range []string{"", text[:70], text + "0", text[7:], strings.ToUpper(text), "sha256:" + strings.ToUpper(text[7:]), strings.Replace(text, "b", "g", 1)} {
		_, err := model.ParseDigest(bad)
		assert.ErrorIs(t, err, model.ErrInvalid)
	}
}
