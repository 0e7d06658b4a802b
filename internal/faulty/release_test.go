// Package faulty has what breaks on purpose. This test sees to it that nothing
// of it is in a release.
package faulty

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"bulkhead.dev/infra/assert"
)

// No package of a release imports anything that can take a wall down, and the
// binary has no symbol of it. With the tag it would have.
func TestReleasesHaveNoFaults(t *testing.T) {
	t.Parallel()
	deps := func(tags, pkg string) string {
		out, err := exec.Command("go", "list", "-deps", "-tags", tags, pkg).CombinedOutput()
		assert.NoError(t, err)
		return string(out)
	}
	assert.False(t, strings.Contains(deps("", "bulkhead.dev/cmd/bulkhead"), "bulkhead.dev/internal/"))
	assert.True(t, strings.Contains(deps("faulty", "bulkhead.dev/cmd/bulkhead"), "bulkhead.dev/internal/faulty/walls"))

	symbols := func(tags string) string {
		bin := filepath.Join(t.TempDir(), "bulkhead")
		out, err := exec.Command("go", "build", "-tags", tags, "-o", bin, "bulkhead.dev/cmd/bulkhead").CombinedOutput()
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		b, err := exec.Command("go", "tool", "nm", bin).Output()
		assert.NoError(t, err)
		return string(b)
	}
	for _, s := range []string{"internal/faulty", "Blindly", "BlindSink", "failingReader"} {
		assert.False(t, strings.Contains(symbols(""), s))
	}
	assert.True(t, strings.Contains(symbols("faulty"), "internal/faulty"))
}
