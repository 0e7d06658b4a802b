//go:build unix

package compute

import "golang.org/x/sys/unix"

// newArena maps anonymous memory, on huge pages where the kernel has them:
// decoding reads every weight once a token.
func newArena(n int) (*arena, error) {
	const huge = 2 << 20
	mem, err := unix.Mmap(-1, 0, (n+huge-1)/huge*huge, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, err
	}
	adviseHuge(mem)
	return &arena{mem: mem}, nil
}

func (a *arena) free() {
	if a.mem != nil {
		_ = unix.Munmap(a.mem)
		a.mem = nil
	}
}
