package assert

import (
	"os"
	"testing"
)

// EnvNoSkip names the variable under which a skipped test is a failed test.
// The continuous integration sets it, so that nothing is left out unnoticed.
const EnvNoSkip = "BULKHEAD_NO_SKIP"

// Skip skips the test with a reason, or fails it where EnvNoSkip is set.
func Skip(t testing.TB, reason string) {
	t.Helper()
	if os.Getenv(EnvNoSkip) == "1" {
		t.Fatalf("would skip, but %s=1: %s", EnvNoSkip, reason)
	}
	t.Skip(reason)
}

// SharedData returns the path of name inside the shared test data, which lies
// beside the checkout and is never committed. It skips the test where the data
// is absent. BULKHEAD_SHARED overrides the place.
func SharedData(t testing.TB, name string) string {
	t.Helper()
	return shared(t, "data/"+name)
}

func shared(t testing.TB, name string) string {
	t.Helper()
	roots := []string{os.Getenv("BULKHEAD_SHARED")}
	// A test runs in the folder of its package, at most five below the top.
	for up, n := "..", 0; n < 7; up, n = "../"+up, n+1 {
		roots = append(roots, up+"/shared")
	}
	for _, root := range roots {
		if root == "" {
			continue
		}
		if _, err := os.Stat(root + "/" + name); err == nil {
			return root + "/" + name
		}
	}
	Skip(t, "shared test data is absent: "+name)
	return ""
}
