package tokenizer

import (
	"fmt"
	"strings"

	"bulkhead.dev/engine/model/gguf"
)

// keyPrefix begins the metadata keys of a tokenizer.
const keyPrefix = "tokenizer.ggml."

// endNames are the texts of tokens that end a turn, a message or a text in the
// usual prompt formats. Such a token ends a generation and is a control token
// even where the file has it otherwise: converted files often do.
var endNames = map[string]bool{
	"<|eot_id|>": true, "<|eom_id|>": true, "<|im_end|>": true, "<|end|>": true,
	"<end_of_turn>": true, "<|endoftext|>": true, "<EOT>": true, "<|end_of_text|>": true,
	"<\uff5cend\u2581of\u2581sentence\uff5c>": true,
}

// vocab is the vocabulary of a file before a model is built on it.
type vocab struct {
	tokens []string
	types  []int32
	scores []float32
	merges []string
	pieces [][]byte
}

// ordinary reports whether text can give the token.
func (v *vocab) ordinary(id int) bool {
	return v.types[id] == typeNormal || v.types[id] == typeUnused
}

func unsupported(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrUnsupported, fmt.Sprintf(format, args...))
}

func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrInvalid, fmt.Sprintf(format, args...))
}

// FromGGUF reads the tokenizer of a model file. It keeps nothing of f. Errors
// wrap ErrUnsupported or ErrInvalid.
func FromGGUF(f *gguf.File) (*Tokenizer, error) {
	kind, _ := f.Str(keyPrefix + "model")
	if kind != "gpt2" && kind != "llama" {
		return nil, unsupported("model %.40q; supported: \"gpt2\", \"llama\"", kind)
	}
	v, err := readVocab(f)
	if err != nil {
		return nil, err
	}
	t := &Tokenizer{types: v.types, eog: map[int32]bool{}}
	if err := t.readIDs(f, v, kind == "llama"); err != nil {
		return nil, err
	}
	v.spell(kind == "llama")
	t.pieces = v.pieces
	if kind == "llama" {
		err = t.setSPM(f, v)
	} else {
		err = t.setBPE(f, v)
	}
	if err != nil {
		return nil, err
	}
	if add, ok := f.Bool(keyPrefix + "add_bos_token"); ok {
		t.addBOS = add
	}
	for id, typ := range v.types {
		if special(typ) {
			t.specials.add(v.tokens[id], int32(id))
		}
	}
	return t, nil
}

func readVocab(f *gguf.File) (*vocab, error) {
	v := &vocab{
		tokens: f.Strs(keyPrefix + "tokens"),
		types:  f.Ints(keyPrefix + "token_type"),
		scores: f.Floats(keyPrefix + "scores"),
		merges: f.Strs(keyPrefix + "merges"),
	}
	if len(v.tokens) == 0 {
		return nil, invalid("there are no tokens")
	}
	if v.types == nil {
		v.types = make([]int32, len(v.tokens))
		for i := range v.types {
			v.types[i] = typeNormal
		}
	}
	if len(v.types) != len(v.tokens) {
		return nil, invalid("%d tokens have %d types", len(v.tokens), len(v.types))
	}
	return v, nil
}

// readIDs finds the tokens with a meaning of their own. All that begin or end
// a text become control tokens, whatever their type.
func (t *Tokenizer) readIDs(f *gguf.File, v *vocab, spm bool) error {
	bos, eos := none, none
	if spm {
		bos, eos = 1, 2
	}
	var err error
	if t.bos, err = readID(f, v, "bos", bos); err != nil {
		return err
	}
	if t.eos, err = readID(f, v, "eos", eos); err != nil {
		return err
	}
	control := func(id int32) {
		if id != none {
			v.types[id] = typeControl
		}
	}
	control(t.bos)
	ends := []int32{t.eos}
	for _, name := range []string{"eot", "eom"} {
		id, err := readID(f, v, name, none)
		if err != nil {
			return err
		}
		ends = append(ends, id)
	}
	for id, text := range v.tokens {
		if endNames[text] {
			ends = append(ends, int32(id))
		}
	}
	for _, id := range ends {
		control(id)
		if id != none {
			t.eog[id] = true
		}
	}
	return nil
}

// readID reads the id of a special token. def holds where the file has none
// and is dropped where the vocabulary is smaller.
func readID(f *gguf.File, v *vocab, name string, def int32) (int32, error) {
	key := keyPrefix + name + "_token_id"
	if !f.Has(key) {
		if int(def) >= len(v.tokens) {
			def = none
		}
		return def, nil
	}
	id, ok := f.Uint(key)
	if !ok || id >= uint64(len(v.tokens)) {
		return none, invalid("key %s names no token", key)
	}
	return int32(id), nil
}

// spell fills in what each token says.
func (v *vocab) spell(spm bool) {
	size := 0
	for _, text := range v.tokens {
		size += len(text)
	}
	// No piece is longer than its text, so the arena never moves.
	arena := make([]byte, 0, size)
	v.pieces = make([][]byte, len(v.tokens))
	for id, text := range v.tokens {
		start := len(arena)
		b, isByte := byteName(text)
		switch {
		case spm && v.types[id] == typeByte && isByte:
			arena = append(arena, b)
		case !v.ordinary(id):
			arena = append(arena, text...)
		case spm:
			arena = append(arena, strings.ReplaceAll(text, spaceMark, " ")...)
		default:
			arena = fromAlphabet(arena, text)
		}
		v.pieces[id] = arena[start:len(arena):len(arena)]
	}
}

func (t *Tokenizer) setSPM(f *gguf.File, v *vocab) error {
	unk, err := readID(f, v, "unknown", 0)
	if err != nil {
		return err
	}
	prefix := true
	if p, ok := f.Bool(keyPrefix + "add_space_prefix"); ok {
		prefix = p
	}
	t.addBOS = true
	m, err := newSPM(v, unk, prefix)
	t.model = m
	return err
}

func (t *Tokenizer) setBPE(f *gguf.File, v *vocab) error {
	name, ok := f.Str(keyPrefix + "pre")
	if !ok {
		name = "default"
	}
	pre, ok := preTokenizers[name]
	if !ok {
		return unsupported("pre-tokenizer %.40q; supported: default, gpt-2, smollm, llama-bpe, qwen2", name)
	}
	t.addBOS = pre.addBOS
	m, err := newBPE(v, pre.split, pre.wholeWords)
	t.model = m
	return err
}
