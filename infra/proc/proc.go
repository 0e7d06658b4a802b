package proc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"time"
)

// BootFD is the descriptor on which a child finds its boot document.
const BootFD = 3

// maxBoot bounds a boot document: certificates and settings, no data.
const maxBoot = 1 << 20

// Spec says how to start a child.
type Spec struct {
	Path   string   // absolute path of the program
	Args   []string // without the program's name
	Env    []string // the whole environment
	Dir    string   // working folder; "" is the parent's
	Boot   []byte   // the boot document; the caller may overwrite it after Start
	Stderr *os.File // "" is the parent's
}

// Child is a running child process.
type Child struct {
	cmd  *exec.Cmd
	done chan struct{}
	err  error // set before done closes
}

// Start starts a child. It returns when the program is running, not when it is
// ready.
func Start(spec Spec) (*Child, error) {
	if len(spec.Boot) > maxBoot {
		return nil, fmt.Errorf("boot document of %d bytes is over the limit of %d", len(spec.Boot), maxBoot)
	}
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("make boot pipe: %w", err)
	}
	cmd := exec.Command(spec.Path, spec.Args...)
	cmd.Env = spec.Env
	if cmd.Env == nil {
		cmd.Env = []string{} // nil would mean the parent's
	}
	cmd.Dir = spec.Dir
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	if spec.Stderr != nil {
		cmd.Stdout, cmd.Stderr = spec.Stderr, spec.Stderr
	}
	cmd.ExtraFiles = []*os.File{r}
	cmd.SysProcAttr = sysProcAttr()
	err = spawn(cmd)
	_ = r.Close()
	if err != nil {
		_ = w.Close()
		return nil, fmt.Errorf("start %s: %w", spec.Path, err)
	}
	c := &Child{cmd: cmd, done: make(chan struct{})}
	go func() {
		c.err = cmd.Wait()
		close(c.done)
	}()
	// A child that dies before it has read its document breaks the pipe; its
	// exit tells more than that error does.
	_, errWrite := w.Write(spec.Boot)
	if err := w.Close(); errWrite == nil {
		errWrite = err
	}
	if errWrite != nil && !errors.Is(errWrite, syscall.EPIPE) {
		c.Kill()
		return nil, fmt.Errorf("send boot document: %w", errWrite)
	}
	return c, nil
}

// PID returns the process id. It may belong to another process once Done has
// closed.
func (c *Child) PID() int { return c.cmd.Process.Pid }

// Done closes when the child was reaped.
func (c *Child) Done() <-chan struct{} { return c.done }

// Err returns how the child ended: nil for exit status 0. Call it after Done.
func (c *Child) Err() error {
	<-c.done
	return c.err
}

// Kill ends the child at once and waits until it was reaped.
func (c *Child) Kill() {
	_ = c.cmd.Process.Kill() // an error means that it has ended already
	<-c.done
}

// Stop asks the child to end and waits; when ctx ends first, it kills it. It
// reports whether the child ended by itself.
func (c *Child) Stop(ctx context.Context) bool {
	_ = c.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-c.done:
		return true
	case <-ctx.Done():
		c.Kill()
		return false
	}
}

// ReadBoot reads the boot document of this process and closes the pipe. It is
// for children only.
func ReadBoot() ([]byte, error) {
	f := os.NewFile(BootFD, "boot")
	if f == nil {
		return nil, errors.New("no boot document: this command is started by `bulkhead up`, not by hand")
	}
	defer f.Close()
	// A person who starts a worker by hand gets an error, not a hang: the
	// descriptor is then closed, or a terminal or file that is not a pipe.
	if fi, err := f.Stat(); err != nil || fi.Mode()&os.ModeNamedPipe == 0 {
		return nil, errors.New("no boot document: this command is started by `bulkhead up`, not by hand")
	}
	if err := f.SetReadDeadline(time.Now().Add(bootTimeout)); err != nil && !errors.Is(err, os.ErrNoDeadline) {
		return nil, fmt.Errorf("read boot document: %w", err)
	}
	b, err := io.ReadAll(io.LimitReader(f, maxBoot+1))
	if err != nil {
		return nil, fmt.Errorf("read boot document: %w", err)
	}
	if len(b) == 0 || len(b) > maxBoot {
		return nil, fmt.Errorf("boot document has %d bytes", len(b))
	}
	return b, nil
}

// bootTimeout bounds the wait for a parent that has the pipe open and says
// nothing.
const bootTimeout = 10 * time.Second

// spawner creates every child on one thread that lives as long as the process.
var spawner struct {
	once sync.Once
	work chan func()
}

func spawn(cmd *exec.Cmd) error {
	spawner.once.Do(func() {
		spawner.work = make(chan func())
		go func() {
			runtime.LockOSThread() // never unlocked
			for f := range spawner.work {
				f()
			}
		}()
	})
	done := make(chan error)
	spawner.work <- func() { done <- cmd.Start() }
	return <-done
}
