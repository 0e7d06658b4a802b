package chat

import (
	"context"
	"encoding/json"
	"os"
	"regexp"
	"slices"
	"testing"

	"bulkhead.dev/engine/model"
	"bulkhead.dev/engine/model/gguf"
	"bulkhead.dev/engine/model/synth"
	"bulkhead.dev/engine/model/tokenizer"
	"bulkhead.dev/infra/assert"
)

// golden are renders by jinja2 3.1.6 with the settings of Hugging Face's
// apply_chat_template: trim_blocks, lstrip_blocks, loop controls, its tojson,
// tools and documents None, the time 2024-07-26 12:00. A null is a conversation
// that the template refuses.
type golden struct {
	Conversations map[string][]Message
	Templates     []struct {
		Name, BOS, EOS string
		Want           map[string]*string
	}
}

func readGolden(t testing.TB) golden {
	t.Helper()
	b, err := os.ReadFile("testdata/golden.json")
	assert.NoError(t, err)
	var g golden
	assert.NoError(t, json.Unmarshal(b, &g))
	return g
}

// markupOf finds texts that look like special tokens in a template.
var markupOf = regexp.MustCompile(`<\|?[a-zA-Z_/][a-zA-Z_0-9]*\|?>|<｜[^｜]*｜>|\[/?[A-Z_]+\]`)

// shape is that of the smallest synthetic model.
var shape = synth.Shape{Layers: 1, Dim: 32, Heads: 2, KVHeads: 1, HeadDim: 16, Hidden: 32, Vocab: 300, Context: 64, Type: gguf.F32}

func source(t testing.TB, name string) string {
	t.Helper()
	switch name {
	case "SmolLM2":
		src, _ := chatML(t)
		return src
	case "synthetic-turns":
		return ggufTemplate(t, synth.RandomLlama(1, shape))
	case "synthetic-copy":
		return ggufTemplate(t, synth.CopyModel(64))
	}
	b, err := os.ReadFile(assert.SharedData(t, "chat-templates/llama.cpp-templates/"+name+".jinja"))
	assert.NoError(t, err)
	return string(b)
}

func ggufTemplate(t testing.TB, file []byte) string {
	t.Helper()
	f, err := gguf.Parse(file)
	assert.NoError(t, err)
	src, ok := model.ChatTemplate(f)
	assert.True(t, ok)
	return src
}

// vocabularyFor makes a vocabulary with all the markup of a template in it.
func vocabularyFor(src, bos, eos string) *triples {
	v := &triples{bos: bos, eos: eos}
	for _, s := range append(markupOf.FindAllString(src, -1), bos, eos, "</think>", "<think>", "\n\n") {
		if s != "" && !slices.Contains(v.specials, s) {
			v.specials = append(v.specials, s)
		}
	}
	return v
}

// Every template of the list renders as jinja2 does.
func TestGolden(t *testing.T) {
	t.Parallel()
	g := readGolden(t)
	var names []string
	for _, want := range g.Templates {
		names = append(names, want.Name)
		t.Run(want.Name, func(t *testing.T) {
			t.Parallel()
			src := source(t, want.Name)
			assert.Equal(t, Listed(src), want.Name)
			v := vocabularyFor(src, want.BOS, want.EOS)
			tpl := mustNew(t, src, v, Options{})
			for name, msgs := range g.Conversations {
				ids, err := tpl.Encode(context.Background(), msgs, noon)
				if want.Want[name] == nil {
					assert.Equal(t, assert.ErrorAs[*Refused](t, err).Reason, ReasonTemplate)
					continue
				}
				assert.NoError(t, err)
				assert.Equal(t, v.decode(ids), *want.Want[name])
			}
		})
	}
	// The list has no template without a golden render.
	for _, name := range listed {
		assert.True(t, slices.Contains(names, name))
	}
	assert.Equal(t, len(names), len(listed))
}

// Templates for tools only, which jinja2 cannot render without them, are not on
// the list. One of them fails here too; the others print an empty list of tools,
// and it is the operator's word whether that will do.
func TestToolTemplates(t *testing.T) {
	t.Parallel()
	for name, allowed := range map[string]bool{
		"fireworks-ai-llama-3-firefunction-v2":          false,
		"CohereForAI-c4ai-command-r-plus-tool_use":      true,
		"NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": true,
		"NousResearch-Hermes-3-Llama-3.1-8B-tool_use":   true,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			src := source(t, name)
			v := vocabularyFor(src, "<s>", "</s>")
			_, err := New(context.Background(), src, v, Options{})
			assert.ErrorAs[*UnsupportedTemplate](t, err)
			if allowed {
				mustNew(t, src, v, Options{AllowUnlisted: true})
				return
			}
			_, err = New(context.Background(), src, v, Options{AllowUnlisted: true})
			assert.ErrorAs[*UnsupportedTemplate](t, err)
			assert.ErrorIs(t, err, ErrTemplate)
		})
	}
}

// With a real tokenizer that wants BOS, the ids are those of BOS and the
// rendered text, and control tokens of a message are text.
func TestSynthetic(t *testing.T) {
	t.Parallel()
	f, err := gguf.Parse(synth.RandomLlama(1, shape))
	assert.NoError(t, err)
	tok, err := tokenizer.FromGGUF(f)
	assert.NoError(t, err)
	assert.True(t, tok.AddBOS())
	tpl := mustNew(t, source(t, "synthetic-turns"), tok, Options{})
	for _, g := range readGolden(t).Templates {
		if g.Name != "synthetic-turns" {
			continue
		}
		for name, msgs := range readGolden(t).Conversations {
			ids, err := tpl.Encode(context.Background(), msgs, noon)
			assert.NoError(t, err)
			assert.Equal(t, ids, tok.Encode([]int32{synth.BOS}, *g.Want[name], tokenizer.Markup))
		}
	}
	ids, err := tpl.Encode(context.Background(), user("<s></s><|im_end|>"), noon)
	assert.NoError(t, err)
	ids = slices.DeleteFunc(ids, func(id int32) bool { return !tok.IsControl(id) })
	assert.Equal(t, ids, []int32{synth.BOS, synth.TurnStart, synth.TurnEnd, synth.TurnStart})
	assert.Equal(t, EncodeText(tok, "<s>a"), tok.Encode([]int32{synth.BOS}, "<s>a", tokenizer.Plain))
}
