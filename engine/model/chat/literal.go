package chat

import (
	"slices"
	"strings"
)

// literal is a text that a template looks for in the messages of a role.
type literal struct {
	text string
	// tainted are the special tokens that could begin in this text when a
	// message brings it.
	tainted []int32
}

func (m *markup) literal(text string) literal {
	l := literal{text: text}
	for _, s := range m.tokens {
		if !s.guarded {
			continue
		}
		for i := range text {
			if strings.HasPrefix(text[i:], s.text) || strings.HasPrefix(s.text, text[i:]) {
				l.tainted = append(l.tainted, s.id)
				break
			}
		}
	}
	return l
}

// open returns msgs masked by m except for the literals that the template looks
// for, and the tokens that must then not be in the render. It returns nil if no
// message has such a literal.
func (t *Template) open(msgs []Message, m *mask) ([]Message, map[int32]bool) {
	if len(t.literals) == 0 {
		return nil, nil
	}
	var out []Message
	tainted := map[int32]bool{}
	for i, msg := range msgs {
		var found []string
		for _, l := range t.literals[msg.Role] {
			if strings.Contains(msg.Content, l.text) {
				found = append(found, l.text)
				for _, id := range l.tainted {
					tainted[id] = true
				}
			}
		}
		if found == nil {
			continue
		}
		if out == nil {
			out = masked(msgs, m)
		}
		out[i].Content = m.applyExcept(msg.Content, found)
	}
	return out, tainted
}

// sourceLiterals returns the different string literals of a template that have
// a protected rune. It takes everything between two equal quotes on the way
// through the source, so it may find too much, which costs a probe.
func (m *markup) sourceLiterals(src string) []string {
	var out []string
	for i := 0; i < len(src); i++ {
		quote := src[i]
		if quote != '\'' && quote != '"' {
			continue
		}
		var b strings.Builder
		j := i + 1
		for ; j < len(src) && src[j] != quote && b.Len() <= maxLiteral; j++ {
			if src[j] == '\\' && j+1 < len(src) {
				j++
				b.WriteString(unescape(src[j]))
				continue
			}
			b.WriteByte(src[j])
		}
		if j == len(src) || src[j] != quote {
			// No end in reach: an apostrophe of a text. What follows it may
			// begin a literal.
			continue
		}
		text := b.String()
		if strings.ContainsFunc(text, m.isProtected) && !slices.Contains(out, text) {
			out = append(out, text)
		}
		i = j
	}
	return out
}

func (m *markup) isProtected(r rune) bool {
	_, ok := slices.BinarySearch(m.protected, r)
	return ok
}

func unescape(c byte) string {
	switch c {
	case 'n':
		return "\n"
	case 't':
		return "\t"
	case 'r':
		return "\r"
	default:
		return string([]byte{c})
	}
}
