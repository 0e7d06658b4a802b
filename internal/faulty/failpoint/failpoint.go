//go:build faulty

// Package failpoint lets a worker process die, stop or fail at a step that a
// test names. It exists only with the build tag faulty; in a release the calls
// are empty functions (see fail.go in package worker).
package failpoint

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
)

// ErrFailed is what a point with the action "fail" returns.
var ErrFailed = errors.New("failed on purpose")

type armed struct {
	action string
	left   int // hits until it happens
}

var (
	mu     sync.Mutex
	points = map[string]*armed{}
)

// Arm sets points, each "name=action" or "name=action@n" for the n-th time that
// the point is passed (1 is the first). Actions are kill, stop, exit, fail, and
// reset, which breaks every TCP connection of the process.
func Arm(specs []string) error {
	mu.Lock()
	defer mu.Unlock()
	for _, s := range specs {
		name, action, ok := strings.Cut(s, "=")
		action, nth, counted := strings.Cut(action, "@")
		n := 1
		if counted {
			var err error
			if n, err = strconv.Atoi(nth); err != nil {
				return fmt.Errorf("failpoint %q: %w", s, err)
			}
		}
		if !ok || n < 1 || !slices.Contains([]string{"kill", "stop", "exit", "fail", "reset"}, action) {
			return fmt.Errorf("failpoint %q is not name=action@n", s)
		}
		points[name] = &armed{action, n}
	}
	return nil
}

// Hit passes a point. It returns ErrFailed if the point was armed to fail.
func Hit(name string) error {
	mu.Lock()
	p := points[name]
	now := false
	if p != nil {
		p.left--
		now = p.left == 0
	}
	mu.Unlock()
	if !now {
		return nil
	}
	switch p.action {
	case "kill":
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	case "stop":
		_ = syscall.Kill(os.Getpid(), syscall.SIGSTOP)
		return nil
	case "exit":
		os.Exit(1)
	case "reset":
		reset()
		return nil
	}
	return ErrFailed
}

// reset shuts the TCP connections of the process down, in both directions.
func reset() {
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		panic(err)
	}
	for _, f := range fds {
		fd, err := strconv.Atoi(f.Name())
		if err != nil {
			continue
		}
		if peer, err := syscall.Getpeername(fd); err == nil {
			if _, tcp := peer.(*syscall.SockaddrInet4); tcp {
				_ = syscall.Shutdown(fd, syscall.SHUT_RDWR)
			}
		}
	}
}
