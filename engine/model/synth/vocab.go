package synth

import (
	"bytes"
	"fmt"
	"strings"

	"bulkhead.dev/engine/model/gguf"
)

// The tokens that every model of this package has. From FirstByte on, each
// byte has a token; a space is always encoded as Space. MinVocab is the number
// of these tokens.
const (
	UNK       = 0   // unknown; never needed, since there are all bytes
	BOS       = 1   // begins a sequence
	EOS       = 2   // ends a sequence
	FirstByte = 3   // byte b is token FirstByte+b
	Space     = 259 // U+2581, the space of SentencePiece
	TurnStart = 260 // <|im_start|>
	TurnEnd   = 261 // <|im_end|>, ends a generation
	MinVocab  = 262
)

// Token types as SentencePiece numbers them.
const (
	typeNormal  int32 = 1
	typeUnknown int32 = 2
	typeControl int32 = 3
	typeByte    int32 = 6
)

// chatTemplate is the usual template of turns.
const chatTemplate = `{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}`

// printable is the number of characters that have a token of their own.
const printable = '~' - '!' + 1

// beginnings returns words and all their beginnings of two characters and more,
// each once, with spaces as tokens have them.
func beginnings(words []string) []string {
	var out []string
	seen := map[string]bool{}
	for _, word := range words {
		runes := []rune(strings.ReplaceAll(word, " ", "\u2581"))
		for n := 2; n <= len(runes); n++ {
			if s := string(runes[:n]); !seen[s] {
				seen[s] = true
				out = append(out, s)
			}
		}
	}
	return out
}

// setVocab writes a tokenizer of n tokens: the fixed ones, then printable
// characters, then the words given, then words of two and more letters.
func setVocab(w *gguf.Writer, n int, template string, words []string) {
	texts, types := []string{"<unk>", "<s>", "</s>"}, []int32{typeUnknown, typeControl, typeControl}
	for b := range 256 {
		texts, types = append(texts, fmt.Sprintf("<0x%02X>", b)), append(types, typeByte)
	}
	texts = append(texts, "\u2581", "<|im_start|>", "<|im_end|>")
	types = append(types, typeNormal, typeControl, typeControl)
	for c := '!'; c <= '~' && len(texts) < n; c++ {
		texts = append(texts, string(c))
	}
	texts = append(texts, words...)
	// Each word extends one that is there, so that merging can reach it.
	for level := []string{""}; len(texts) < n; {
		var longer []string
		for _, s := range level {
			for c := 'a'; c <= 'z'; c++ {
				longer = append(longer, s+string(c))
			}
		}
		if level = longer; len(longer) > 26 {
			texts = append(texts, longer[:min(len(longer), n-len(texts))]...)
		}
	}
	scores := make([]float32, len(texts))
	for i := range texts {
		if i >= len(types) {
			types = append(types, typeNormal)
		}
		scores[i] = -float32(i)
	}
	w.Set("tokenizer.ggml.model", "llama")
	w.Set("tokenizer.ggml.tokens", texts)
	w.Set("tokenizer.ggml.token_type", types)
	w.Set("tokenizer.ggml.scores", scores)
	w.Set("tokenizer.ggml.bos_token_id", uint32(BOS))
	w.Set("tokenizer.ggml.eos_token_id", uint32(EOS))
	w.Set("tokenizer.ggml.unknown_token_id", uint32(UNK))
	w.Set("tokenizer.ggml.add_bos_token", true)
	w.Set("tokenizer.ggml.add_space_prefix", false)
	w.Set("tokenizer.chat_template", template)
}

// setShape writes the hyperparameters.
func setShape(w *gguf.Writer, name string, s Shape) {
	w.Set("general.architecture", "llama")
	w.Set("general.name", name)
	for _, p := range []struct {
		key   string
		value int
	}{
		{"block_count", s.Layers}, {"embedding_length", s.Dim}, {"feed_forward_length", s.Hidden},
		{"context_length", s.Context}, {"attention.head_count", s.Heads}, {"attention.head_count_kv", s.KVHeads},
		{"attention.key_length", s.HeadDim}, {"attention.value_length", s.HeadDim},
		{"rope.dimension_count", s.HeadDim}, {"vocab_size", s.Vocab},
	} {
		w.Set("llama."+p.key, uint32(p.value))
	}
	w.Set("llama.attention.layer_norm_rms_epsilon", float32(normEps))
	w.Set("llama.rope.freq_base", float32(ropeBase))
}

const (
	// normEps is the usual epsilon of the norms.
	normEps = 1e-5
	// ropeBase is the usual rotary base.
	ropeBase = 10000
)

// file returns the bytes of a file. The writer fails only when a generator is
// wrong, which is a bug of this package.
func file(w *gguf.Writer) []byte {
	var b bytes.Buffer
	if _, err := w.WriteTo(&b); err != nil {
		panic("synth: " + err.Error())
	}
	return b.Bytes()
}
