package harden

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Apply sets the size limit of core dumps to 0, for good, and marks the process
// as not dumpable. Only the kernel and a user with CAP_SYS_PTRACE can then read
// its memory. The error says what the kernel did not grant.
func Apply() error {
	var errs []error
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}); err != nil {
		errs = append(errs, fmt.Errorf("limit core dumps: %w", err))
	}
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		errs = append(errs, fmt.Errorf("forbid dumps: %w", err))
	}
	return errors.Join(errs...)
}
