package fabric

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/kv/kvtest"
	"bulkhead.dev/infra/assert"
)

// readerEnv makes the test binary a reader of the server at this address.
const readerEnv = "BULKHEAD_TEST_FABRIC_READER"

// readAsChild reads the pages that are named on stdin, stops in the middle of
// the first copy until the next line comes, and tells on stdout how far it is.
func readAsChild(addr string) error {
	in := bufio.NewReader(os.Stdin)
	line, err := in.ReadBytes('\n')
	if err != nil {
		return err
	}
	var refs []PageRef
	if err := json.Unmarshal(line, &refs); err != nil {
		return err
	}
	c, err := Dial(addr, nil)
	if err != nil {
		return err
	}
	defer c.Close()
	into := make(memory, len(refs))
	for i := range into {
		into[i] = make([]byte, kvtest.Geometry().PageBytes())
	}
	err = c.ReadPages(context.Background(), theTransfer, theSecret, refs, each{into, func(i int, page []byte) error {
		copy(into[i], page[:len(page)/2])
		if i == 0 {
			fmt.Println("copying", c.mapped != nil)
			if _, err := in.ReadBytes('\n'); err != nil {
				return err
			}
		}
		copy(into[i][len(page)/2:], page[len(page)/2:])
		return nil
	}})
	if err != nil {
		return err
	}
	fmt.Printf("read %x %v\n", into[0], c.Transport())
	_, err = in.ReadBytes('\n') // the connection stays open, idle
	return err
}

type reader struct {
	cmd *exec.Cmd
	in  io.Writer
	out *bufio.Reader
}

// startReader starts a process that reads all pages, and returns when it is in
// the middle of the first.
func (s *shop) startReader(t *testing.T) *reader {
	t.Helper()
	self, err := os.Executable()
	assert.NoError(t, err)
	r := &reader{cmd: exec.Command(self)}
	r.cmd.Env = append(os.Environ(), readerEnv+"="+s.addr)
	r.cmd.Stderr = os.Stderr
	r.in, err = r.cmd.StdinPipe()
	assert.NoError(t, err)
	out, err := r.cmd.StdoutPipe()
	assert.NoError(t, err)
	r.out = bufio.NewReader(out)
	assert.NoError(t, r.cmd.Start())
	t.Cleanup(func() {
		_ = r.cmd.Process.Kill()
		_ = r.cmd.Wait()
	})
	refs, err := json.Marshal(s.refs)
	assert.NoError(t, err)
	r.say(t, string(refs))
	assert.Equal(t, r.line(t), "copying true\n")
	return r
}

func (r *reader) say(t *testing.T, s string) {
	t.Helper()
	_, err := io.WriteString(r.in, s+"\n")
	assert.NoError(t, err)
}

func (r *reader) line(t *testing.T) string {
	t.Helper()
	s, err := r.out.ReadString('\n')
	assert.NoError(t, err)
	return s
}

// refused checks that the pages that are held cannot be promised to anybody,
// and that all others can.
func (s *shop) refused(t *testing.T) {
	t.Helper()
	free := s.pool.Stats().Pages - len(s.refs)
	_, err := s.pool.Reserve(kvtest.Owner(2), free+1)
	assert.Equal(t, assert.ErrorAs[kv.ErrExhausted](t, err).Free, free)
	credits, err := s.pool.Reserve(kvtest.Owner(2), free)
	assert.NoError(t, err)
	credits.Return()
}

// A reader that is stopped in the middle of a copy keeps its pages from being
// granted, for however long; when it goes on it reads what it was promised, and
// then they are free.
func TestStoppedReaderKeepsItsPages(t *testing.T) {
	t.Parallel()
	s := newShop(t, 40, shopOptions{})
	want := ""
	assert.NoError(t, s.sealed.View(s.refs[0], func(page []byte) error {
		want = fmt.Sprintf("read %x shm\n", page)
		return nil
	}))
	r := s.startReader(t)
	assert.NoError(t, r.cmd.Process.Signal(unix.SIGSTOP))
	s.release()
	for range 50 {
		s.held(t)
		s.refused(t)
		time.Sleep(time.Millisecond)
	}
	assert.NoError(t, r.cmd.Process.Signal(unix.SIGCONT))
	s.held(t)
	r.say(t, "go on")
	assert.Equal(t, r.line(t), want)
	s.freed(t)
	assert.Equal(t, s.pool.Stats().Free, s.pool.Stats().Pages)
}

// A reader that is killed in the middle of a copy is proven to be gone.
func TestKilledReaderFreesItsPages(t *testing.T) {
	t.Parallel()
	for _, stopped := range []bool{false, true} {
		s := newShop(t, 40, shopOptions{})
		r := s.startReader(t)
		if stopped {
			assert.NoError(t, r.cmd.Process.Signal(unix.SIGSTOP))
		}
		s.release()
		s.held(t)
		s.refused(t)
		assert.NoError(t, r.cmd.Process.Signal(unix.SIGKILL))
		s.freed(t)
		assert.Equal(t, s.server.Lent(), 0)
	}
}
