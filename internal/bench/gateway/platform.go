package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"connectrpc.com/connect"

	tenancyv1 "bulkhead.dev/services/gen/bulkhead/tenancy/v1"
	"bulkhead.dev/services/gen/bulkhead/tenancy/v1/tenancyv1connect"
)

const (
	// benchTenants and keysPerTenant are who asks.
	benchTenants  = 8
	keysPerTenant = 8
	// startTimeout and stopTimeout bound the life of a platform at its ends.
	startTimeout = 2 * time.Minute
	stopTimeout  = 40 * time.Second
	// poolTokens is room for the idle streams; a simulated position takes 16 bytes.
	poolTokens = 4 << 20
)

// process names, as figures are looked up by them.
const (
	gatewayProc  = "gateway"
	postgresProc = "PostgreSQL"
	prefillProc  = "prefill"
	decodeProc   = "decode"
	upstreamProc = "upstream"
)

// engineSpeed is how long the simulated engine takes for a step. Zero answers at once.
type engineSpeed time.Duration

// platform is a running `bulkhead up` on a database of its own.
type platform struct {
	URL    string         `json:"url"`
	OpsURL string         `json:"ops_url"`
	Model  string         `json:"model"`
	PIDs   map[string]int `json:"pids"`

	data  string
	keys  []string
	cmd   *exec.Cmd
	log   *os.File
	ended chan error
	bench *bench
}

// start runs the platform in its data folder, in which the model is.
func (b *bench) start(ctx context.Context, d *database, speed engineSpeed) (_ *platform, err error) {
	p := &platform{data: d.data, keys: d.keys, bench: b, ended: make(chan error, 1)}
	p.cmd = exec.Command(b.binary, "up", "--json", "--data", d.data, "--model", b.model, "--listen", "127.0.0.1:0", "--ops-listen", "127.0.0.1:0")
	p.cmd.Env = []string{
		"PATH=" + os.Getenv("PATH"), "HOME=" + b.dir, "TMPDIR=" + os.TempDir(), "DATABASE_URL=" + d.dsn,
		"BULKHEAD_BACKEND=sim", "BULKHEAD_SIM_STEP_US=" + strconv.FormatInt(time.Duration(speed).Microseconds(), 10),
		// The limits that protect a real engine would be what is measured.
		"BULKHEAD_TENANT_CONCURRENCY=65536", "BULKHEAD_MAX_RUNNING=16384", "BULKHEAD_QUEUE=16384",
		"BULKHEAD_PREFILL_POOL_TOKENS=" + strconv.Itoa(poolTokens), "BULKHEAD_DECODE_POOL_TOKENS=" + strconv.Itoa(poolTokens),
		"BULKHEAD_THREADS=1", "BULKHEAD_PROFILE=" + b.profileDir,
	}
	if p.log, err = os.OpenFile(filepath.Join(b.dir, "up.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600); err != nil {
		return nil, err
	}
	p.cmd.Stderr = p.log
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start bulkhead: %w", err)
	}
	line := make(chan []byte, 1)
	go func() {
		r := bufio.NewReader(out)
		b, _ := r.ReadBytes('\n')
		line <- b
		_, _ = io.Copy(io.Discard, r)
		p.ended <- p.cmd.Wait()
	}()
	select {
	case b := <-line:
		if json.Unmarshal(b, p) == nil {
			return p, nil
		}
		err = errors.New("it ended")
	case <-time.After(startTimeout):
		err = errors.New("it takes too long")
	case <-ctx.Done():
		err = ctx.Err()
	}
	_ = p.cmd.Process.Kill()
	return nil, fmt.Errorf("bulkhead up is not ready: %w: %s", errors.Join(err, <-p.ended), p.bench.lastLog())
}

// stop drains the platform.
func (p *platform) stop() error {
	defer p.log.Close()
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case err := <-p.ended:
		if err != nil || strings.Contains(p.bench.lastLog(), `"level":"ERROR"`) {
			return fmt.Errorf("bulkhead up ended badly: %v: %s", err, p.bench.lastLog()) //nolint:errorlint // nil where only its log is bad
		}
		return nil
	case <-time.After(stopTimeout):
		_ = p.cmd.Process.Kill()
		return fmt.Errorf("bulkhead up did not stop: %w: %s", <-p.ended, p.bench.lastLog())
	}
}

// lastLog is the end of what the platform logged but for requests; it holds no
// content.
func (b *bench) lastLog() string {
	const tail = 6000
	text, _ := os.ReadFile(filepath.Join(b.dir, "up.log"))
	var out strings.Builder
	for line := range strings.Lines(string(text)) {
		if !strings.Contains(line, `"msg":"request"`) {
			out.WriteString(line)
		}
	}
	return out.String()[max(0, out.Len()-tail):]
}

// target is the platform as something to ask.
func (p *platform) target() *target {
	return newTarget("Bulkhead", p.URL, p.Model, p.keys,
		process{name: gatewayProc, pid: p.PIDs["front"]}, process{name: prefillProc, pid: p.PIDs["prefill"]},
		process{name: decodeProc, pid: p.PIDs["decode"]}, process{name: postgresProc, pid: p.bench.postgres.PID(), tree: true})
}

// makeKeys makes tenants and keys through the interface of the operator.
func (p *platform) makeKeys(ctx context.Context) ([]string, error) {
	operator, err := os.ReadFile(filepath.Join(p.data, "operator.key"))
	if err != nil {
		return nil, err
	}
	client := tenancyv1connect.NewTenancyServiceClient(http.DefaultClient, p.URL, connect.WithInterceptors(connect.UnaryInterceptorFunc(
		func(next connect.UnaryFunc) connect.UnaryFunc {
			return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
				req.Header().Set("Authorization", "Bearer "+strings.TrimSpace(string(operator)))
				return next(ctx, req)
			}
		})))
	var keys []string
	for i := range benchTenants {
		tenant, err := client.CreateTenant(ctx, &tenancyv1.CreateTenantRequest{Name: fmt.Sprintf("bench-%d", i)})
		if err != nil {
			return nil, fmt.Errorf("make a tenant: %w", err)
		}
		for range keysPerTenant {
			key, err := client.CreateKey(ctx, &tenancyv1.CreateKeyRequest{
				TenantId: tenant.GetTenant().GetId(), ProjectId: tenant.GetProject().GetId(), Name: "bench",
			})
			if err != nil {
				return nil, fmt.Errorf("make a key: %w", err)
			}
			keys = append(keys, key.GetSecret())
		}
	}
	return keys, nil
}

// metric reads a number from the operations listener.
func (p *platform) metric(ctx context.Context, name string) (float64, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, p.OpsURL+"/metrics", nil)
	if err != nil {
		return 0, err
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err
	}
	defer res.Body.Close()
	lines := bufio.NewScanner(res.Body)
	for lines.Scan() {
		if value, ok := strings.CutPrefix(lines.Text(), name+" "); ok {
			return strconv.ParseFloat(value, 64)
		}
	}
	return 0, errors.Join(fmt.Errorf("there is no metric %s", name), lines.Err())
}
