package tenancy

import (
	"testing"

	"bulkhead.dev/infra/assert"
)

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
