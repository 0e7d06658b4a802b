package chat

import (
	"context"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"bulkhead.dev/engine/model/tokenizer"
	"bulkhead.dev/infra/assert"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// noon is the time of the golden renders.
var noon = time.Date(2024, time.July, 26, 12, 0, 0, 0, time.UTC)

// firstSpecial is the id of the first special token of a triples vocabulary.
const firstSpecial = 1 << 28

// triples is a vocabulary whose ids stand for three bytes of text, or less at
// the end of a text. So text has other ids when it is cut at other places, and
// every sequence of ids can be turned back into its text.
type triples struct {
	specials []string
	bos, eos string // specials, or empty
	addBOS   bool
}

func (v *triples) Specials() []string { return v.specials }
func (v *triples) AddBOS() bool       { return v.addBOS }
func (v *triples) BOS() (int32, bool) { return v.id(v.bos) }
func (v *triples) EOS() (int32, bool) { return v.id(v.eos) }

func (v *triples) id(special string) (int32, bool) {
	i := slices.Index(v.specials, special)
	return int32(firstSpecial + i), i >= 0
}

func (v *triples) Piece(id int32) []byte {
	if id >= firstSpecial {
		return []byte(v.specials[id-firstSpecial])
	}
	n := id >> 24
	return []byte{byte(id >> 16), byte(id >> 8), byte(id)}[:n]
}

func (v *triples) Encode(dst []int32, text string, mode tokenizer.Mode) []int32 {
	from := 0
	for at := 0; at < len(text) && mode == tokenizer.Markup; {
		longest := ""
		for _, s := range v.specials {
			if strings.HasPrefix(text[at:], s) && len(s) > len(longest) {
				longest = s
			}
		}
		if longest == "" {
			at++
			continue
		}
		id, _ := v.id(longest)
		dst = append(v.text(dst, text[from:at]), id)
		at += len(longest)
		from = at
	}
	return v.text(dst, text[from:])
}

func (v *triples) text(dst []int32, text string) []int32 {
	for len(text) > 0 {
		n := min(3, len(text))
		id := int32(n) << 24
		for i := range n {
			id |= int32(text[i]) << (16 - 8*i)
		}
		dst, text = append(dst, id), text[n:]
	}
	return dst
}

func (v *triples) decode(ids []int32) string {
	var b strings.Builder
	for _, id := range ids {
		b.Write(v.Piece(id))
	}
	return b.String()
}

// control returns the special tokens among ids.
func (v *triples) control(ids []int32) []int32 {
	return slices.DeleteFunc(slices.Clone(ids), func(id int32) bool { return id < firstSpecial })
}

// chatML is the template of SmolLM2 with a vocabulary for it.
func chatML(t testing.TB) (string, *triples) {
	t.Helper()
	src, err := os.ReadFile("testdata/smollm2-instruct.jinja")
	assert.NoError(t, err)
	return string(src), &triples{
		specials: []string{"<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<|im", "\n\n"},
		bos:      "<|im_start|>", eos: "<|im_end|>",
	}
}

// mustNew makes a template that is closed at the end of the test.
func mustNew(t testing.TB, src string, tok Vocabulary, opts Options) *Template {
	t.Helper()
	tpl, err := New(context.Background(), src, tok, opts)
	assert.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, tpl.Close()) })
	return tpl
}
