package chat

import (
	"strings"
	"unicode/utf8"
)

// privateUse are Unicode's ranges for private use, in the order in which
// replacements are taken from them.
var privateUse = [][2]rune{{0xE000, 0xF8FF}, {0xF0000, 0xFFFFD}, {0x100000, 0x10FFFD}}

// firstPrivateByte is the least byte that a private use rune can begin with.
const firstPrivateByte = 0xEE

func isPrivate(r rune) bool {
	for _, p := range privateUse {
		if r >= p[0] && r <= p[1] {
			return true
		}
	}
	return false
}

// addPrivate adds the private use runes of s to set.
func addPrivate(set map[rune]bool, s string) {
	for i := 0; i < len(s); i++ {
		if s[i] < firstPrivateByte {
			continue
		}
		r, n := utf8.DecodeRuneInString(s[i:])
		if isPrivate(r) {
			set[r] = true
		}
		i += n - 1
	}
}

// mask exchanges runes, one for one. The zero value exchanges none. Since the
// replacements occur in no text that is masked, revert undoes apply, and also
// what a template made of the pieces.
type mask struct {
	ascii [utf8.RuneSelf]rune // replacement, or 0
	wide  map[rune]rune
	back  map[rune]rune
}

// newMask returns a mask that replaces each of the protected runes by a rune
// that is not in used. It reports false if there are not enough of them.
func newMask(protected []rune, used map[rune]bool) (*mask, bool) {
	m := &mask{wide: map[rune]rune{}, back: make(map[rune]rune, len(protected))}
	block, next := 0, privateUse[0][0]
	for _, r := range protected {
		for {
			if next > privateUse[block][1] {
				if block++; block == len(privateUse) {
					return nil, false
				}
				next = privateUse[block][0]
			}
			if !used[next] {
				break
			}
			next++
		}
		if r < utf8.RuneSelf {
			m.ascii[r] = next
		} else {
			m.wide[r] = next
		}
		m.back[next] = r
		next++
	}
	return m, true
}

func (m *mask) of(r rune) rune {
	if r < utf8.RuneSelf {
		if p := m.ascii[r]; p != 0 {
			return p
		}
		return r
	}
	if p, ok := m.wide[r]; ok {
		return p
	}
	return r
}

// apply replaces the protected runes of s.
func (m *mask) apply(s string) string {
	if len(m.back) == 0 {
		return s
	}
	return strings.Map(m.of, s)
}

// applyExcept replaces the protected runes of s outside of the literals in it.
func (m *mask) applyExcept(s string, literals []string) string {
	var b strings.Builder
	for s != "" {
		at, n := len(s), 0
		for _, l := range literals {
			if i := strings.Index(s, l); i >= 0 && (i < at || i == at && len(l) > n) {
				at, n = i, len(l)
			}
		}
		b.WriteString(m.apply(s[:at]))
		b.WriteString(s[at : at+n])
		s = s[at+n:]
	}
	return b.String()
}

// revert undoes apply, in all of s or in parts of it.
func (m *mask) revert(s string) string {
	if len(m.back) == 0 {
		return s
	}
	return strings.Map(func(r rune) rune {
		if o, ok := m.back[r]; ok {
			return o
		}
		return r
	}, s)
}
