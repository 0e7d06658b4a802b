package chat

import (
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"pgregory.net/rapid"

	"bulkhead.dev/infra/assert"
)

// A mask takes all protected runes away, one for one, and gives them back, also
// piece by piece.
func TestMask(t *testing.T) {
	t.Parallel()
	runes := rapid.OneOf(
		rapid.SampledFrom([]rune("<[é｜\ue000\ue001\U000F0000\U0010FFFDa ")),
		rapid.Rune(),
	)
	rapid.Check(t, func(t *rapid.T) {
		protected := rapid.SliceOfNDistinct(runes, 0, 5, rapid.ID).Draw(t, "protected")
		s := string(rapid.SliceOf(runes).Draw(t, "text"))
		if s = strings.ToValidUTF8(s, "?"); strings.ContainsRune(s, utf8.RuneError) {
			t.Skip("no text")
		}
		used := map[rune]bool{}
		addPrivate(used, s)
		addPrivate(used, string(protected))
		m, ok := newMask(protected, used)
		must(t, ok, "no mask")
		hidden := m.apply(s)
		must(t, !strings.ContainsFunc(hidden, func(r rune) bool { return slices.Contains(protected, r) }), "left", hidden)
		must(t, utf8.RuneCountInString(hidden) == utf8.RuneCountInString(s), "length", hidden)
		must(t, m.revert(hidden) == s, "reverted", m.revert(hidden))
		var parts strings.Builder
		for _, r := range hidden {
			parts.WriteString(m.revert(string(r)))
		}
		must(t, parts.String() == s, "in parts", parts.String())
	})
}

func TestMaskExcept(t *testing.T) {
	t.Parallel()
	m, ok := newMask([]rune{'<'}, nil)
	assert.True(t, ok)
	assert.Equal(t, m.applyExcept("<a<ab<c", []string{"<a", "<ab"}), "<a<ab\ue000c")
	assert.Equal(t, m.applyExcept("<", []string{"<a"}), "\ue000")
	assert.Equal(t, m.applyExcept("", []string{"<a"}), "")
}

// Replacements are taken out of what is left, to the last one.
func TestMaskRunsOut(t *testing.T) {
	t.Parallel()
	used := map[rune]bool{}
	for _, p := range privateUse {
		for r := p[0]; r <= p[1]; r++ {
			used[r] = true
		}
	}
	_, ok := newMask([]rune{'<'}, used)
	assert.False(t, ok)
	delete(used, 0x10FFFD)
	m, ok := newMask([]rune{'<'}, used)
	assert.True(t, ok)
	assert.Equal(t, m.apply("<"), "\U0010FFFD")
	_, ok = newMask([]rune{'<', '['}, used)
	assert.False(t, ok)
	_, ok = newMask(nil, used)
	assert.True(t, ok)
}
