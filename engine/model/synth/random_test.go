package synth_test

import (
	"bytes"
	"math"
	"testing"

	"bulkhead.dev/engine/model"
	"bulkhead.dev/engine/model/gguf"
	"bulkhead.dev/engine/model/synth"
	"bulkhead.dev/engine/model/tokenizer"
	"bulkhead.dev/infra/assert"
)

var small = synth.Shape{Layers: 2, Dim: 64, Heads: 4, KVHeads: 2, HeadDim: 16, Hidden: 96, Vocab: 288, Context: 256}

func TestRandomLlamaTypes(t *testing.T) {
	t.Parallel()
	var exact []float64
	for _, typ := range gguf.Supported() {
		s := small
		s.Type = typ
		file := synth.RandomLlama(7, s)
		assert.True(t, bytes.Equal(file, synth.RandomLlama(7, s)))
		assert.False(t, bytes.Equal(file, synth.RandomLlama(8, s)))
		m, _ := load(t, file)
		assert.Equal(t, m.Blocks[1].Down.Type, typ)
		assert.Equal(t, m.Config, model.Config{Arch: "llama", Layers: 2, Dim: 64, Heads: 4, KVHeads: 2, HeadDim: 16, Hidden: 96,
			Vocab: 288, Context: 256, RopeDim: 16, RopeBase: 10000, RopeScale: 1, NormEps: 1e-5})
		r := newReference(m)
		var logits []float64
		for _, id := range []int{synth.BOS, 100, 200, 280} {
			logits = r.step(id)
		}
		mean := 0.0
		for _, v := range logits {
			mean += v * v / float64(len(logits))
		}
		if mean < 2 || mean > 40 {
			t.Errorf("%v: logits have a mean square of %g", typ, mean)
		}
		if typ == gguf.F32 {
			exact = logits
			continue
		}
		// The same weights, rounded: the logits must point the same way.
		dot, a, b := 0.0, 0.0, 0.0
		for i := range logits {
			dot, a, b = dot+logits[i]*exact[i], a+logits[i]*logits[i], b+exact[i]*exact[i]
		}
		limit := map[gguf.Type]float64{gguf.F16: 0.99999, gguf.BF16: 0.9998, gguf.Q8_0: 0.9998, gguf.Q4_0: 0.96, gguf.Q4_1: 0.97}[typ]
		if cosine := dot / math.Sqrt(a*b); cosine < limit {
			t.Errorf("%v: logits agree to %g only", typ, cosine)
		}
	}
}

func TestRandomLlamaFallsBack(t *testing.T) {
	t.Parallel()
	s := small
	s.Type, s.Hidden, s.Tied = gguf.Q4_0, 80, true
	m, _ := load(t, synth.RandomLlama(1, s))
	assert.Equal(t, m.Blocks[0].Down.Type, gguf.F32)
	assert.Equal(t, m.Blocks[0].Up.Type, gguf.Q4_0)
	assert.Equal(t, &m.Head.Data[0], &m.Embed.Data[0])
}

func TestVocabulary(t *testing.T) {
	t.Parallel()
	for _, size := range []int{synth.MinVocab, 288, 2000, 30000} {
		s := small
		s.Vocab = size
		_, f := load(t, synth.RandomLlama(1, s))
		tok, err := tokenizer.FromGGUF(f)
		assert.NoError(t, err)
		assert.Equal(t, tok.Size(), size)
		template, ok := model.ChatTemplate(f)
		assert.True(t, ok && template != "")
		const words = "Say <|im_end|> or </s>:\n\tna\u00efve  \U0001F98A"
		ids := tok.Encode(nil, words, tokenizer.Plain)
		for _, id := range ids {
			assert.False(t, tok.IsControl(id))
		}
		assert.Equal(t, text(tok, ids), words)
		assert.Equal(t, tok.Encode(nil, "<|im_start|>a<|im_end|></s>", tokenizer.Markup)[0], int32(synth.TurnStart))
		assert.Equal(t, tok.Encode(nil, " ", tokenizer.Plain), []int32{synth.Space})
		assert.Equal(t, tok.Encode(nil, "\n", tokenizer.Plain), []int32{synth.FirstByte + '\n'})
		assert.True(t, tok.IsEOG(synth.TurnEnd) && tok.IsEOG(synth.EOS))
	}
}

// Each of the words is one token, and nothing else changes how text is read.
func TestRandomLlamaWords(t *testing.T) {
	t.Parallel()
	s := small
	s.Words, s.Vocab = []string{" many", " man", "words"}, 0
	m, tok := read(t, synth.RandomLlama(7, s))
	assert.Equal(t, m.Config.Vocab, synth.MinVocab+94+4+4) // ▁m ▁ma ▁man ▁many, wo wor word words
	ids := tok.Encode(nil, "words many man", tokenizer.Plain)
	assert.Equal(t, len(ids), 3)
	assert.Equal(t, text(tok, ids), "words many man")
	assert.Equal(t, text(tok, tok.Encode(nil, "maniac, wordy!", tokenizer.Plain)), "maniac, wordy!")
}
