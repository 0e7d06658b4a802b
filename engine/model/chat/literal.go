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
// a protected rune, in the order of the source.
func (m *markup) sourceLiterals(src string) []string {
	var out []string
	for src != "" {
		at := strings.IndexByte(src, '{')
		if at < 0 || at+1 == len(src) {
			break
		}
		kind := src[at+1]
		src = src[at+1:]
		switch kind {
		case '#':
			_, src, _ = strings.Cut(src, "#}")
		case '{', '%':
			src = m.tagLiterals(src[1:], &out)
		}
	}
	return out
}

// tagLiterals adds the literals of a tag to out, and returns what follows it.
func (m *markup) tagLiterals(src string, out *[]string) string {
	maps := 0 // that are open
	for i := 0; i < len(src); i++ {
		switch src[i] {
		case '{':
			maps++
		case '}':
			if maps == 0 {
				return strings.TrimPrefix(src[i+1:], "}")
			}
			maps--
		case '\'', '"':
			text, n := quoted(src[i:])
			if len(text) <= maxLiteral && strings.ContainsFunc(text, m.isProtected) && !slices.Contains(*out, text) {
				*out = append(*out, text)
			}
			i += n - 1
		}
	}
	return ""
}

// quoted returns the text of the literal that src begins with, and how long it
// is in the source.
func quoted(src string) (string, int) {
	var b strings.Builder
	for i := 1; i < len(src); i++ {
		switch c := src[i]; {
		case c == src[0]:
			return b.String(), i + 1
		case c == '\\' && i+1 < len(src):
			i++
			b.WriteString(unescape(src[i]))
		default:
			b.WriteByte(c)
		}
	}
	return b.String(), len(src)
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
