package tokenizer

import (
	"strings"
	"testing"

	"bulkhead.dev/infra/assert"
)

func TestWords(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		text string
		want map[string]string // words by kind, with | between them
	}{
		{"Hello world", map[string]string{"gpt-2": "Hello| world", "smollm": "Hello| world", "llama-bpe": "Hello| world", "qwen2": "Hello| world", "default": "Hello| world"}},
		{"it's IT'S we'll", map[string]string{"gpt-2": "it|'s| IT|'|S| we|'ll", "llama-bpe": "it|'s| IT|'S| we|'ll", "qwen2": "it|'s| IT|'S| we|'ll", "default": "it|'|s| IT|'|S| we|'|ll"}},
		{"a 12345 b", map[string]string{"gpt-2": "a| 12345| b", "smollm": "a| |1|2|3|4|5| b", "llama-bpe": "a| |123|45| b", "qwen2": "a| |1|2|3|4|5| b", "default": "a| |123|45| b"}},
		{"x\u0661\u0662\u00bd", map[string]string{"gpt-2": "x|\u0661\u0662\u00bd", "smollm": "x|\u0661|\u0662|\u00bd", "llama-bpe": "x|\u0661\u0662\u00bd", "qwen2": "x|\u0661|\u0662|\u00bd", "default": "x|\u0661\u0662\u00bd"}},
		{"a   b", map[string]string{"gpt-2": "a|  | b", "smollm": "a|  | b", "llama-bpe": "a|  | b", "qwen2": "a|  | b"}},
		{"a  1", map[string]string{"gpt-2": "a| | 1", "smollm": "a|  |1", "llama-bpe": "a| | |1"}},
		{"a\u3000\u3000b", map[string]string{"gpt-2": "a|\u3000|\u3000|b", "llama-bpe": "a|\u3000|\u3000b"}},
		{"a \n\n  b", map[string]string{"gpt-2": "a| \n\n | b", "llama-bpe": "a| \n\n| | b", "qwen2": "a| \n\n| | b"}},
		{"a  \n", map[string]string{"gpt-2": "a|  \n", "llama-bpe": "a|  \n"}},
		{"a  ", map[string]string{"gpt-2": "a|  ", "llama-bpe": "a|  "}},
		{"a\tb", map[string]string{"gpt-2": "a|\t|b", "llama-bpe": "a|\tb"}},
		{"f(x);\r\n\ny", map[string]string{"gpt-2": "f|(|x|);|\r\n|\n|y", "llama-bpe": "f|(x|);\r\n\n|y"}},
		{" !!?a", map[string]string{"gpt-2": " !!?|a", "llama-bpe": " !!?|a", "default": " |!!?|a"}},
		{"$5=<b>~", map[string]string{"default": "$|5|=<|b|>~"}},
		{"1234567", map[string]string{"default": "123|456|7", "llama-bpe": "123|456|7"}},
		{"\xffa\xff", map[string]string{"gpt-2": "\xff|a|\xff", "llama-bpe": "\xffa|\xff"}},
		{"e\u0301", map[string]string{"gpt-2": "e|\u0301", "qwen2": "e|\u0301"}},
	} {
		for kind, want := range c.want {
			var got []string
			words(preTokenizers[kind].split, c.text, func(w string) { got = append(got, w) })
			if strings.Join(got, "|") != want {
				t.Errorf("%s: %q gives %q, want %q", kind, c.text, strings.Join(got, "|"), want)
			}
		}
	}
}

func TestByteAlphabet(t *testing.T) {
	t.Parallel()
	assert.Equal(t, byteRune(' '), '\u0120')
	assert.Equal(t, byteRune('\n'), '\u010a')
	assert.Equal(t, byteRune(0xad), '\u0143')
	assert.Equal(t, len(runeBytes), 256)
	assert.Equal(t, string(fromAlphabet(nil, "\u0120\u00c3\u00a9\u4e2d")), " \u00e9\u4e2d")
}
