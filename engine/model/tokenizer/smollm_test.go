package tokenizer_test

import (
	"os"
	"slices"
	"strings"
	"testing"

	"bulkhead.dev/engine/model/tokenizer"
	"bulkhead.dev/infra/assert"
)

// smollm opens the tokenizer of SmolLM2-135M-Instruct.
func smollm(t testing.TB) *tokenizer.Tokenizer {
	t.Helper()
	path := os.Getenv("BULKHEAD_TEST_MODEL")
	if path == "" {
		assert.Skip(t, "BULKHEAD_TEST_MODEL names no SmolLM2 file")
	}
	return open(t, path)
}

func TestSmolLM(t *testing.T) {
	t.Parallel()
	tok := smollm(t)
	assert.Equal(t, tok.Size(), 49152)
	assert.False(t, tok.AddBOS())
	eos, ok := tok.EOS()
	assert.True(t, ok && eos == 2 && tok.IsEOG(2) && tok.IsControl(2))
	assert.True(t, tok.IsEOG(0)) // <|endoftext|>
	assert.True(t, slices.Contains(tok.Specials(), "<|im_end|>"))

	const chat = "<|im_start|>user\nHi<|im_end|>\n"
	ids := tok.Encode(nil, chat, tokenizer.Markup)
	assert.Equal(t, ids, []int32{1, 4093, 198, 26843, 2, 198})
	plain := tok.Encode(nil, chat, tokenizer.Plain)
	for _, id := range plain {
		assert.False(t, tok.IsControl(id))
	}
	assert.Equal(t, decode(tok, plain), chat)
	assert.Equal(t, decode(tok, ids), "user\nHi\n")

	// Digits stand alone, whatever is next to them.
	assert.Equal(t, pieces(tok, "x2024 and 7  8"), []string{"x", "2", "0", "2", "4", " and", " ", "7", "  ", "8"})
}

func decode(tok *tokenizer.Tokenizer, ids []int32) string {
	d := tok.NewDecoder()
	var s strings.Builder
	for _, id := range ids {
		s.WriteString(d.Push(id))
	}
	return s.String() + d.Flush()
}

func pieces(tok *tokenizer.Tokenizer, text string) []string {
	var out []string
	for _, id := range tok.Encode(nil, text, tokenizer.Plain) {
		out = append(out, string(tok.Piece(id)))
	}
	return out
}
