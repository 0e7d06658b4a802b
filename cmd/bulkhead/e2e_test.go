package main_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"bulkhead.dev/engine/model/gguf"
	"bulkhead.dev/engine/model/synth"
	"bulkhead.dev/infra/assert"
)

// These tests start the real program with real workers and a real PostgreSQL,
// and speak to it over its sockets.

var built struct {
	once sync.Once
	path string
	err  error
}

// program returns the program under test: BULKHEAD_TEST_BINARY, or one that is
// built for the tests.
func program(t testing.TB) string {
	t.Helper()
	built.once.Do(func() {
		if built.path = os.Getenv("BULKHEAD_TEST_BINARY"); built.path != "" {
			return
		}
		dir, err := os.MkdirTemp("", "bulkhead-e2e-")
		if err != nil {
			built.err = err
			return
		}
		built.path = filepath.Join(dir, "bulkhead")
		out, err := exec.Command("go", "build", "-o", built.path, ".").CombinedOutput()
		if err != nil {
			built.err = fmt.Errorf("build: %w\n%s", err, out)
		}
	})
	assert.NoError(t, built.err)
	return built.path
}

// scratch returns a folder that the database's own user can reach, as
// t.TempDir's folders are not for everybody.
func scratch(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "bh-")
	assert.NoError(t, err)
	assert.NoError(t, os.Chmod(dir, 0o711))
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// randomModel writes a small model with random weights. It answers at once and
// with nonsense: greedily, "hello" gets more than 3,900 tokens.
func randomModel(t testing.TB, dir string) string {
	t.Helper()
	b := synth.RandomLlama(1, synth.Shape{Layers: 4, Dim: 128, Heads: 4, KVHeads: 2, HeadDim: 32, Hidden: 256, Vocab: 512, Context: 4096, Type: gguf.Q8_0})
	path := filepath.Join(dir, "random.gguf")
	assert.NoError(t, os.WriteFile(path, b, 0o644))
	return path
}

// run is a running platform.
type run struct {
	URL    string         `json:"url"`
	OpsURL string         `json:"ops_url"`
	APIKey string         `json:"api_key"`
	Model  string         `json:"model"`
	Data   string         `json:"data"`
	PIDs   map[string]int `json:"pids"`

	cmd  *exec.Cmd
	log  *lockedBuffer
	tmp  string
	done chan error
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// minimal is an environment without anything of the machine's user but what
// finds programs.
func minimal(tmp string, extra ...string) []string {
	return append([]string{"PATH=" + os.Getenv("PATH"), "HOME=" + tmp, "TMPDIR=" + tmp}, extra...)
}

// start runs `bulkhead up` on free ports and waits until it is ready.
func start(t testing.TB, data, model string, env ...string) *run {
	t.Helper()
	r := &run{log: &lockedBuffer{}, tmp: scratch(t), done: make(chan error, 1)}
	r.cmd = exec.Command(program(t), "up", "--json", "--data", data, "--model", model, "--listen", "127.0.0.1:0", "--ops-listen", "127.0.0.1:0")
	r.cmd.Env = minimal(r.tmp, env...)
	r.cmd.Stderr = r.log
	out, err := r.cmd.StdoutPipe()
	assert.NoError(t, err)
	assert.NoError(t, r.cmd.Start())
	line := make(chan []byte, 1)
	go func() {
		reader := bufio.NewReader(out)
		b, _ := reader.ReadBytes('\n')
		line <- b
		_, _ = io.Copy(io.Discard, reader)
		r.done <- r.cmd.Wait()
	}()
	t.Cleanup(func() { r.stop(t) })
	select {
	case b := <-line:
		if err := json.Unmarshal(b, r); err != nil {
			t.Fatalf("not ready: %q\n%s", b, r.log.String())
		}
	case <-time.After(2 * time.Minute):
		t.Fatalf("not ready after two minutes\n%s", r.log.String())
	}
	return r
}

// stop ends the platform and waits for it.
func (r *run) stop(t testing.TB) {
	t.Helper()
	if r.done == nil {
		return
	}
	_ = r.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-r.done:
	case <-time.After(40 * time.Second):
		_ = r.cmd.Process.Kill()
		<-r.done
		t.Errorf("the platform did not stop\n%s", r.log.String())
	}
	r.done = nil
}

// kill ends the platform as a machine that loses power would, but for the
// children, which must end by themselves.
func (r *run) kill(t testing.TB) {
	t.Helper()
	assert.NoError(t, r.cmd.Process.Kill())
	<-r.done
	r.done = nil
}

func (r *run) request(ctx context.Context, t testing.TB, path, body string) *http.Response {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.URL+path, strings.NewReader(body))
	assert.NoError(t, err)
	req.Header.Set("Authorization", "Bearer "+r.APIKey)
	res, err := http.DefaultClient.Do(req)
	assert.NoError(t, err)
	return res
}

// ask returns the status and the body of a request.
func (r *run) ask(t testing.TB, path, body string) (*http.Response, string) {
	t.Helper()
	res := r.request(t.Context(), t, path, body)
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	assert.NoError(t, err)
	return res, string(b)
}

func (r *run) chat(model string, rest string) string {
	return fmt.Sprintf(`{"model":%q,"messages":[{"role":"user","content":"hello"}]%s}`, model, rest)
}

// bulkhead runs a command of the program against the platform.
func (r *run) bulkhead(t testing.TB, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	return command(t, []string{"BULKHEAD_URL=" + r.URL, "BULKHEAD_API_KEY=" + r.APIKey}, args...)
}

func command(t testing.TB, env []string, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	cmd := exec.Command(program(t), args...)
	cmd.Env = minimal(scratch(t), env...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err = cmd.Run()
	return out.String(), errs.String(), err
}

// receipt is the part of a receipt that the tests look at.
type receipt struct {
	Outcome string `json:"outcome"`
	Refusal *struct {
		Leg    string `json:"leg"`
		Reason string `json:"reason"`
	} `json:"refusal"`
	EdgeTokens *int `json:"edge_tokens"`
	Prefill    *leg `json:"prefill"`
	Decode     *leg `json:"decode"`
	Output     int  `json:"output_tokens"`
	Withheld   bool `json:"withheld"`
	Response   *struct {
		KeyID string `json:"key_id"`
		IDs   string `json:"ids"`
	} `json:"response_digests"`
}

type leg struct {
	Worker string `json:"worker"`
	Tokens *int   `json:"tokens"`
}

// receipt waits for the receipt of a response, which for a client that left is
// written behind its back.
func (r *run) receipt(t testing.TB, res *http.Response) receipt {
	t.Helper()
	id := res.Header.Get("X-Request-Id")
	var out, errs string
	var err error
	for range 50 {
		if out, errs, err = r.bulkhead(t, "receipt", "get", id); err == nil {
			break
		}
		time.Sleep(100 * time.Millisecond)
	}
	if err != nil {
		t.Fatalf("no receipt of %s: %s\n%s", id, errs, r.log.String())
	}
	var got receipt
	assert.NoError(t, json.Unmarshal([]byte(out), &got))
	return got
}

// metric returns the value of a line of the metrics.
func (r *run) metric(t testing.TB, name string) string {
	t.Helper()
	res, err := http.Get(r.OpsURL + "/metrics")
	assert.NoError(t, err)
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	assert.NoError(t, err)
	for line := range strings.SplitSeq(string(b), "\n") {
		if rest, ok := strings.CutPrefix(line, name+" "); ok {
			return rest
		}
	}
	return ""
}

// children returns the processes below the given one.
func children(pid int) []int {
	var out []int
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, f := range tasks {
		b, _ := os.ReadFile(f)
		for field := range strings.FieldsSeq(string(b)) {
			var n int
			if _, err := fmt.Sscan(field, &n); err == nil {
				out = append(append(out, n), children(n)...)
			}
		}
	}
	return out
}

func alive(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if errors.Is(err, os.ErrNotExist) {
		return false
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	return !strings.HasPrefix(rest, "Z")
}

func eventually(t testing.TB, what string, f func() bool) {
	t.Helper()
	for range 400 {
		if f() {
			return
		}
		time.Sleep(25 * time.Millisecond)
	}
	t.Fatal("waited ten seconds for: " + what)
}
