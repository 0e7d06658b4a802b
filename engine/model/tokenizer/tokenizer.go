// Package tokenizer turns text into the token ids of a model and back.
package tokenizer

import (
	"errors"

	"bulkhead.dev/engine/model/gguf"
)

// ErrUnsupported reports a tokenizer that this package does not implement.
var ErrUnsupported = errors.New("tokenizer is not supported")

// Mode says whether text may name control tokens.
type Mode int

const (
	// Plain encodes text only: special tokens never match.
	Plain Mode = iota
	// Markup matches the texts of control and user-defined tokens as their ids.
	Markup
)

// Tokenizer encodes and decodes text. It is safe for concurrent use.
type Tokenizer struct{}

// FromGGUF reads the tokenizer of a model file.
func FromGGUF(f *gguf.File) (*Tokenizer, error) { return nil, ErrUnsupported }

// Encode appends the ids of text to dst.
func (t *Tokenizer) Encode(dst []int32, text string, mode Mode) []int32 { return dst }

// BOS returns the id that begins a sequence.
func (t *Tokenizer) BOS() (int32, bool) { return 0, false }

// AddBOS reports whether the model expects BOS before every text.
func (t *Tokenizer) AddBOS() bool { return false }

// EOS returns the id that ends a sequence.
func (t *Tokenizer) EOS() (int32, bool) { return 0, false }

// IsEOG reports whether id ends a generation.
func (t *Tokenizer) IsEOG(id int32) bool { return false }

// IsControl reports whether id is a control token.
func (t *Tokenizer) IsControl(id int32) bool { return false }

// Size returns the number of tokens.
func (t *Tokenizer) Size() int { return 0 }

// Piece returns the bytes of a token.
func (t *Tokenizer) Piece(id int32) []byte { return nil }

// Specials returns the texts that Markup mode matches.
func (t *Tokenizer) Specials() []string { return nil }

// NewDecoder starts a stream of text.
func (t *Tokenizer) NewDecoder() *Decoder { return &Decoder{} }

// Decoder turns ids into text piece by piece.
type Decoder struct{}

// Push adds a token and returns the text that is complete.
func (d *Decoder) Push(id int32) string { return "" }

// Flush returns what is left.
func (d *Decoder) Flush() string { return "" }
