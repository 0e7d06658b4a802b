package chat

import (
	"fmt"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"bulkhead.dev/engine/model/tokenizer"
)

// Vocabulary is what a template needs of a tokenizer. *tokenizer.Tokenizer is one.
type Vocabulary interface {
	// Encode appends the ids of text to dst.
	Encode(dst []int32, text string, mode tokenizer.Mode) []int32
	// Specials returns the texts that have an id of their own in Markup mode.
	Specials() []string
	// BOS and EOS return the ids that begin and end a sequence.
	BOS() (int32, bool)
	EOS() (int32, bool)
	// AddBOS reports whether BOS goes in front of every text.
	AddBOS() bool
	// Piece returns the bytes of a token.
	Piece(id int32) []byte
}

var _ Vocabulary = (*tokenizer.Tokenizer)(nil)

// special is a token that markup names by its text.
type special struct {
	text string
	id   int32
	// guarded tokens must not come out of messages. Tokens of white space only
	// are not: they are text with an id of its own.
	guarded bool
}

// markup finds special tokens in text: the leftmost, and of these the longest,
// as the tokenizer's Markup mode does.
type markup struct {
	tokens []special
	byText map[string]int // index into tokens
	// lengths are those of the tokens with this first byte, longest first.
	lengths [256][]int
	// protected are the runes that guarded tokens begin with, white space apart.
	protected []rune
}

func newMarkup(tok Vocabulary) (*markup, error) {
	m := &markup{byText: map[string]int{}}
	for _, text := range tok.Specials() {
		// Rendered text is UTF-8, so what is not cannot be in it.
		if _, ok := m.byText[text]; ok || text == "" || !utf8.ValidString(text) {
			continue
		}
		ids := tok.Encode(nil, text, tokenizer.Markup)
		if len(ids) != 1 {
			return nil, fmt.Errorf("special token %q encodes to %d tokens", text, len(ids))
		}
		s := special{text: text, id: ids[0]}
		for _, r := range text {
			if unicode.IsSpace(r) {
				continue
			}
			s.guarded = true
			if !slices.Contains(m.protected, r) {
				m.protected = append(m.protected, r)
			}
			break
		}
		m.byText[text] = len(m.tokens)
		m.tokens = append(m.tokens, s)
		if l := m.lengths[text[0]]; !slices.Contains(l, len(text)) {
			m.lengths[text[0]] = append(l, len(text))
		}
	}
	for _, l := range m.lengths {
		slices.SortFunc(l, func(a, b int) int { return b - a })
	}
	slices.Sort(m.protected)
	if len(m.protected) > maxProtected {
		return nil, fmt.Errorf("special tokens begin with %d different characters, more than %d", len(m.protected), maxProtected)
	}
	return m, nil
}

// next returns the first special token of text and where it begins.
func (m *markup) next(text string) (special, int, bool) {
	for at := 0; at < len(text); at++ {
		for _, n := range m.lengths[text[at]] {
			if n > len(text)-at {
				continue
			}
			if i, ok := m.byText[text[at:at+n]]; ok {
				return m.tokens[i], at, true
			}
		}
	}
	return special{}, 0, false
}

// joins returns a guarded token that would match across the place where before
// ends and text of a message begins, or after begins and text of a message ended.
func (m *markup) joins(before, after string) (string, bool) {
	for _, s := range m.tokens {
		if !s.guarded {
			continue
		}
		for n := range s.text {
			if n == 0 {
				continue
			}
			// White space in front of the rune that is replaced is all that a
			// message can bring of a beginning, and all that it cannot complete.
			if strings.TrimSpace(s.text[:n]) == "" {
				if strings.HasPrefix(after, s.text[n:]) {
					return s.text, true
				}
			} else if strings.HasSuffix(before, s.text[:n]) {
				return s.text, true
			}
		}
	}
	return "", false
}
