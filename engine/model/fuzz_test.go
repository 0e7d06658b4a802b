package model_test

import (
	"errors"
	"testing"

	"bulkhead.dev/engine/model"
	"bulkhead.dev/engine/model/gguf"
	"bulkhead.dev/engine/model/synth"
	"bulkhead.dev/engine/model/tokenizer"
)

// FuzzLoad changes bytes of good files: loading must refuse or succeed, and
// the tokenizer of what it accepts must work.
func FuzzLoad(f *testing.F) {
	tiny := synth.Shape{Layers: 1, Dim: 32, Heads: 2, KVHeads: 1, HeadDim: 8, Hidden: 32, Vocab: synth.MinVocab, Context: 16, Type: gguf.Q4_0}
	f.Add(synth.RandomLlama(1, tiny))
	f.Add(synth.CopyModel(64))
	f.Fuzz(func(t *testing.T, raw []byte) {
		file, err := gguf.Parse(raw)
		if err != nil {
			return
		}
		if _, err := model.LoadLlama(file); err != nil && !errors.Is(err, model.ErrInvalid) && !errors.Is(err, model.ErrUnsupported) {
			t.Fatalf("an error without kind: %v", err)
		}
		tok, err := tokenizer.FromGGUF(file)
		if err != nil {
			if !errors.Is(err, tokenizer.ErrInvalid) && !errors.Is(err, tokenizer.ErrUnsupported) {
				t.Fatalf("an error without kind: %v", err)
			}
			return
		}
		for _, id := range tok.Encode(nil, "a\x00<|im_end|>\u00e9 </s>", tokenizer.Markup) {
			if tok.Piece(id) == nil {
				t.Fatalf("token %d does not exist", id)
			}
		}
	})
}
