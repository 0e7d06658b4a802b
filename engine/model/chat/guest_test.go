package chat

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"os"
	"strings"
	"testing"

	"bulkhead.dev/infra/assert"
)

// The module is the one whose checksum was committed with it, and says nothing
// about the machine that built it.
func TestGuestModule(t *testing.T) {
	t.Parallel()
	b, err := os.ReadFile("minijinja.wasm.sha256")
	assert.NoError(t, err)
	want, _, _ := strings.Cut(string(b), " ")
	sum := sha256.Sum256(guestWasm)
	assert.Equal(t, hex.EncodeToString(sum[:]), want)
	for _, path := range []string{"/root", "/home", "/Users", "/tmp", "/work", ".cargo", "index.crates.io"} {
		if bytes.Contains(guestWasm, []byte(path)) {
			t.Errorf("the module has %q in it", path)
		}
	}
}

// The guest can call nothing.
func TestGuestImportsNothing(t *testing.T) {
	t.Parallel()
	_, m, err := shared().compiled(t.Context())
	assert.NoError(t, err)
	assert.Equal(t, len(m.ImportedFunctions()), 0)
	assert.Equal(t, len(m.ImportedMemories()), 0)
}

// The guest refuses requests that make no sense, and stays usable.
func TestGuestRequests(t *testing.T) {
	t.Parallel()
	in, err := shared().newInstance(t.Context())
	assert.NoError(t, err)
	defer func() { assert.NoError(t, in.close()) }()
	call := func(f string, s string) (status, string) {
		fn := in.render
		if f == "compile" {
			fn = in.compile
		}
		st, out, err := in.call(t.Context(), f, compileTime, fn, []byte(s))
		assert.NoError(t, err)
		return st, string(out)
	}
	const request = `{"now":[2024,7,26,12,0,0,4],"fuel":1000,"max_out":5,"ctx":{"x":"<&>"}}`
	st, _ := call("render", request)
	assert.Equal(t, st, statusRequest) // there is no template
	st, _ = call("compile", "{{ x")
	assert.Equal(t, st, statusTemplate)
	st, _ = call("compile", "\xff")
	assert.Equal(t, st, statusTemplate)
	st, _ = call("compile", "{% generation %}{{ x }}{%- endgeneration -%}  ")
	assert.Equal(t, st, statusOK)
	for _, bad := range []string{"", "{}", "[]", `{"ctx":`, request + "x", strings.Replace(request, "fuel", "full", 1), strings.Replace(request, "1000", "-1", 1)} {
		st, _ = call("render", bad)
		assert.Equal(t, st, statusRequest)
	}
	st, out := call("render", request)
	assert.Equal(t, st, statusOK)
	assert.Equal(t, out, "<&>")
	st, _ = call("render", strings.Replace(request, "<&>", "123456", 1))
	assert.Equal(t, st, statusLimit)
	st, _ = call("render", strings.Replace(request, "1000", "1", 1))
	assert.Equal(t, st, statusLimit)
}
