package tokenizer

import (
	"strings"
	"unicode/utf8"
)

// spaceMark is how SentencePiece writes a space, U+2581.
const spaceMark = "\u2581"

// spm is the BPE of SentencePiece: the characters of a whole text are merged,
// the pair whose token has the highest score first.
type spm struct {
	ids     map[string]int32 // ordinary tokens by text
	scores  []float32
	bytes   [256]int32 // tokens of single bytes, none where there is none
	unk     int32      // for characters without token and bytes, or none
	prefix  bool       // a space goes in front of every text
	longest int        // of the ordinary tokens, in bytes
}

func (s *spm) encode(dst []int32, text string) []int32 {
	if s.prefix {
		text = " " + text
	}
	text = strings.ReplaceAll(text, " ", spaceMark)
	var m merger
	for i := 0; i < len(text); {
		_, n := utf8.DecodeRuneInString(text[i:])
		m.add(i, n, s.id(text[i:i+n]))
		i += n
	}
	m.run(func(l, r symbol) (float32, int32, bool) {
		id := s.id(text[l.start : r.start+r.size])
		if id == none {
			return 0, 0, false
		}
		return -s.scores[id], id, true
	})
	for i := int32(0); i != none; i = m.symbols[i].next {
		x := m.symbols[i]
		if x.id != none {
			dst = append(dst, x.id)
			continue
		}
		dst = s.fallback(dst, text[x.start:x.start+x.size])
	}
	return dst
}

func (s *spm) id(text string) int32 {
	if len(text) > s.longest {
		return none
	}
	if id, ok := s.ids[text]; ok {
		return id
	}
	return none
}

// fallback encodes a character that is not in the vocabulary: as its bytes, or
// as one unknown token.
func (s *spm) fallback(dst []int32, char string) []int32 {
	for i := range len(char) {
		if s.bytes[char[i]] == none {
			return append(dst, s.unk)
		}
	}
	for i := range len(char) {
		dst = append(dst, s.bytes[char[i]])
	}
	return dst
}

func newSPM(v *vocab, unk int32, prefix bool) (*spm, error) {
	if len(v.scores) != len(v.tokens) {
		return nil, invalid("%d tokens have %d scores", len(v.tokens), len(v.scores))
	}
	s := &spm{ids: make(map[string]int32, len(v.tokens)), scores: v.scores, unk: unk, prefix: prefix}
	for b := range s.bytes {
		s.bytes[b] = none
	}
	missing := len(s.bytes)
	for id, text := range v.tokens {
		switch {
		case v.scores[id] != v.scores[id]:
			return nil, invalid("the score of token %d is not a number", id)
		case v.types[id] == typeByte:
			b, ok := byteName(text)
			if !ok {
				return nil, invalid("byte token %d does not name a byte", id)
			}
			if s.bytes[b] == none {
				missing--
			}
			s.bytes[b] = int32(id)
		case v.ordinary(id) && text != "":
			s.ids[text] = int32(id)
			s.longest = max(s.longest, len(text))
		}
	}
	// Only a token of the type for it stands for unknown text: a vocabulary
	// may call a control token unknown, and text must not give that.
	if missing > 0 && (unk == none || v.types[unk] != typeUnknown) {
		return nil, invalid("the vocabulary has neither tokens for all bytes nor one for unknown text")
	}
	return s, nil
}

// byteName reads the text of a byte token, such as <0x0A>.
func byteName(text string) (byte, bool) {
	if len(text) != 6 || text[:3] != "<0x" || text[5] != '>' {
		return 0, false
	}
	hi, ok1 := hexDigit(text[3])
	lo, ok2 := hexDigit(text[4])
	return hi<<4 | lo, ok1 && ok2
}

func hexDigit(c byte) (byte, bool) {
	switch {
	case c >= '0' && c <= '9':
		return c - '0', true
	case c >= 'A' && c <= 'F':
		return c - 'A' + 10, true
	case c >= 'a' && c <= 'f':
		return c - 'a' + 10, true
	}
	return 0, false
}
