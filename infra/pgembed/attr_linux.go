package pgembed

import "syscall"

// sysProcAttr starts a process that gets signal when its starting thread ends.
func sysProcAttr(c *syscall.Credential, signal syscall.Signal) *syscall.SysProcAttr {
	return &syscall.SysProcAttr{
		Credential: c,
		Pdeathsig:  signal,
		// Its own group: Ctrl-C in a terminal reaches this process, which stops
		// the server when nothing needs it any more.
		Setpgid: true,
	}
}
