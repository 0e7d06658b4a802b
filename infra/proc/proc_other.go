//go:build !linux

package proc

import (
	"os"
	"syscall"
)

// Elsewhere there is no death signal: a child of a parent that was killed with
// SIGKILL notices it by its parent's id (see AdoptBoot).
func sysProcAttr() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

// AdoptBoot checks that the process with the given id is still the parent.
func AdoptBoot(parent int) bool { return os.Getppid() == parent }
