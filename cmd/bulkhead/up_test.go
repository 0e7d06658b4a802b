package main_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"

	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
)

func TestSDKs(t *testing.T) {
	t.Parallel()
	data := scratch(t)
	r := start(t, data, randomModel(t, data))
	t.Run("go", func(t *testing.T) {
		client := openai.NewClient(option.WithBaseURL(r.URL+"/v1"), option.WithAPIKey(r.APIKey), option.WithMaxRetries(0))
		params := openai.ChatCompletionNewParams{
			Model: r.Model, MaxCompletionTokens: openai.Int(20), Temperature: openai.Float(0),
			Messages: []openai.ChatCompletionMessageParamUnion{openai.SystemMessage("s"), openai.UserMessage("hi")},
		}
		whole, err := client.Chat.Completions.New(t.Context(), params)
		assert.NoError(t, err)
		params.StreamOptions.IncludeUsage = openai.Bool(true)
		stream := client.Chat.Completions.NewStreaming(t.Context(), params)
		acc := openai.ChatCompletionAccumulator{}
		for stream.Next() {
			assert.True(t, acc.AddChunk(stream.Current()))
		}
		assert.NoError(t, stream.Err())
		assert.Equal(t, acc.Choices[0].Message.Content, whole.Choices[0].Message.Content)
		assert.Equal(t, acc.Usage.TotalTokens, whole.Usage.TotalTokens)
		assert.True(t, whole.Usage.CompletionTokens > 0)
		list, err := client.Models.List(t.Context())
		assert.NoError(t, err)
		assert.Equal(t, list.Data[0].ID, r.Model)
	})
	t.Run("python", func(t *testing.T) {
		python := os.Getenv("BULKHEAD_TEST_PYTHON")
		if python == "" {
			assert.Skip(t, "BULKHEAD_TEST_PYTHON does not name a Python with the openai package")
		}
		cmd := exec.Command(python, "testdata/sdk.py")
		cmd.Env = minimal(scratch(t), "OPENAI_BASE_URL="+r.URL+"/v1", "OPENAI_API_KEY="+r.APIKey, "MODEL="+r.Model)
		out, err := cmd.CombinedOutput()
		if err != nil || !strings.Contains(string(out), "all well") {
			t.Fatalf("%v\n%s", err, out)
		}
	})
	t.Run("cli", func(t *testing.T) {
		out, errs, err := r.bulkhead(t, "chat", "--model", r.Model, "--max-tokens", "5", "hello", "there")
		if err != nil {
			t.Fatal(errs)
		}
		assert.True(t, len(out) > 1)
		assert.True(t, strings.Contains(errs, "receipt rcp_"))
		_, id, _ := strings.Cut(strings.TrimSpace(errs), "receipt ")
		out, errs, err = r.bulkhead(t, "receipt", "get", id)
		if err != nil {
			t.Fatal(errs)
		}
		assert.True(t, strings.Contains(out, `"outcome": "completed"`) && strings.Contains(out, `"surface": "connect"`))
	})
	t.Run("operations", func(t *testing.T) {
		for path, want := range map[string]string{"/healthz": "ok", "/readyz": "ready", "/metrics": "bulkhead_kv_pages"} {
			res, err := http.Get(r.OpsURL + path)
			assert.NoError(t, err)
			b, err := io.ReadAll(res.Body)
			assert.NoError(t, err)
			_ = res.Body.Close()
			assert.True(t, res.StatusCode == 200 && strings.Contains(string(b), want))
		}
		// Operations are not on the public listener, and the API not here.
		res, _ := r.ask(t, "/metrics", "")
		assert.Equal(t, res.StatusCode, 404)
	})
}

func TestKeys(t *testing.T) {
	t.Parallel()
	data := scratch(t)
	r := start(t, data, randomModel(t, data))
	operator := []string{"BULKHEAD_URL=" + r.URL, "BULKHEAD_DATA=" + data}
	secret, errs, err := r.bulkhead(t, "key", "create", "second")
	if err != nil {
		t.Fatal(errs)
	}
	secret = strings.TrimSpace(secret)
	_, id, _ := strings.Cut(errs, "key_")
	id, _, _ = strings.Cut("key_"+id, " ")
	second := *r
	second.APIKey = secret
	second.done = nil
	res, _ := second.ask(t, "/v1/chat/completions", r.chat(r.Model, `,"max_tokens":1`))
	assert.Equal(t, res.StatusCode, 200)
	// A key cannot hand out what it does not have.
	_, errs, err = second.bulkhead(t, "key", "create", "--scope", "keys:write")
	assert.True(t, err != nil && errs != "")
	out, errs, err := r.bulkhead(t, "key", "list")
	if err != nil {
		t.Fatal(errs)
	}
	assert.True(t, strings.Contains(out, id) && strings.Contains(out, "second") && !strings.Contains(out, secret))
	_, errs, err = r.bulkhead(t, "key", "revoke", id)
	if err != nil {
		t.Fatal(errs)
	}
	revoked := time.Now()
	eventually(t, "the revoked key stops", func() bool {
		res, _ := second.ask(t, "/v1/models/x", "")
		return res.StatusCode == 401
	})
	if d := time.Since(revoked); d > 1500*time.Millisecond { // the promise is one second after the database knows
		t.Fatalf("a revoked key worked for %v", d)
	}
	_, errs, err = command(t, operator, "key", "list")
	if err != nil {
		t.Fatal("the operator's key in the data folder does not work: " + errs)
	}
}

func TestContextLength(t *testing.T) {
	t.Parallel()
	data := scratch(t)
	r := start(t, data, randomModel(t, data))
	long := strings.Repeat("x", 5000)
	before := r.metric(t, `bulkhead_kv_granted_pages_total{role="prefill"}`)
	for _, body := range []string{
		`{"model":"` + r.Model + `","messages":[{"role":"user","content":"` + long + `"}]}`,
		r.chat(r.Model, `,"max_tokens":4096`),
	} {
		res, text := r.ask(t, "/v1/chat/completions", body)
		assert.Equal(t, res.StatusCode, 400)
		assert.True(t, strings.Contains(text, `"code":"context_length_exceeded"`) && strings.Contains(text, "4096"))
		assert.Equal(t, res.Header.Get("X-Bulkhead-Receipt"), "")
	}
	time.Sleep(1200 * time.Millisecond) // two heartbeats, so that the counters are of now
	for _, role := range []string{"prefill", "decode"} {
		assert.Equal(t, r.metric(t, `bulkhead_kv_granted_pages_total{role="`+role+`"}`), before)
	}
	assert.Equal(t, before, "0")
}

// endless asks for a stream that takes more than a second.
const endless = `,"stream":true,"max_tokens":3900,"temperature":0`

// readUntil reads events of a stream until n pieces of text have come.
func readUntil(t *testing.T, b *bufio.Reader, n int) string {
	t.Helper()
	var seen strings.Builder
	for n > 0 {
		line, err := b.ReadString('\n')
		assert.NoError(t, err)
		seen.WriteString(line)
		if strings.Contains(line, `"content":"`) {
			n--
		}
	}
	return seen.String()
}

func TestDecodeWorkerKilledInMidStream(t *testing.T) {
	t.Parallel()
	data := scratch(t)
	r := start(t, data, randomModel(t, data))
	res := r.request(t.Context(), t, "/v1/chat/completions", r.chat(r.Model, endless))
	defer res.Body.Close()
	b := bufio.NewReader(res.Body)
	readUntil(t, b, 5)
	assert.NoError(t, syscall.Kill(r.PIDs["decode"], syscall.SIGKILL))
	killed := time.Now()
	rest, err := io.ReadAll(b)
	assert.NoError(t, err)
	if d := time.Since(killed); d > 2*time.Second {
		t.Fatalf("the stream ended %v after its worker", d)
	}
	assert.True(t, strings.Contains(string(rest), `data: {"error":{`))
	assert.False(t, strings.Contains(string(rest), "[DONE]"))
	assert.False(t, strings.Contains(string(rest), `"finish_reason":"`))
	got := r.receipt(t, res)
	assert.Equal(t, got.Outcome, "failed")
	assert.Equal(t, got.Refusal.Leg, "decode")
	assert.True(t, got.Output >= 5)
	dead := got.Decode.Worker
	eventually(t, "a new decode worker", func() bool {
		res, _ = r.ask(t, "/v1/chat/completions", r.chat(r.Model, `,"max_tokens":3`))
		return res.StatusCode == 200
	})
	got = r.receipt(t, res)
	assert.Equal(t, got.Outcome, "completed")
	assert.True(t, got.Decode.Worker != dead)
	assert.Equal(t, *got.Decode.Tokens, *got.EdgeTokens)
}

func TestPrefillWorkerKilledInMidPrompt(t *testing.T) {
	t.Parallel()
	data := scratch(t)
	r := start(t, data, randomModel(t, data))
	// Frozen, it is certainly in the middle when it dies.
	assert.NoError(t, syscall.Kill(r.PIDs["prefill"], syscall.SIGSTOP))
	type answer struct {
		res  *http.Response
		body string
	}
	answered := make(chan answer, 1)
	go func() {
		res, body := r.ask(t, "/v1/chat/completions", r.chat(r.Model, `,"stream":true,"max_tokens":3`))
		answered <- answer{res, body}
	}()
	time.Sleep(300 * time.Millisecond)
	assert.NoError(t, syscall.Kill(r.PIDs["prefill"], syscall.SIGKILL))
	a := <-answered
	assert.Equal(t, a.res.StatusCode, 503)
	assert.True(t, strings.Contains(a.body, `"code":"worker_lost"`))
	got := r.receipt(t, a.res)
	assert.Equal(t, got.Outcome, "refused")
	assert.Equal(t, got.Refusal.Leg, "prefill")
	assert.True(t, got.Decode.Tokens == nil || *got.Decode.Tokens == 0)
	eventually(t, "a new prefill worker", func() bool {
		res, _ := r.ask(t, "/v1/chat/completions", r.chat(r.Model, `,"max_tokens":3`))
		return res.StatusCode == 200
	})
	eventually(t, "credits of the refused request are back", func() bool {
		return r.metric(t, `bulkhead_worker_running{role="decode"}`) == "0"
	})
}

func TestClientThatLeavesGetsAReceipt(t *testing.T) {
	t.Parallel()
	data := scratch(t)
	r := start(t, data, randomModel(t, data))
	ctx, cancel := context.WithCancel(t.Context())
	res := r.request(ctx, t, "/v1/chat/completions", r.chat(r.Model, endless))
	readUntil(t, bufio.NewReader(res.Body), 3)
	cancel()
	_ = res.Body.Close()
	got := r.receipt(t, res)
	assert.Equal(t, got.Outcome, "canceled")
	assert.True(t, got.Output >= 3 && got.Output < 3900)
	eventually(t, "decode stops", func() bool { return r.metric(t, `bulkhead_worker_running{role="decode"}`) == "0" })
}

// While an answer is computed the operator sees whose pages it takes, and nobody
// else sees anything.
func TestPages(t *testing.T) {
	t.Parallel()
	data := scratch(t)
	r := start(t, data, randomModel(t, data))
	operator := []string{"BULKHEAD_URL=" + r.URL, "BULKHEAD_DATA=" + data}
	res := r.request(t.Context(), t, "/v1/chat/completions", r.chat(r.Model, endless))
	readUntil(t, bufio.NewReader(res.Body), 60)
	out, errs, err := command(t, operator, "pages", "--worker", "decode", "--state", "filling")
	if err != nil {
		t.Fatal(errs)
	}
	if !strings.HasPrefix(out, "decode wrk_") || !strings.Contains(out, "held by ") || !strings.Contains(out, "  filling ") || strings.Contains(out, "  sealed ") {
		t.Fatal(out)
	}
	_, owner, _ := strings.Cut(out, "held by ")
	owner = strings.Fields(owner)[1]
	assert.Equal(t, len(owner), 8)
	out, errs, err = command(t, operator, "pages", "--owner", owner, "--json")
	if err != nil {
		t.Fatal(errs)
	}
	assert.True(t, strings.Count(out, `"epoch"`) == 2 && strings.Contains(out, `"sealed"`) && strings.Contains(out, owner))
	// Totals are of the whole pool, whatever is left out.
	var shown struct {
		Workers []struct {
			Role           string
			States, Owners map[string]int
			Runs           []struct {
				First               *int
				State, Owner, Lease string
			}
		}
	}
	assert.NoError(t, json.Unmarshal([]byte(out), &shown))
	for _, w := range shown.Workers {
		assert.True(t, w.Owners[owner] > 0 && len(w.States) > 1)
		for _, run := range w.Runs {
			assert.True(t, run.First != nil && run.Owner == owner && (run.Lease == "" || len(run.Lease) == len(owner)))
		}
	}
	_, errs, err = command(t, operator, "pages", "--state", "full")
	assert.True(t, err != nil && strings.Contains(errs, "quarantined"))
	_ = res.Body.Close()
	eventually(t, "decode holds nothing", func() bool {
		out, _, err := command(t, operator, "pages", "--worker", "decode", "--json")
		shown.Workers = nil
		if err != nil || json.Unmarshal([]byte(out), &shown) != nil || len(shown.Workers) != 1 {
			return false
		}
		w := shown.Workers[0]
		free := 0
		for _, s := range []string{"clean", "dirty", "scrubbing"} {
			free += w.States[s]
			delete(w.States, s)
		}
		return free > 0 && len(w.States) == 0 && len(w.Owners) == 0
	})
	_, errs, err = r.bulkhead(t, "pages")
	assert.True(t, err != nil && strings.Contains(errs, "platform:admin"))
}

func TestKilledPlatformLeavesNothingBehind(t *testing.T) {
	t.Parallel()
	data := scratch(t)
	model := randomModel(t, data)
	r := start(t, data, model)
	res := r.request(t.Context(), t, "/v1/chat/completions", r.chat(r.Model, endless))
	b := bufio.NewReader(res.Body)
	readUntil(t, b, 600) // by now the intent is durable, also on a busy machine
	below := children(r.cmd.Process.Pid)
	assert.True(t, len(below) >= 3)
	// A version before replicas had leases died here, too.
	old := id.NewRequest(time.Now())
	_, err := r.pools(t).Settle.Exec(t.Context(), `INSERT INTO intent (request_id, tenant, project, api_key, replica, reserved_tokens, created_at)
		VALUES ($1, $1, $1, $1, $1, 9, now())`, [16]byte(old))
	assert.NoError(t, err)
	r.kill(t)
	_ = res.Body.Close()
	eventually(t, "all children are gone", func() bool {
		for _, pid := range below {
			if alive(pid) {
				return false
			}
		}
		return true
	})
	again := start(t, data, model)
	assert.Equal(t, again.APIKey, "") // shown once
	again.APIKey = r.APIKey
	got := again.receipt(t, res)
	assert.Equal(t, got.Outcome, "lost")
	var outcome string
	assert.NoError(t, again.pools(t).Settle.QueryRow(t.Context(), "SELECT outcome FROM receipt WHERE request_id = $1", [16]byte(old)).Scan(&outcome))
	assert.Equal(t, outcome, "lost")
	res, _ = again.ask(t, "/v1/chat/completions", r.chat(r.Model, `,"max_tokens":3`))
	assert.Equal(t, res.StatusCode, 200)
}

func TestSignals(t *testing.T) {
	t.Parallel()
	t.Run("the first drains", func(t *testing.T) {
		t.Parallel()
		data := scratch(t)
		r := start(t, data, randomModel(t, data))
		res := r.request(t.Context(), t, "/v1/chat/completions", r.chat(r.Model, endless))
		defer res.Body.Close()
		b := bufio.NewReader(res.Body)
		readUntil(t, b, 1)
		assert.NoError(t, r.cmd.Process.Signal(syscall.SIGTERM))
		rest, err := io.ReadAll(b)
		assert.NoError(t, err)
		assert.True(t, strings.HasSuffix(string(rest), "data: [DONE]\n\n"))
		assert.NoError(t, <-r.done)
		r.done = nil
	})
	t.Run("the second stops", func(t *testing.T) {
		t.Parallel()
		data := scratch(t)
		r := start(t, data, randomModel(t, data))
		res := r.request(t.Context(), t, "/v1/chat/completions", r.chat(r.Model, endless))
		defer res.Body.Close()
		readUntil(t, bufio.NewReader(res.Body), 1)
		// A frozen worker would hold up the drain to its deadline.
		assert.NoError(t, syscall.Kill(r.PIDs["decode"], syscall.SIGSTOP))
		assert.NoError(t, r.cmd.Process.Signal(syscall.SIGTERM))
		time.Sleep(200 * time.Millisecond)
		assert.NoError(t, r.cmd.Process.Signal(syscall.SIGTERM))
		select {
		case <-r.done:
			r.done = nil
		case <-time.After(8 * time.Second):
			t.Fatalf("the second signal does not stop it\n%s", r.log.String())
		}
	})
}

// While the database hangs, an answer in flight keeps its end back, and the
// receipt that is written later says so.
func TestEvidenceIsAwaited(t *testing.T) {
	t.Parallel()
	data := scratch(t)
	r := start(t, data, randomModel(t, data), "BULKHEAD_EVIDENCE_TIMEOUT=1s")
	res, _ := r.ask(t, "/v1/chat/completions", r.chat(r.Model, `,"max_tokens":1`)) // the key is in memory now
	assert.Equal(t, res.StatusCode, 200)
	res = r.request(t.Context(), t, "/v1/chat/completions", r.chat(r.Model, endless))
	defer res.Body.Close()
	b := bufio.NewReader(res.Body)
	readUntil(t, b, 1)
	time.Sleep(50 * time.Millisecond) // the intent is written
	database := append([]int{r.PIDs["postgres"]}, children(r.PIDs["postgres"])...)
	for _, pid := range database {
		assert.NoError(t, syscall.Kill(pid, syscall.SIGSTOP))
	}
	rest, err := io.ReadAll(b)
	// What was sent to the database must not be committed now, when nobody waits
	// for it any more: its sessions die, and the server recovers.
	for _, pid := range database {
		title, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if strings.Contains(string(title), "bulkhead_settle") {
			assert.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
		}
	}
	for _, pid := range database {
		_ = syscall.Kill(pid, syscall.SIGCONT)
	}
	assert.NoError(t, err)
	assert.True(t, strings.Contains(string(rest), `"code":"evidence_unavailable"`))
	assert.False(t, strings.Contains(string(rest), "[DONE]"))
	assert.False(t, strings.Contains(string(rest), `"finish_reason":"`))
	got := r.receipt(t, res)
	assert.Equal(t, got.Outcome, "withheld")
	assert.True(t, got.Withheld)
}

// A nonce in a prompt is found nowhere: not in logs, not in the database or its
// log, not in metrics, not in any file.
func TestPromptsAreNotKept(t *testing.T) {
	t.Parallel()
	data := scratch(t)
	r := start(t, data, randomModel(t, data), "BULKHEAD_LOG_LEVEL=debug")
	const nonce = "zq7Kx0WvNonce4Yb"
	for _, c := range []struct{ path, body string }{
		{"/v1/chat/completions", `{"model":"random","messages":[{"role":"user","content":"` + nonce + `"}],"max_tokens":5}`},
		{"/v1/chat/completions", `{"model":"random","messages":[{"role":"user","content":"` + nonce + `"}],"max_tokens":5,"stream":true,"user":"` + nonce + `","metadata":{"a":"` + nonce + `"},"stop":"` + nonce + `"}`},
		{"/v1/completions", `{"model":"random","prompt":"` + nonce + `","max_tokens":5}`},
		{"/v1/chat/completions", `{"model":"random","messages":[{"role":"` + nonce + `","content":"` + nonce + `"}]}`},
		{"/v1/chat/completions", `{"model":"` + nonce + `","messages":[{"role":"user","content":"x"}]}`},
		{"/v1/chat/completions", `{"model":"random","messages":[{"role":"user","content":"` + nonce + `"}],"temperature":"` + nonce + `"}`},
		{"/v1/chat/completions", `{"model":"random","messages":[{"role":"user","content":"` + strings.Repeat(nonce, 400) + `"}]}`},
		{"/v1/chat/completions", `{"` + nonce + `":1,"` + nonce + `":2}`},
		{"/v1/" + nonce, `{}`},
		{"/bulkhead.inference.v1.InferenceService/Generate", `{"model":"random","prompt":"` + nonce + `"}`},
		{"/bulkhead.inference.v1.InferenceService/Generate", `{"model":"` + nonce + `","prompt":"` + nonce + `"}`},
	} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.URL+c.path, strings.NewReader(c.body))
		assert.NoError(t, err)
		req.Header.Set("Authorization", "Bearer "+r.APIKey)
		req.Header.Set("Content-Type", "application/json")
		res, err := http.DefaultClient.Do(req)
		assert.NoError(t, err)
		_, _ = io.Copy(io.Discard, res.Body)
		_ = res.Body.Close()
	}
	r.searched(t, nonce)
}

func TestRefusesToStart(t *testing.T) {
	t.Parallel()
	dir := scratch(t)
	model := randomModel(t, dir)
	b, err := os.ReadFile(model)
	assert.NoError(t, err)
	short := filepath.Join(dir, "short.gguf")
	assert.NoError(t, os.WriteFile(short, b[:len(b)/2], 0o600))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	assert.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() }) // parallel subtests outlive this function
	file := filepath.Join(dir, "file")
	assert.NoError(t, os.WriteFile(file, nil, 0o600))
	bad := filepath.Join(dir, "bad.yaml")
	assert.NoError(t, os.WriteFile(bad, []byte("wroker: {}"), 0o600))
	keys := scratch(t)
	assert.NoError(t, os.WriteFile(filepath.Join(keys, "keys.json"), []byte("{}"), 0o644))
	for name, c := range map[string]struct {
		args []string
		env  []string
		says []string
	}{
		"truncated model":     {[]string{"--data", scratch(t), "--model", short}, nil, []string{"truncated"}},
		"no such model":       {[]string{"--data", scratch(t), "--model", "gpt-9"}, nil, []string{"unknown model", "smollm2-135m", "model add"}},
		"no such file":        {[]string{"--data", scratch(t), "--model", "/nonexistent/m.gguf"}, nil, []string{"no such file"}},
		"port taken":          {[]string{"--data", scratch(t), "--model", model, "--listen", l.Addr().String()}, nil, []string{"in use by another program", "--listen"}},
		"public without TLS":  {[]string{"--data", scratch(t), "--model", model, "--listen", "0.0.0.0:0"}, nil, []string{"without TLS", "behind_proxy"}},
		"data is a file":      {[]string{"--data", file, "--model", model}, nil, []string{"--data DIR"}},
		"unknown field":       {[]string{"--config", bad}, nil, []string{"wroker"}},
		"bad value":           {[]string{"--data", scratch(t)}, []string{"BULKHEAD_KV_TYPE=f8"}, []string{"worker.kv_type", "f16"}},
		"pool below window":   {[]string{"--data", scratch(t), "--model", model}, []string{"BULKHEAD_PREFILL_POOL_TOKENS=1024"}, []string{"1024", "4096", "prefill"}},
		"no database":         {[]string{"--data", scratch(t), "--model", model}, []string{"DATABASE_URL=postgres://127.0.0.1:1/x"}, []string{"database"}},
		"readable secrets":    {[]string{"--data", keys, "--model", model}, nil, []string{"keys.json", "chmod 600"}},
		"no database binares": {[]string{"--data", scratch(t), "--model", model}, []string{"BULKHEAD_PG_BIN=" + dir}, []string{"BULKHEAD_PG_BIN"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, errs, err := command(t, c.env, append([]string{"up", "--ops-listen", "127.0.0.1:0"}, c.args...)...)
			assert.True(t, err != nil)
			lines := strings.Split(strings.TrimSpace(errs), "\n")
			last := lines[len(lines)-1]
			for _, want := range c.says {
				if !strings.HasPrefix(last, "bulkhead: ") || !strings.Contains(last, want) {
					t.Errorf("the last line lacks %q:\n%s", want, errs)
				}
			}
		})
	}
}

func TestOnePlatformPerDataFolder(t *testing.T) {
	t.Parallel()
	data := scratch(t)
	model := randomModel(t, data)
	start(t, data, model)
	_, errs, err := command(t, nil, "up", "--data", data, "--model", model, "--listen", "127.0.0.1:0", "--ops-listen", "127.0.0.1:0")
	assert.True(t, err != nil && strings.Contains(errs, "in use by process"))
}

func TestDoctorAndVersion(t *testing.T) {
	t.Parallel()
	out, _, err := command(t, nil, "version")
	assert.NoError(t, err)
	for _, want := range []string{"bulkhead ", "commit ", "go1.", "cpu "} {
		assert.True(t, strings.Contains(out, want))
	}
	out, errs, _ := command(t, nil, "doctor", "--data", scratch(t))
	for _, want := range []string{"CPU kernels", "memory", "PostgreSQL", "pip", "RDMA", "NVIDIA", "models"} {
		if !strings.Contains(out, want) {
			t.Errorf("doctor does not mention %s:\n%s%s", want, out, errs)
		}
	}
	out, _, err = command(t, nil, "config")
	assert.NoError(t, err)
	assert.True(t, strings.Contains(out, "prefill_chunk:"))
}

// Children get an empty environment, no secret in their arguments, and leave no
// core; the folder of their sockets is closed to others.
func TestChildrenAreGivenNothing(t *testing.T) {
	t.Parallel()
	data := scratch(t)
	r := start(t, data, randomModel(t, data), "SECRET_OF_THE_USER=hunter2")
	for role, pid := range r.PIDs {
		read := func(name string) string {
			b, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name))
			if errors.Is(err, fs.ErrPermission) {
				assert.Skip(t, "not root: hardened processes cannot be looked at")
			}
			assert.NoError(t, err)
			return string(b)
		}
		if role != "front" && strings.Contains(read("environ"), "hunter2") {
			t.Errorf("the %s process has the user's environment", role)
		}
		if (role == "prefill" || role == "decode") && read("environ") != "" {
			t.Errorf("the %s worker has an environment: %q", role, read("environ"))
		}
		if args := read("cmdline"); strings.Contains(args, "KEY") || strings.Contains(args, r.APIKey) {
			t.Errorf("the %s process has a secret in its arguments", role)
		}
		_, limit, _ := strings.Cut(read("limits"), "Max core file size")
		if role != "postgres" && strings.Fields(limit)[0] != "0" {
			t.Errorf("the %s process leaves cores", role)
		}
	}
	dirs, err := filepath.Glob(filepath.Join(r.tmp, "bulkhead-*"))
	assert.NoError(t, err)
	assert.True(t, len(dirs) > 0)
	for _, d := range dirs {
		fi, err := os.Stat(d)
		assert.NoError(t, err)
		if fi.IsDir() && fi.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s has mode %v", d, fi.Mode())
		}
	}
}
