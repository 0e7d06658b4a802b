package proc

import (
	"os"
	"syscall"
)

func sysProcAttr() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{
		Pdeathsig: syscall.SIGKILL,
		// Its own group: Ctrl-C in a terminal reaches the parent, which drains
		// and then stops its children in order.
		Setpgid: true,
	}
}

// AdoptBoot checks that the process with the given id is still the parent, so
// that a child which was created while its parent died does not live on.
func AdoptBoot(parent int) bool { return os.Getppid() == parent }
