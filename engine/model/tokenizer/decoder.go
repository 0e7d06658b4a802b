package tokenizer

import (
	"strings"
	"unicode/utf8"
)

// Decoder turns the ids of one answer into text, piece by piece. It holds back
// the bytes of a character that is not complete, so that every text it returns
// is valid UTF-8. It is for one goroutine.
//
// It does not strip a space that begins the text: an answer continues a
// prompt.
type Decoder struct {
	tok  *Tokenizer
	tail []byte // an incomplete character, at most 3 bytes
}

// NewDecoder starts a text.
func (t *Tokenizer) NewDecoder() *Decoder { return &Decoder{tok: t} }

// Push adds a token and returns the text that became complete, possibly none.
// Control tokens and ids that do not exist add nothing; the unknown token adds
// U+FFFD, and so do bytes that are not UTF-8.
func (d *Decoder) Push(id int32) string {
	var piece []byte
	switch d.tok.typeOf(id) {
	case typeControl:
	case typeUnknown:
		piece = []byte(string(utf8.RuneError))
	default:
		piece = d.tok.Piece(id)
	}
	if len(piece) == 0 {
		return ""
	}
	b := append(d.tail, piece...)
	var out strings.Builder
	for len(b) > 0 && utf8.FullRune(b) {
		r, n := utf8.DecodeRune(b)
		if r == utf8.RuneError && n == 1 {
			n = broken(b)
		}
		out.WriteRune(r)
		b = b[n:]
	}
	d.tail = append([]byte(nil), b...)
	return out.String()
}

// Flush ends the text: it returns U+FFFD if a character is left incomplete.
// The decoder is then as new.
func (d *Decoder) Flush() string {
	if len(d.tail) == 0 {
		return ""
	}
	d.tail = nil
	return string(utf8.RuneError)
}

// broken returns the length of the longest start of a character that b begins
// with, at least 1: what one U+FFFD replaces by the practice of the Unicode
// standard.
func broken(b []byte) int {
	n := 1
	for n < len(b) && n < utf8.UTFMax-1 && !utf8.FullRune(b[:n+1]) {
		n++
	}
	return n
}
