package proc_test

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/proc"
)

// The test binary is its own child: TEST_ROLE picks what it does.
func TestMain(m *testing.M) {
	switch os.Getenv("TEST_ROLE") {
	case "report": // print what the child sees
		b, err := proc.ReadBoot()
		fmt.Printf("boot=%s err=%v env=%d args=%d\n", b, err, len(os.Environ()), len(os.Args))
		os.Exit(0)
	case "sleep":
		time.Sleep(time.Hour)
	case "parent": // start a sleeping child and hang
		c, err := proc.Start(proc.Spec{Path: os.Args[0], Env: []string{"TEST_ROLE=sleep"}})
		if err != nil {
			panic(err)
		}
		fmt.Println(c.PID())
		time.Sleep(time.Hour)
	}
	os.Exit(m.Run())
}

func TestChildSeesOnlyWhatItIsGiven(t *testing.T) {
	t.Parallel()
	out, err := os.CreateTemp(t.TempDir(), "out")
	assert.NoError(t, err)
	c, err := proc.Start(proc.Spec{Path: os.Args[0], Env: []string{"TEST_ROLE=report"}, Boot: []byte("the secret"), Stderr: out})
	assert.NoError(t, err)
	assert.NoError(t, c.Err())
	b, err := os.ReadFile(out.Name())
	assert.NoError(t, err)
	assert.Equal(t, strings.TrimSpace(string(b)), "boot=the secret err=<nil> env=1 args=1")
}

func TestReadBootByHand(t *testing.T) {
	t.Parallel()
	cmd := exec.Command(os.Args[0])
	cmd.Env = []string{"TEST_ROLE=report"}
	out, err := cmd.Output()
	assert.NoError(t, err)
	assert.True(t, strings.Contains(string(out), "started by `bulkhead up`"))
}

func TestStop(t *testing.T) {
	t.Parallel()
	c, err := proc.Start(proc.Spec{Path: os.Args[0], Env: []string{"TEST_ROLE=sleep"}})
	assert.NoError(t, err)
	assert.True(t, c.Stop(t.Context()))
	assert.False(t, alive(c.PID()))
}

func TestStopKillsAtTheDeadline(t *testing.T) {
	t.Parallel()
	c, err := proc.Start(proc.Spec{Path: "/bin/sh", Args: []string{"-c", "trap '' TERM; while :; do sleep 1; done"}})
	assert.NoError(t, err)
	time.Sleep(50 * time.Millisecond) // the shell sets its trap; too early a signal only makes the test pass by another way
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	c.Stop(ctx)
	assert.False(t, alive(c.PID()))
}

// A child dies with its parent even if the parent had no time to say goodbye.
func TestChildDiesWithKilledParent(t *testing.T) {
	t.Parallel()
	cmd := exec.Command(os.Args[0])
	cmd.Env = []string{"TEST_ROLE=parent"}
	out, err := cmd.StdoutPipe()
	assert.NoError(t, err)
	assert.NoError(t, cmd.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	assert.NoError(t, err)
	pid, err := strconv.Atoi(strings.TrimSpace(line))
	assert.NoError(t, err)
	assert.True(t, alive(pid))
	assert.NoError(t, cmd.Process.Kill())
	_ = cmd.Wait()
	for range 500 {
		if !alive(pid) {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatalf("child %d lives on after its parent was killed", pid)
}

// alive reports whether the process runs; a zombie that nobody reaps is dead.
func alive(pid int) bool {
	if syscall.Kill(pid, 0) != nil {
		return false
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	return !strings.HasPrefix(rest, "Z")
}
