package tenancy

import (
	"testing"

	"bulkhead.dev/infra/assert"
)

func TestLRU(t *testing.T) {
	t.Parallel()
	l := newLRU[int, string](2)
	l.put(1, "a")
	l.put(2, "b")
	l.put(1, "A") // replaces, and is the latest now
	l.put(3, "c") // so this takes the place of 2
	_, ok := l.get(2)
	assert.False(t, ok)
	v, ok := l.get(1)
	assert.True(t, ok && v == "A")
	l.put(4, "d") // 1 was read after 3 was written
	_, ok = l.get(3)
	assert.False(t, ok)
	l.remove(1)
	l.remove(99)
	_, ok = l.get(1)
	assert.False(t, ok)
	for i := range 1000 {
		l.put(i, "x")
		assert.True(t, len(l.byKey) <= 2 && l.order.Len() == len(l.byKey))
	}
}

// Every key that is made can be read, and no character of it can be changed or
// left out.
func TestKeyForm(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for range 200 {
		k, prefix := newKey()
		text := k.Reveal()
		got, ok := parseKey(text)
		assert.True(t, ok && got == prefix && len(text) == keyLength && !seen[prefix])
		seen[prefix] = true
		for i := range text {
			for _, bad := range []string{text[:i] + text[i+1:], text[:i] + string(base62[(int(text[i])*7+i)%62]) + text[i+1:], text[:i] + "é" + text[i+1:]} {
				if _, ok := parseKey(bad); ok && bad != text {
					t.Fatalf("a changed key is taken, at %d", i)
				}
			}
		}
	}
}

func FuzzParseKey(f *testing.F) {
	k, _ := newKey()
	f.Add(k.Reveal())
	f.Add(keyIntro + "__")
	f.Fuzz(func(t *testing.T, s string) {
		if prefix, ok := parseKey(s); ok {
			assert.Equal(t, s[:len(keyIntro)+keyPrefix], keyIntro+prefix)
			assert.True(t, isBase62(prefix) && len(s) == keyLength)
		}
	})
}
