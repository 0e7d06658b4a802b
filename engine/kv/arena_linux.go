package kv

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Memory is what an arena is made of.
type Memory uint8

const (
	// Anonymous memory belongs to this process alone.
	Anonymous Memory = iota
	// Memfd memory has a descriptor, closed on exec, whose size is sealed. No
	// name for it exists anywhere.
	Memfd
)

// ArenaInfo says how much of the wanted protection the kernel granted. The
// errors are for a warning: the arena works without.
type ArenaInfo struct {
	Bytes  int
	Memory Memory
	// Locked means that pages never reach swap. LockErr says why not.
	Locked  bool
	LockErr error
	// DumpErr is set where pages could appear in a core dump.
	DumpErr error
	// MergeErr is set where the kernel could merge equal pages of two
	// processes, which would let one time what the other holds.
	MergeErr error
}

// arena is one mapping outside the Go heap. It never moves, so addresses into
// it stay good until close.
type arena struct {
	mem  []byte
	fd   int // -1 if anonymous
	info ArenaInfo
}

func newArena(size int, kind Memory, lock bool) (*arena, error) {
	a := &arena{fd: -1, info: ArenaInfo{Bytes: size, Memory: kind}}
	flags := unix.MAP_PRIVATE | unix.MAP_ANON
	switch kind {
	case Anonymous:
	case Memfd:
		fd, err := unix.MemfdCreate("bulkhead-kv", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
		if err != nil {
			return nil, fmt.Errorf("create memfd: %w", err)
		}
		a.fd = fd
		if err := unix.Ftruncate(fd, int64(size)); err != nil {
			return nil, errors.Join(fmt.Errorf("size memfd: %w", err), unix.Close(fd))
		}
		flags = unix.MAP_SHARED
	default:
		return nil, fmt.Errorf("%w: memory kind %d", ErrConfig, kind)
	}
	mem, err := unix.Mmap(a.fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, flags)
	if err != nil {
		if a.fd >= 0 {
			err = errors.Join(err, unix.Close(a.fd))
		}
		return nil, fmt.Errorf("map %d bytes for pages: %w", size, err)
	}
	a.mem = mem
	if a.fd >= 0 {
		// The mapping above stays writable; every later one is read only.
		seals := unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_FUTURE_WRITE | unix.F_SEAL_SEAL
		if _, err := unix.FcntlInt(uintptr(a.fd), unix.F_ADD_SEALS, seals); err != nil {
			return nil, errors.Join(fmt.Errorf("seal memfd: %w", err), a.close())
		}
	}
	if err := unix.Madvise(mem, unix.MADV_DONTDUMP); err != nil {
		a.info.DumpErr = fmt.Errorf("exclude pages from core dumps: %w", err)
	}
	// EINVAL: this kernel cannot merge pages at all.
	if err := unix.Madvise(mem, unix.MADV_UNMERGEABLE); err != nil && !errors.Is(err, unix.EINVAL) {
		a.info.MergeErr = fmt.Errorf("exclude pages from merging: %w", err)
	}
	if lock {
		if err := unix.Mlock(mem); err != nil {
			a.info.LockErr = fmt.Errorf("lock pages in memory: %w", err)
		} else {
			a.info.Locked = true
		}
	}
	return a, nil
}

func (a *arena) close() error {
	err := unix.Munmap(a.mem)
	a.mem = nil
	if a.fd >= 0 {
		err = errors.Join(err, unix.Close(a.fd))
		a.fd = -1
	}
	return err
}
