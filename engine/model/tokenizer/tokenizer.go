package tokenizer

import "errors"

var (
	// ErrUnsupported reports a tokenizer that this package does not implement.
	// The message names it.
	ErrUnsupported = errors.New("tokenizer is not supported")
	// ErrInvalid reports a vocabulary that contradicts itself.
	ErrInvalid = errors.New("tokenizer is not valid")
)

// Mode says whether a text may name control and user-defined tokens.
type Mode int

const (
	// Plain takes text as text: control and user-defined tokens never come out.
	Plain Mode = iota
	// Markup takes the texts of control and user-defined tokens as their ids,
	// the longest where several match.
	Markup
)

// Token types of the metadata, as SentencePiece numbers them.
const (
	typeNormal      = 1
	typeUnknown     = 2
	typeControl     = 3
	typeUserDefined = 4
	typeUnused      = 5
	typeByte        = 6
)

// none marks an id that a vocabulary does not have.
const none int32 = -1

// model encodes text in which no special token is to be found. text is not empty.
type model interface {
	encode(dst []int32, text string) []int32
}

// Tokenizer encodes and decodes text for one vocabulary. It does not change
// after it was made and is safe for concurrent use.
type Tokenizer struct {
	pieces   [][]byte // what each token says
	types    []int32
	eog      map[int32]bool
	bos, eos int32 // none if there is no such token
	addBOS   bool
	specials specials
	model    model
}

// Encode appends the ids of text to dst and returns it. It adds no BOS. Bytes
// that are not UTF-8 are encoded as bytes.
func (t *Tokenizer) Encode(dst []int32, text string, mode Mode) []int32 {
	if mode != Markup {
		return t.encodeText(dst, text)
	}
	start := 0
	for at := 0; at < len(text); {
		id, n := t.specials.match(text[at:])
		if n == 0 {
			at++
			continue
		}
		dst = t.encodeText(dst, text[start:at])
		dst = append(dst, id)
		at += n
		start = at
	}
	return t.encodeText(dst, text[start:])
}

func (t *Tokenizer) encodeText(dst []int32, text string) []int32 {
	if text == "" {
		return dst
	}
	return t.model.encode(dst, text)
}

// BOS returns the id that begins a sequence; false if there is none.
func (t *Tokenizer) BOS() (int32, bool) { return t.bos, t.bos != none }

// AddBOS reports whether the model expects BOS in front of every text.
func (t *Tokenizer) AddBOS() bool { return t.addBOS && t.bos != none }

// EOS returns the id that ends a sequence; false if there is none.
func (t *Tokenizer) EOS() (int32, bool) { return t.eos, t.eos != none }

// IsEOG reports whether id ends a generation: EOS, or another end-of-turn or
// end-of-message token of the vocabulary.
func (t *Tokenizer) IsEOG(id int32) bool { return t.eog[id] }

// IsControl reports whether id is a control token: part of the format of a
// prompt, never of its text.
func (t *Tokenizer) IsControl(id int32) bool { return t.typeOf(id) == typeControl }

// Size returns the number of tokens. Ids run from 0 to Size()-1.
func (t *Tokenizer) Size() int { return len(t.pieces) }

// Piece returns what a token says: the bytes that it stands for, or the name
// of a control token. It is nil for an id that does not exist. The slice must
// not be written.
func (t *Tokenizer) Piece(id int32) []byte {
	if id < 0 || int(id) >= len(t.pieces) {
		return nil
	}
	return t.pieces[id]
}

// Specials returns the texts of the control and user-defined tokens that
// Markup mode matches, in the order of their ids.
func (t *Tokenizer) Specials() []string {
	var out []string
	for id, typ := range t.types {
		if special(typ) && len(t.pieces[id]) > 0 {
			out = append(out, string(t.pieces[id]))
		}
	}
	return out
}

func (t *Tokenizer) typeOf(id int32) int32 {
	if id < 0 || int(id) >= len(t.types) {
		return 0
	}
	return t.types[id]
}

// special reports whether Markup mode matches tokens of the type.
func special(typ int32) bool { return typ == typeControl || typ == typeUserDefined }
