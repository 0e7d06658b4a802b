//go:build unix && !linux

package pgembed

import "syscall"

// sysProcAttr: where there is no signal on the death of a parent, a server
// whose parent was killed lives on until the next start stops at its lock.
func sysProcAttr(c *syscall.Credential, _ syscall.Signal) *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Credential: c, Setpgid: true}
}
