package tokenizer_test

import (
	"encoding/json"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"bulkhead.dev/engine/model/gguf"
	"bulkhead.dev/engine/model/tokenizer"
	"bulkhead.dev/infra/assert"
)

// open reads the tokenizer of a GGUF file.
func open(t testing.TB, path string) *tokenizer.Tokenizer {
	t.Helper()
	f, err := gguf.Open(path)
	assert.NoError(t, err)
	tok, err := tokenizer.FromGGUF(f)
	assert.NoError(t, err)
	assert.NoError(t, f.Close())
	return tok
}

// vectors returns the texts and ids that llama.cpp tests a vocabulary with.
func vectors(t testing.TB, name string) (texts []string, ids [][]int32) {
	t.Helper()
	in, err := os.ReadFile(assert.SharedData(t, "llama.cpp-vocab/ggml-vocab-"+name+".gguf.inp"))
	assert.NoError(t, err)
	out, err := os.ReadFile(assert.SharedData(t, "llama.cpp-vocab/ggml-vocab-"+name+".gguf.out"))
	assert.NoError(t, err)
	texts = strings.Split(strings.TrimSuffix(string(in), "\n__ggml_vocab_test__\n"), "\n__ggml_vocab_test__\n")
	for line := range strings.Lines(string(out)) {
		row := []int32{}
		for _, field := range strings.Fields(line) {
			n, err := strconv.Atoi(field)
			assert.NoError(t, err)
			row = append(row, int32(n))
		}
		ids = append(ids, row)
	}
	assert.Equal(t, len(texts), len(ids))
	return texts, ids
}

func TestLlamaCppVectors(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"gpt-2", "llama-spm", "phi-3"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tok := open(t, assert.SharedData(t, "llama.cpp-vocab/ggml-vocab-"+name+".gguf"))
			texts, ids := vectors(t, name)
			for i, text := range texts {
				if got := tok.Encode([]int32{}, text, tokenizer.Plain); !equal(got, ids[i]) {
					t.Errorf("%q:\n got %v\nwant %v", text, got, ids[i])
				}
			}
		})
	}
}

func equal(a, b []int32) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i] != b[i] {
			return false
		}
	}
	return true
}

func TestGoldenPrompts(t *testing.T) {
	t.Parallel()
	raw, err := os.ReadFile(assert.SharedData(t, "stories260K/golden_llamacpp.json"))
	assert.NoError(t, err)
	var golden struct {
		Runs []struct {
			Model  string
			Prompt string
			IDs    []int32 `json:"prompt_ids"`
			Greedy []int32 `json:"greedy_ids"`
			Text   string
		}
	}
	assert.NoError(t, json.Unmarshal(raw, &golden))
	assert.Equal(t, len(golden.Runs), 14)
	for _, run := range golden.Runs {
		tok := open(t, assert.SharedData(t, "stories260K/converted/"+run.Model))
		assert.True(t, tok.AddBOS())
		bos, ok := tok.BOS()
		assert.True(t, ok)
		assert.Equal(t, tok.Encode([]int32{bos}, run.Prompt, tokenizer.Plain), run.IDs)
		d, text := tok.NewDecoder(), ""
		for _, id := range run.Greedy {
			text += d.Push(id)
		}
		text += d.Flush()
		if run.Prompt == "" {
			// The golden text begins the sequence there, so its detokenizer
			// strips the space that the encoder would add.
			text = strings.TrimPrefix(text, " ")
		}
		assert.Equal(t, text, run.Text)
	}
}

func TestSwiftGPT2Vector(t *testing.T) {
	t.Parallel()
	raw, err := os.ReadFile(assert.SharedData(t, "tokenizer-vectors/swift_gpt2_encoded_tokens.json"))
	assert.NoError(t, err)
	var v struct {
		Text string
		IDs  []int32 `json:"token_ids"`
	}
	assert.NoError(t, json.Unmarshal(raw, &v))
	assert.True(t, len(v.IDs) > 100)
	tok := open(t, assert.SharedData(t, "llama.cpp-vocab/ggml-vocab-gpt-2.gguf"))
	assert.Equal(t, tok.Encode(nil, v.Text, tokenizer.Plain), v.IDs)
}

// hfStrings returns the texts that the vectors of tokenizers.js name, as
// "GROUP.NAME".
func hfStrings(t testing.TB) map[string]string {
	t.Helper()
	src, err := os.ReadFile(assert.SharedData(t, "tokenizer-vectors/hf_test_strings_constants.ts"))
	assert.NoError(t, err)
	group, out := "", map[string]string{}
	start := regexp.MustCompile(`^export const (\w+) = `)
	entry := regexp.MustCompile(`^\s+(\w+):\s*(".*"),`)
	for line := range strings.Lines(string(src)) {
		if m := start.FindStringSubmatch(line); m != nil {
			group = m[1]
		}
		if m := entry.FindStringSubmatch(line); m != nil {
			var text string
			if json.Unmarshal([]byte(m[2]), &text) == nil {
				out[group+"."+m[1]] = text
			}
		}
	}
	return out
}

func TestHuggingFaceVectors(t *testing.T) {
	t.Parallel()
	texts := hfStrings(t)
	entry := regexp.MustCompile(`text: (\w+\.\w+),\s+tokens: .*\s+ids: \[([^\]]*)\]`)
	for _, c := range []struct {
		file, section, vocab string
		bos                  []int32
		min                  int // entries that must be found
	}{
		{"gpt2", `"Xenova/gpt2"`, "gpt-2", nil, 26},
		{"llama", `"Xenova/llama-tokenizer"`, "llama-spm", []int32{1}, 26},
	} {
		tok := open(t, assert.SharedData(t, "llama.cpp-vocab/ggml-vocab-"+c.vocab+".gguf"))
		src, err := os.ReadFile(assert.SharedData(t, "tokenizer-vectors/hf_test_tokenization_"+c.file+".ts"))
		assert.NoError(t, err)
		_, section, _ := strings.Cut(string(src), c.section+": {")
		section, _, _ = strings.Cut(section, "\n  },")
		n := 0
		for _, m := range entry.FindAllStringSubmatch(section, -1) {
			text, ok := texts[m[1]]
			if !ok {
				continue
			}
			var want []int32
			assert.NoError(t, json.Unmarshal([]byte("["+m[2]+"]"), &want))
			n++
			if got := tok.Encode(c.bos[:len(c.bos):len(c.bos)], text, tokenizer.Plain); !equal(got, want) {
				t.Errorf("%s %s %q:\n got %v\nwant %v", c.vocab, m[1], text, got, want)
			}
		}
		if n < c.min {
			t.Errorf("%s: only %d vectors were found", c.vocab, n)
		}
	}
}
