package faulty

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"bulkhead.dev/infra/assert"
)

// Every known case has a row, and every test and fault that a row names exists.
func TestKnownCases(t *testing.T) {
	t.Parallel()
	const root = "../.."
	tests := map[string]bool{}
	assert.NoError(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		b, err := os.ReadFile(path)
		for _, m := range regexp.MustCompile(`(?m)^func (Test\w+)\(t`).FindAllSubmatch(b, -1) {
			tests[string(m[1])] = true
		}
		return err
	}))
	script, err := os.ReadFile(filepath.Join(root, "infra/tools/mutate.py"))
	assert.NoError(t, err)
	faults := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^    \("([a-z0-9-]+)"`).FindAllSubmatch(script, -1) {
		faults[string(m[1])] = true
	}
	page, err := os.ReadFile(filepath.Join(root, "docs/isolation/cases.md"))
	assert.NoError(t, err)
	next := 1
	for line := range strings.SplitSeq(string(page), "\n") {
		cells := strings.Split(line, " | ")
		n, err := strconv.Atoi(strings.TrimPrefix(cells[0], "| "))
		if err != nil {
			continue
		}
		assert.Equal(t, n, next)
		next++
		named := regexp.MustCompile(`Test\w+`).FindAllString(cells[3], -1)
		if len(named) == 0 && !strings.Contains(cells[3], "*foreign*") && !strings.Contains(cells[3], "as ") {
			t.Errorf("case %d has no test", n)
		}
		for _, name := range named {
			if !tests[name] {
				t.Errorf("case %d names %s, which does not exist", n, name)
			}
		}
		for name := range strings.SplitSeq(strings.Trim(cells[len(cells)-1], " |"), ", ") {
			if name != "" && !faults[name] {
				t.Errorf("case %d names the fault %q, which does not exist", n, name)
			}
		}
	}
	assert.Equal(t, next, 49)
}
