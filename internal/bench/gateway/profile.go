package main

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// profileOf begins a CPU profile of the gateway, if one is wanted, and returns
// what ends it.
func (b *bench) profileOf(p *platform) (stop func() error, err error) {
	if b.profile == "" {
		return func() error { return nil }, nil
	}
	if err := p.cmd.Process.Signal(syscall.SIGUSR1); err != nil {
		return nil, fmt.Errorf("begin profile: %w", err)
	}
	return func() error {
		heap := filepath.Join(b.profileDir, "heap.pprof")
		_ = os.Remove(heap) // of a phase before
		if err := p.cmd.Process.Signal(syscall.SIGUSR2); err != nil {
			return fmt.Errorf("end profile: %w", err)
		}
		// The gateway writes this one last.
		for range 100 {
			if info, err := os.Stat(heap); err == nil && info.Size() > 0 {
				break
			}
			time.Sleep(50 * time.Millisecond)
		}
		b.profiled++
		for _, name := range []string{"cpu", "heap"} {
			if err := os.Rename(filepath.Join(b.profileDir, name+".pprof"), filepath.Join(b.profileDir, fmt.Sprintf("%s-%d.pprof", name, b.profiled))); err != nil {
				return fmt.Errorf("keep profile: %w", err)
			}
		}
		return nil
	}, nil
}
