package harden

import (
	"testing"

	"golang.org/x/sys/unix"

	"bulkhead.dev/infra/assert"
)

func TestApply(t *testing.T) {
	assert.NoError(t, Apply())
	var l unix.Rlimit
	assert.NoError(t, unix.Getrlimit(unix.RLIMIT_CORE, &l))
	assert.Equal(t, l, unix.Rlimit{})
	dumpable, err := unix.PrctlRetInt(unix.PR_GET_DUMPABLE, 0, 0, 0, 0)
	assert.NoError(t, err)
	assert.Equal(t, dumpable, 0)
}
