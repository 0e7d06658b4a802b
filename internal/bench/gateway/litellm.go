package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

const (
	liteProc = "LiteLLM"
	// liteStart is how long a Python proxy may take to be ready.
	liteStart = 2 * time.Minute
	liteKey   = "sk-bench"
)

// lite is LiteLLM's proxy in front of the bare upstream, with one worker and a
// key of its own, storing nothing.
type lite struct {
	cmd    *exec.Cmd
	log    *os.File
	target *target
}

// startLiteLLM returns nil where LiteLLM is not installed.
func (b *bench) startLiteLLM(ctx context.Context) (_ *lite, err error) {
	exe, err := exec.LookPath(b.litellm)
	if err != nil {
		return nil, nil //nolint:nilerr,nilnil // it is measured where it is there
	}
	conf := filepath.Join(b.dir, "litellm.yaml")
	text := fmt.Sprintf(`model_list:
  - model_name: bench
    litellm_params: {model: openai/bench, api_base: %s/v1, api_key: none, input_cost_per_token: 0.000001, output_cost_per_token: 0.000002}
general_settings: {master_key: %s}
litellm_settings: {telemetry: false}
`, b.upstream.url, liteKey)
	if err := os.WriteFile(conf, []byte(text), 0o600); err != nil {
		return nil, err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0") // a port that is free
	if err != nil {
		return nil, err
	}
	_, port, err := net.SplitHostPort(l.Addr().String())
	if err = errors.Join(err, l.Close()); err != nil {
		return nil, err
	}
	out := &lite{cmd: exec.Command(exe, "--config", conf, "--host", "127.0.0.1", "--port", port, "--num_workers", "1")}
	out.cmd.Env = append(os.Environ(), "LITELLM_LOCAL_MODEL_COST_MAP=True", "LITELLM_LOG=ERROR")
	if out.log, err = os.Create(filepath.Join(b.dir, "litellm.log")); err != nil {
		return nil, err
	}
	out.cmd.Stdout, out.cmd.Stderr = out.log, out.log
	if err := out.cmd.Start(); err != nil {
		return nil, errors.Join(fmt.Errorf("start LiteLLM: %w", err), out.log.Close())
	}
	url := "http://127.0.0.1:" + port
	out.target = newTarget("LiteLLM", url, "bench", []string{liteKey}, process{name: liteProc, pid: out.cmd.Process.Pid, tree: true})
	for end := time.Now().Add(liteStart); time.Now().Before(end) && ctx.Err() == nil; wait(ctx, 200*time.Millisecond) {
		if res, err := http.Get(url + "/health/liveliness"); err == nil {
			_ = res.Body.Close()
			if res.StatusCode == http.StatusOK {
				return out, nil
			}
		}
	}
	return nil, errors.Join(errors.New("LiteLLM is not ready"), ctx.Err(), out.close())
}

func (l *lite) close() error {
	_ = l.cmd.Process.Kill()
	_ = l.cmd.Wait() // it was killed
	return l.log.Close()
}
