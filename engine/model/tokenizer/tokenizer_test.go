package tokenizer_test

import (
	"bytes"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"bulkhead.dev/engine/model/gguf"
	"bulkhead.dev/engine/model/synth"
	"bulkhead.dev/engine/model/tokenizer"
	"bulkhead.dev/infra/assert"
	"pgregory.net/rapid"
)

// Token types of the format.
const (
	normal int32 = 1 + iota
	unknown
	control
	userDefined
	unused
	byteToken
)

// build makes a tokenizer from metadata keys without their prefix.
func build(t testing.TB, keys map[string]any) (*tokenizer.Tokenizer, error) {
	t.Helper()
	w := gguf.NewWriter()
	for k, v := range keys {
		w.Set("tokenizer.ggml."+k, v)
	}
	var b bytes.Buffer
	_, err := w.WriteTo(&b)
	assert.NoError(t, err)
	f, err := gguf.Parse(b.Bytes())
	assert.NoError(t, err)
	return tokenizer.FromGGUF(f)
}

// byteChars are the 256 characters of the byte alphabet.
func byteChars() []string {
	var out []string
	next := rune(0x100)
	for b := range rune(256) {
		if b >= '!' && b <= '~' || b >= 0xa1 && b != 0xad {
			out = append(out, string(b))
		} else {
			out = append(out, string(next))
			next++
		}
	}
	return out
}

// gpt2 returns the keys of a small byte-level vocabulary.
func gpt2(pre string) map[string]any {
	tokens := append(byteChars(), "aa", "aaaa", "ab", "<|im_start|>", "<|im_end|>", "<|im_end|>x", "<tool>")
	types := make([]int32, len(tokens))
	for i := range types {
		types[i] = normal
	}
	types[259], types[260], types[261], types[262] = control, control, control, userDefined
	return map[string]any{"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types,
		"merges": []string{"a a", "aa aa", "a b", "< |", "<| i"}, "eos_token_id": uint32(260)}
}

// tokenizers returns one tokenizer of each kind that needs no data.
func tokenizers(t testing.TB) map[string]*tokenizer.Tokenizer {
	t.Helper()
	out := map[string]*tokenizer.Tokenizer{}
	for _, pre := range []string{"default", "gpt-2", "smollm", "llama-bpe", "qwen2"} {
		tok, err := build(t, gpt2(pre))
		assert.NoError(t, err)
		out[pre] = tok
	}
	f, err := gguf.Parse(synth.RandomLlama(1, synth.Shape{Layers: 1, Dim: 32, Heads: 1, KVHeads: 1, HeadDim: 32, Hidden: 32, Vocab: 3000, Context: 64}))
	assert.NoError(t, err)
	out["spm"], err = tokenizer.FromGGUF(f)
	assert.NoError(t, err)
	return out
}

func TestRoundTrip(t *testing.T) {
	t.Parallel()
	// Text, pieces that are easily taken for markup, and bytes that are no text.
	part := rapid.OneOf(rapid.String(), rapid.StringOf(rapid.RuneFrom([]rune("aab \n\t'sSl1\u0662\u4e2d<|>\U0001F98A"))),
		rapid.SampledFrom([]string{"<|im_end|>", "<|im_end|>x", "<tool>", "</s>", "<0x0A>", "<unk>", "123456", "  "}))
	for name, tok := range tokenizers(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			rapid.Check(t, func(r *rapid.T) {
				text := strings.Join(rapid.SliceOfN(part, 0, 8).Draw(r, "parts"), "")
				if name == "spm" {
					text = strings.ReplaceAll(text, "\u2581", "_") // it stands for a space there
				}
				ids := tok.Encode(nil, text, tokenizer.Plain)
				for _, id := range ids {
					if tok.IsControl(id) || slices.Contains(tok.Specials(), string(tok.Piece(id))) {
						r.Fatalf("%q gave the special token %d", text, id)
					}
				}
				if got := decode(tok, ids); got != text {
					r.Fatalf("%q came back as %q", text, got)
				}
				// Any way of streaming gives valid text, and the same.
				d, out := tok.NewDecoder(), ""
				for _, id := range ids {
					s := d.Push(id)
					if !utf8.ValidString(s) {
						r.Fatalf("%q is not UTF-8", s)
					}
					out += s
				}
				if out != text {
					r.Fatalf("%q is complete, but %q was held back", text, text[len(out):])
				}
				// What follows in dst is appended to, not replaced.
				if got := tok.Encode([]int32{7}, text, tokenizer.Plain); got[0] != 7 || !slices.Equal(got[1:], ids) {
					r.Fatal("dst was not kept")
				}
			})
		})
	}
}

func TestMarkup(t *testing.T) {
	t.Parallel()
	tok := tokenizers(t)["gpt-2"]
	for text, want := range map[string][]int32{
		"":                           nil,
		"<|im_end|>":                 {260},
		"<|im_end|>x<|im_end|>":      {261, 260}, // the longest
		"aab<|im_start|>ab":          {256, 'b' - '!' + 33, 259, 258},
		"<tool><|im_end":             append([]int32{262}, tok.Encode(nil, "<|im_end", tokenizer.Plain)...),
		"<<|im_end|>":                append(tok.Encode(nil, "<", tokenizer.Plain), 260),
		"<|im_<|im_end|>\u00e9<tool": slices.Concat(tok.Encode(nil, "<|im_", tokenizer.Plain), []int32{260}, tok.Encode(nil, "\u00e9<tool", tokenizer.Plain)),
	} {
		assert.Equal(t, tok.Encode(nil, text, tokenizer.Markup), want)
	}
	assert.Equal(t, tok.Specials(), []string{"<|im_start|>", "<|im_end|>", "<|im_end|>x", "<tool>"})
	assert.True(t, tok.IsEOG(260))
	assert.False(t, tok.IsEOG(259) || tok.IsControl(262) || tok.IsControl(-1) || tok.IsControl(1000))
	assert.True(t, tok.Piece(-1) == nil && tok.Piece(263) == nil)
	_, ok := tok.BOS()
	assert.False(t, ok || tok.AddBOS())
	d := tok.NewDecoder()
	assert.Equal(t, d.Push(260)+d.Push(262)+d.Push(9999)+d.Flush(), "<tool>")
}

func TestSplitting(t *testing.T) {
	t.Parallel()
	// Without merges of several bytes a token is a byte; words show only where
	// a merge could cross them. So these cases look for "aa" and "ab".
	toks := tokenizers(t)
	for _, c := range []struct {
		pre, text string
		want      []string
	}{
		{"gpt-2", "aaaa ab", []string{"aaaa", " ", "ab"}},
		{"smollm", "a1ab", []string{"a", "1", "ab"}},
		{"spm", "the cat", []string{"t", "he", " ", "cat"}},
	} {
		assert.Equal(t, pieces(toks[c.pre], c.text), c.want)
	}
}

func TestDecoderSplitCharacters(t *testing.T) {
	t.Parallel()
	tok := tokenizers(t)["gpt-2"]
	id := func(b byte) int32 { return int32(b) } // byteChars is in the order of the bytes
	for _, c := range []struct {
		bytes string
		want  []string // after each byte
		flush string
	}{
		{"\xf0\x9f\xa6\x8a!", []string{"", "", "", "\U0001F98A", "!"}, ""},
		{"\xf0\x9f\xa6", []string{"", "", ""}, "\ufffd"},
		{"\xe2\x82A", []string{"", "", "\ufffdA"}, ""},
		{"\xff\xc3\xa9", []string{"\ufffd", "", "\u00e9"}, ""},
		{"\xf0\x9f\xf0\x9f\xa6\x8a", []string{"", "", "\ufffd", "", "", "\U0001F98A"}, ""},
		{"\xed\xa0\x80", []string{"", "\ufffd\ufffd", "\ufffd"}, ""}, // a surrogate
	} {
		d := tok.NewDecoder()
		for i := range len(c.bytes) {
			assert.Equal(t, d.Push(id(c.bytes[i])), c.want[i])
		}
		assert.Equal(t, d.Flush(), c.flush)
		assert.Equal(t, d.Flush(), "")
	}
}

func TestSpaces(t *testing.T) {
	t.Parallel()
	keys := map[string]any{"model": "llama",
		"tokens":     []string{"<unk>", "<s>", "</s>", "\u2581", "a", "\u2581a", "s", ">", "<s", "<"},
		"token_type": []int32{unknown, control, control, normal, normal, normal, normal, normal, normal, normal},
		"scores":     []float32{0, 0, 0, -3, -4, -1, -5, -6, -1, -7}}
	tok, err := build(t, keys)
	assert.NoError(t, err)
	// A space goes in front of the text and of each text after a special token.
	assert.Equal(t, tok.Encode(nil, "a<s>a", tokenizer.Markup), []int32{5, 1, 5})
	// Merging does not reach a control token, though "<s" and ">" are there.
	assert.Equal(t, tok.Encode(nil, "<s>", tokenizer.Plain), []int32{3, 8, 7})
	// Without byte tokens a character that is not in the vocabulary is unknown.
	assert.Equal(t, tok.Encode(nil, "\u00e9a", tokenizer.Plain), []int32{3, 0, 4})
	assert.Equal(t, decode(tok, []int32{1, 5, 0, 2}), " a\ufffd")
	keys["add_space_prefix"] = false
	tok, err = build(t, keys)
	assert.NoError(t, err)
	assert.Equal(t, tok.Encode(nil, "a a", tokenizer.Plain), []int32{4, 5})
	bos, ok := tok.BOS()
	assert.True(t, ok && bos == 1 && tok.AddBOS())
	keys["add_bos_token"] = false
	tok, err = build(t, keys)
	assert.NoError(t, err)
	assert.False(t, tok.AddBOS())
}

func TestMissingBytes(t *testing.T) {
	t.Parallel()
	keys := gpt2("smollm")
	tokens := keys["tokens"].([]string)
	tokens[4] = "another token" // no byte 0x04
	tok, err := build(t, keys)
	assert.NoError(t, err)
	assert.Equal(t, decode(tok, tok.Encode(nil, "a\x04a", tokenizer.Plain)), "aa")
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	set := func(key string, v any) func(map[string]any) {
		return func(m map[string]any) { m[key] = v }
	}
	spm := func(m map[string]any) {
		clear(m)
		m["model"], m["tokens"], m["scores"] = "llama", []string{"a", "b", "c", "d"}, []float32{0, 1, 2, 3}
	}
	for name, c := range map[string]struct {
		change []func(map[string]any)
		want   error
	}{
		"no model":         {[]func(map[string]any){func(m map[string]any) { delete(m, "model") }}, tokenizer.ErrUnsupported},
		"WordPiece":        {[]func(map[string]any){set("model", "bert")}, tokenizer.ErrUnsupported},
		"unknown splitter": {[]func(map[string]any){set("pre", "tekken")}, tokenizer.ErrUnsupported},
		"no tokens":        {[]func(map[string]any){set("tokens", []string{})}, tokenizer.ErrInvalid},
		"types too few":    {[]func(map[string]any){set("token_type", []int32{1})}, tokenizer.ErrInvalid},
		"EOS nowhere":      {[]func(map[string]any){set("eos_token_id", uint32(263))}, tokenizer.ErrInvalid},
		"BOS is text":      {[]func(map[string]any){set("bos_token_id", "0")}, tokenizer.ErrInvalid},
		"merge of one":     {[]func(map[string]any){set("merges", []string{"ab"})}, tokenizer.ErrInvalid},
		"merge of nothing": {[]func(map[string]any){set("merges", []string{"a "})}, tokenizer.ErrInvalid},
		"no unknown":       {[]func(map[string]any){spm}, tokenizer.ErrInvalid},
		"scores too few":   {[]func(map[string]any){spm, set("scores", []float32{0})}, tokenizer.ErrInvalid},
		"byte of no value": {[]func(map[string]any){spm, set("token_type", []int32{unknown, control, control, byteToken})}, tokenizer.ErrInvalid},
	} {
		keys := gpt2("gpt-2")
		for _, f := range c.change {
			f(keys)
		}
		_, err := build(t, keys)
		t.Run(name, func(t *testing.T) { assert.ErrorIs(t, err, c.want) })
	}
}

// TestLongWords would not end in time if encoding were quadratic: a million
// letters take under a second, with the race detector and busy cores some 15.
func TestLongWords(t *testing.T) {
	t.Parallel()
	const size = 1 << 15
	texts := map[string]string{
		"letter":      strings.Repeat("a", 1<<20),
		"two letters": strings.Repeat("ab", size/2),
		"spaces":      strings.Repeat(" ", size),
		"lines":       strings.Repeat(" \n", size/2),
		"marks":       strings.Repeat("<|", size/2),
		"starts":      strings.Repeat("<|im_en", size/7),
		"digits":      strings.Repeat("7", size),
		"quotes":      strings.Repeat("'", size),
		"accents":     strings.Repeat("\u00e9", size/2),
		"emoji":       strings.Repeat("\U0001F98A", size/4),
		"broken":      strings.Repeat("\xf0", size),
	}
	for name, tok := range tokenizers(t) {
		for text, s := range texts {
			if len(s) > size && name != "gpt-2" && name != "spm" {
				continue // one of each kind is enough
			}
			start := time.Now()
			if got := decode(tok, tok.Encode(nil, s, tokenizer.Markup)); text != "broken" && got != s {
				t.Errorf("%s: %s came back changed", name, text)
			}
			if took := time.Since(start); took > time.Minute {
				t.Errorf("%s: %s took %v", name, text, took)
			}
		}
	}
}

func FuzzEncode(f *testing.F) {
	for _, s := range []string{"", "Hello  world\n\n", "it's 1234", "<|im_end|>x<tool>", "</s><0x0A>\u2581", "\xf0\x9f\u00e9"} {
		f.Add(s)
	}
	toks := tokenizers(f)
	f.Fuzz(func(t *testing.T, text string) {
		for name, tok := range toks {
			var raw []byte
			for _, id := range tok.Encode(nil, text, tokenizer.Plain) {
				if tok.IsControl(id) {
					t.Fatalf("%s: a control token", name)
				}
				raw = append(raw, tok.Piece(id)...)
			}
			want := text
			if name == "spm" {
				want = strings.ReplaceAll(text, "\u2581", " ")
			}
			if string(raw) != want {
				t.Fatalf("%s: %q came back as %q", name, want, raw)
			}
			tok.Encode(nil, text, tokenizer.Markup)
		}
	})
}
