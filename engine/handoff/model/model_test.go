package model

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"bulkhead.dev/engine/kv"
	"bulkhead.dev/infra/assert"
)

// errorsOf searches a model and returns how many errors were found. pan exits
// with 0 either way; the number is in its report.
func errorsOf(t *testing.T, model string) string {
	t.Helper()
	dir := t.TempDir()
	run := func(name string, args ...string) []byte {
		cmd := exec.CommandContext(t.Context(), name, args...)
		cmd.Dir = dir
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v\n%s", name, err, out)
		}
		return out
	}
	assert.NoError(t, os.WriteFile(filepath.Join(dir, "m.pml"), []byte(model), 0o600))
	assert.NoError(t, os.WriteFile(filepath.Join(dir, "pages.pml"), []byte(pages()), 0o600))
	run("spin", "-a", "m.pml")
	run("cc", "-O2", "-w", "-DSAFETY", "-DCOLLAPSE", "-o", "pan", "pan.c")
	out := run("./pan", "-m100000", "-w22")
	if bytes.Contains(out, []byte("max search depth too small")) || !bytes.Contains(out, []byte("Full statespace search")) {
		t.Fatalf("the search was not exhaustive:\n%s", out)
	}
	m := regexp.MustCompile(`errors: (\d+)`).FindSubmatch(out)
	if m == nil {
		t.Fatalf("no report:\n%s", out)
	}
	return string(m[1])
}

// pages writes the states and steps of a page, as the code has them, for spin.
func pages() string {
	var b strings.Builder
	b.WriteString("/* Written out of kv.Transitions by this package's test (BULKHEAD_WRITE=1); not by hand. */\n")
	for s := kv.StateClean; s <= kv.StateScrubbing; s++ {
		fmt.Fprintf(&b, "#define %v %d\n", s, s)
	}
	for o := kv.OpGrant; o <= kv.OpScrubbed; o++ {
		fmt.Fprintf(&b, "#define op_%v %d\n", o, o)
	}
	b.WriteString("inline step(p, op) {\n    if\n")
	for _, tr := range kv.Transitions() {
		fmt.Fprintf(&b, "    :: pg[p].state == %v && op == op_%v -> pg[p].state = %v\n", tr.From, tr.Op, tr.To)
	}
	b.WriteString("    :: else -> assert(false)\n    fi\n}\n")
	return b.String()
}

// The file that readers see is what is searched.
func TestPagesAreThoseOfTheCode(t *testing.T) {
	t.Parallel()
	if os.Getenv("BULKHEAD_WRITE") != "" {
		assert.NoError(t, os.WriteFile("pages.pml", []byte(pages()), 0o644))
	}
	b, err := os.ReadFile("pages.pml")
	assert.NoError(t, err)
	assert.Equal(t, string(b), pages())
}

func TestModel(t *testing.T) {
	t.Parallel()
	for _, tool := range []string{"spin", "cc"} {
		if _, err := exec.LookPath(tool); err != nil {
			assert.Skip(t, tool+" is not installed")
		}
	}
	b, err := os.ReadFile("handoff.pml")
	assert.NoError(t, err)
	model := string(b)
	t.Run("as it is", func(t *testing.T) {
		t.Parallel()
		assert.Equal(t, errorsOf(t, model), "0")
	})
	for name, change := range map[string][2]string{
		"a page is freed under a hold":       {":: pg[p].holds == 0 -> step(p, op_free)\n        :: else -> step(p, op_quarantine)", ":: true -> step(p, op_free)"},
		"a page changes its owner unwiped":   {":: pg[p].owner != who -> pg[p].content = 0", ":: pg[p].owner != who -> skip"},
		"decode does not verify":             {":: served && c == r + 1 && cg == sg && !req[r].aborted ->", ":: served || c != 0 || true ->"},
		"a repeated offer is taken":          {":: offer[r]?_, _ -> skip", ":: offer[r]?sp, sg -> p = NONE; goto again"},
		"a page is given back by nobody":     {"    release(p);\ngone:", "    skip;\ngone:"},
		"an abort waits for an answer":       {":: req[r].aborted || dead -> break                                       /* an abort never waits for a timeout */\n", ""},
		"a quarantined page never comes out": {"pg[p].state == quarantined -> step(p, op_clear)", "pg[p].state == quarantined -> skip"},
		"a page is freed twice":              {"    release(p);\ngone:", "    release(p); release(p);\ngone:"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			broken := strings.Replace(model, change[0], change[1], 1)
			assert.True(t, broken != model)
			assert.True(t, errorsOf(t, broken) != "0")
		})
	}
}
