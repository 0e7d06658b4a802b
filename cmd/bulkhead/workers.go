package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"bulkhead.dev/engine/pool"
	"bulkhead.dev/engine/worker"
	"bulkhead.dev/engine/worker/peer"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/infra/proc"
)

const (
	// A worker that dies is started again after a pause that doubles up to the
	// longest one; a worker that lived for backoffReset starts over.
	backoffFirst = 100 * time.Millisecond
	backoffMax   = 5 * time.Second
	backoffReset = 30 * time.Second
	// startsBeforeReady is how often a worker may die before the platform was
	// ready once; then it is the set-up that is wrong, and saying so beats
	// trying for ever.
	startsBeforeReady = 2
)

// keeper keeps one worker process alive: when it dies it is started again with
// a new epoch.
type keeper struct {
	role      peer.Role
	boot      worker.Boot // without epoch and credentials
	authority *peer.Authority
	registry  *pool.Registry
	restarted func(role string)
	ready     *atomic.Bool // the platform was ready once
	log       *slog.Logger
	exe       string
	args      []string
	sockets   string // folder for the sockets of each epoch
	grace     time.Duration

	mu    sync.Mutex
	child *proc.Child
}

// PID returns the process id of the running worker, 0 between two.
func (k *keeper) PID() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.child == nil {
		return 0
	}
	return k.child.PID()
}

// Run keeps a worker alive until ctx ends, and then stops it. It returns an
// error if workers die before the platform was ever ready.
func (k *keeper) Run(ctx context.Context) error {
	pause := backoffFirst
	for starts := 1; ; starts++ {
		began := time.Now()
		last, err := k.once(ctx)
		if ctx.Err() != nil {
			return nil //nolint:nilerr // it ended because it was told to
		}
		if !k.ready.Load() && starts >= startsBeforeReady {
			return fmt.Errorf("the %s worker cannot start: %s", k.role, why(last, err))
		}
		k.log.WarnContext(ctx, "worker ended, starting another", "role", string(k.role), "cause", why(last, err))
		k.restarted(string(k.role))
		if time.Since(began) > backoffReset {
			pause = backoffFirst
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return nil
		}
		pause = min(2*pause, backoffMax)
	}
}

// once runs one worker from start to end. It returns the last line it wrote.
func (k *keeper) once(ctx context.Context) (last string, err error) {
	boot, epoch := k.boot, id.NewEpoch(time.Now())
	boot.Epoch = epoch.String()
	if boot.Credentials, err = k.authority.Issue(peer.Worker(k.role, epoch)); err != nil {
		return "", fmt.Errorf("issue certificate: %w", err)
	}
	name := fmt.Sprintf("%s/%s-%x", k.sockets, string(k.role)[:1], epoch[10:])
	boot.Listen = "unix:" + name
	if k.role == peer.Prefill {
		boot.FabricListen = "unix:" + name + "f"
	}
	doc, err := json.Marshal(boot)
	if err != nil {
		return "", fmt.Errorf("encode boot document: %w", err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		return "", fmt.Errorf("make pipe for the worker's log: %w", err)
	}
	child, err := proc.Start(proc.Spec{Path: k.exe, Args: k.args, Env: []string{}, Boot: doc, Stderr: w})
	clear(doc)
	_ = w.Close() // the child has its own
	if err != nil {
		_ = r.Close()
		return "", err
	}
	k.set(child)
	defer k.set(nil)
	tail := make(chan string, 1)
	go func() { tail <- relay(r, os.Stderr) }()
	select {
	case <-child.Done():
	case <-ctx.Done():
		stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), k.grace)
		child.Stop(stop)
		cancel()
	}
	k.registry.Lost(epoch) // it was reaped: that is proof
	_ = os.Remove(name)
	_ = os.Remove(name + "f")
	return <-tail, child.Err()
}

func (k *keeper) set(c *proc.Child) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.child = c
}

// Kill ends the running worker at once.
func (k *keeper) Kill() {
	k.mu.Lock()
	c := k.child
	k.mu.Unlock()
	if c != nil {
		c.Kill()
	}
}

// relay copies what a worker writes and returns the last line of it.
func relay(r *os.File, w io.Writer) string {
	defer r.Close()
	var tail []byte
	buf := make([]byte, 4096)
	for {
		n, err := r.Read(buf)
		_, _ = w.Write(buf[:n])
		tail = append(tail, buf[:n]...)
		if len(tail) > tailBytes {
			tail = bytes.Clone(tail[len(tail)-tailBytes:])
		}
		if err != nil {
			lines := strings.Split(strings.TrimSpace(string(tail)), "\n")
			return lines[len(lines)-1]
		}
	}
}

// tailBytes is enough for the last line of a log.
const tailBytes = 4096

// why is one line about the end of a worker.
func why(last string, err error) string {
	switch {
	case last != "":
		return strings.TrimPrefix(last, "bulkhead: ")
	case err != nil:
		return err.Error()
	}
	return "it ended without a word"
}
