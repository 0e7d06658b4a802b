// Package model reads hyperparameters and weights out of a model file.
package model

import "bulkhead.dev/engine/model/gguf"

// Config holds the hyperparameters of a llama model.
type Config struct {
	Arch                                                                  string
	Layers, Dim, Heads, KVHeads, HeadDim, Hidden, Vocab, Context, RopeDim int
	RopeBase                                                              float64
	RopeFactors                                                           []float32
	RopeScale                                                             float32
	NormEps                                                               float32
}

// Block holds the weights of one layer.
type Block struct{ AttnNorm, Q, K, V, O, FFNNorm, Gate, Up, Down gguf.Tensor }

// Llama is a loaded model.
type Llama struct {
	Config               Config
	Embed, OutNorm, Head gguf.Tensor
	Blocks               []Block
}

// LoadLlama checks and reads a model.
func LoadLlama(f *gguf.File) (*Llama, error) { return nil, ErrModel }

// ChatTemplate returns the chat template of a model file.
func ChatTemplate(f *gguf.File) (string, bool) { return f.Str("tokenizer.chat_template") }
