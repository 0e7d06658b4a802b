//go:build profile

package main

import (
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/pprof"
	"syscall"
)

// A build for benchmarks profiles itself when it is told to, into the folder that
// BULKHEAD_PROFILE names: SIGUSR1 begins a CPU profile, SIGUSR2 ends it and
// writes one of the memory beside it. No release has this.
func init() {
	dir := os.Getenv("BULKHEAD_PROFILE")
	if dir == "" {
		return
	}
	c := make(chan os.Signal, 2)
	signal.Notify(c, syscall.SIGUSR1, syscall.SIGUSR2)
	go func() {
		var cpu *os.File
		for s := range c {
			err := error(nil)
			if s == syscall.SIGUSR1 {
				if cpu, err = os.Create(filepath.Join(dir, "cpu.pprof")); err == nil {
					err = pprof.StartCPUProfile(cpu)
				}
			} else {
				pprof.StopCPUProfile()
				err = cpu.Close()
				if heap, errHeap := os.Create(filepath.Join(dir, "heap.pprof")); errHeap == nil {
					runtime.GC()
					_ = pprof.WriteHeapProfile(heap)
					_ = heap.Close()
				}
			}
			if err != nil {
				fmt.Fprintln(os.Stderr, "profile:", err)
			}
		}
	}()
}
