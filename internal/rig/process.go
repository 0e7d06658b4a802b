package rig

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/pool"
	"bulkhead.dev/engine/worker"
	"bulkhead.dev/engine/worker/peer"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/infra/proc"
)

// Program is what a worker process runs until ctx ends. args are Options.Args.
type Program func(ctx context.Context, boot worker.Boot, args []string, log *slog.Logger) error

// mark says that a process is a worker of a rig.
const mark = "rig-worker"

// Main runs a worker, and does not return, if this process was started as one.
// Every program that starts a rig calls it first. programs are what Options may
// name besides the worker as it is released.
func Main(programs map[string]Program) {
	if len(os.Args) < 4 || os.Args[1] != mark {
		return
	}
	if err := workerMain(programs, os.Args[2], os.Args[3], os.Args[4:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func workerMain(programs map[string]Program, parent, name string, args []string) error {
	pid, err := strconv.Atoi(parent)
	if err != nil || !proc.AdoptBoot(pid) {
		return fmt.Errorf("the rig %s is gone", parent)
	}
	doc, err := proc.ReadBoot()
	if err != nil {
		return err
	}
	boot, err := worker.ParseBoot(doc)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	log := slog.New(slog.NewJSONHandler(os.Stderr, nil))
	if name == "-" {
		return worker.Run(ctx, boot, log)
	}
	program, ok := programs[name]
	if !ok {
		return fmt.Errorf("there is no program %q", name)
	}
	return program(ctx, boot, args, log)
}

// Process is a worker process of a rig. It can be started again after it died.
type Process struct {
	// Args are given to the program at the next start.
	Args []string

	r      *Rig
	role   peer.Role
	name   string
	change func(*worker.Boot)
	boot   worker.Boot
	logs   *os.File

	mu    sync.Mutex
	child *proc.Child
	epoch id.Epoch
	tail  []byte
	lost  chan struct{} // closes when the registry was told of the end
}

func (r *Rig) process(role peer.Role, program string, change func(*worker.Boot), o Options) *Process {
	if program == "" {
		program = "-"
	}
	return &Process{r: r, role: role, name: program, Args: o.Args, change: change, logs: o.Logs, boot: worker.Boot{
		Role: role, ModelPath: o.Model, ModelDigest: r.Digest.String(), Front: "unix:" + r.front(),
		Pages: 2 * (r.window/kv.PageTokens + 1), KVType: "f16", MaxRunning: 16, Queue: 64, PerTenant: 64, Build: "rig",
		DrainFor: worker.Span(time.Second),
	}}
}

// Start starts the process, with a new epoch.
func (p *Process) Start() error {
	boot, epoch := p.boot, id.NewEpoch(time.Now())
	boot.Epoch = epoch.String()
	var err error
	if boot.Credentials, err = p.r.authority.Issue(peer.Worker(p.role, epoch)); err != nil {
		return err
	}
	name := filepath.Join(p.r.dir, fmt.Sprintf("%s-%x", string(p.role)[:1], epoch[10:]))
	boot.Listen = "unix:" + name
	if p.role == peer.Prefill {
		boot.FabricListen, boot.Chunk = "unix:"+name+"f", 128
	}
	if p.change != nil {
		p.change(&boot)
	}
	doc, err := json.Marshal(boot)
	if err != nil {
		return fmt.Errorf("encode boot document: %w", err)
	}
	exe, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	out, in, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("make a pipe: %w", err)
	}
	args := append([]string{mark, strconv.Itoa(os.Getpid()), p.name}, p.Args...)
	child, err := proc.Start(proc.Spec{Path: exe, Args: args, Boot: doc, Stderr: in})
	_ = in.Close()
	if err != nil {
		_ = out.Close()
		return err
	}
	lost := make(chan struct{})
	p.mu.Lock()
	p.child, p.epoch, p.lost, p.tail = child, epoch, lost, nil
	p.mu.Unlock()
	go func() {
		defer close(lost)
		p.relay(out)
		<-child.Done()
		p.r.Registry.Lost(epoch)
	}()
	return nil
}

// relay copies what the process writes, and keeps the last of it.
func (p *Process) relay(out *os.File) {
	defer out.Close()
	buf := make([]byte, 4096)
	for {
		n, err := out.Read(buf)
		if p.logs != nil {
			_, _ = p.logs.Write(buf[:n])
		}
		p.mu.Lock()
		p.tail = append(p.tail, buf[:n]...)
		p.tail = bytes.Clone(p.tail[max(0, len(p.tail)-8192):])
		p.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// LastLine returns the last line that the process wrote.
func (p *Process) LastLine() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	lines := strings.Split(strings.TrimSpace(string(p.tail)), "\n")
	return lines[len(lines)-1]
}

// PID returns the process id.
func (p *Process) PID() int { return p.current().PID() }

// Epoch returns the epoch of the running process.
func (p *Process) Epoch() id.Epoch {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.epoch
}

// Done closes when the process has ended and the registry knows.
func (p *Process) Done() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.lost
}

// Signal sends a signal.
func (p *Process) Signal(s syscall.Signal) error { return syscall.Kill(p.PID(), s) }

// Kill ends the process at once and waits until the registry knows.
func (p *Process) Kill() {
	if c := p.current(); c != nil {
		c.Kill()
		<-p.Done()
	}
}

func (p *Process) current() *proc.Child {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.child
}

// Pages returns the pages by state that the worker reported last, nil before the
// first report.
func (p *Process) Pages() map[string]int {
	for _, s := range p.r.Registry.Workers() {
		if s.Worker.Epoch == p.Epoch() && s.Worker.Role == pool.Role(p.role) && s.Heartbeat != nil {
			out := map[string]int{}
			for _, c := range s.Heartbeat.GetPages() {
				out[c.GetState()] = int(c.GetPages())
			}
			return out
		}
	}
	return nil
}
