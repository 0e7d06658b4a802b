package main_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"bulkhead.dev/engine/model/synth"
	"bulkhead.dev/infra/assert"
)

// searched ends the platform and fails where any of the words is in its log, its
// metrics, its data folder with the database, or its temporary files.
func (r *run) searched(t *testing.T, words ...string) {
	t.Helper()
	metrics, err := http.Get(r.OpsURL + "/metrics")
	assert.NoError(t, err)
	body, err := io.ReadAll(metrics.Body)
	assert.NoError(t, err)
	_ = metrics.Body.Close()
	r.stop(t) // so that the database has written everything
	look := func(where string, b []byte) {
		for _, w := range words {
			if bytes.Contains(b, []byte(w)) {
				t.Errorf("%q is in %s", w, where)
			}
		}
	}
	look("the metrics", body)
	look("the log", []byte(r.log.String()))
	files := 0
	for _, root := range []string{r.Data, r.tmp} {
		assert.NoError(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() {
				return err
			}
			b, err := os.ReadFile(path)
			files++
			look(path, b)
			return err
		}))
	}
	assert.True(t, files > 100) // the database alone has hundreds of files
}

// tenant makes a tenant with a key and returns the platform as it sees it.
func (r *run) tenant(t *testing.T, name string) *run {
	t.Helper()
	secret, err := os.ReadFile(filepath.Join(r.Data, "operator.key"))
	assert.NoError(t, err)
	call := func(method, body string, out any) {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.URL+"/bulkhead.tenancy.v1.TenancyService/"+method, strings.NewReader(body))
		assert.NoError(t, err)
		req.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(secret)))
		req.Header.Set("Content-Type", "application/json")
		res, err := http.DefaultClient.Do(req)
		assert.NoError(t, err)
		defer res.Body.Close()
		text, err := io.ReadAll(res.Body)
		assert.NoError(t, err)
		if res.StatusCode != http.StatusOK {
			t.Fatalf("%s: %d %s", method, res.StatusCode, text)
		}
		assert.NoError(t, json.Unmarshal(text, out))
	}
	var made struct{ Tenant, Project struct{ ID string } }
	call("CreateTenant", fmt.Sprintf(`{"name":%q}`, name), &made)
	var key struct{ Secret string }
	call("CreateKey", fmt.Sprintf(`{"tenant_id":%q,"project_id":%q,"name":"k","scopes":["inference","receipts:read"]}`, made.Tenant.ID, made.Project.ID), &key)
	other := *r
	other.APIKey, other.done = key.Secret, nil
	return &other
}

// words returns every run of eight characters of a text that is repeated.
func words(text string) (out []string) {
	for i := range text {
		out = append(out, (text + text)[i:i+8])
	}
	return out
}

// Two tenants work with texts that cannot be mistaken, over pools that hold few
// prompts, so that each gets pages of the other all the time. The model says
// again what it was told, so what leaks would be read. In nothing that one of
// them gets is anything of the other, and what they said is in no table, log,
// metric or file.
func TestTenantsSeeNothingOfEachOther(t *testing.T) {
	t.Parallel()
	data := scratch(t)
	path := filepath.Join(data, "copy.gguf")
	assert.NoError(t, os.WriteFile(path, synth.CopyModel(512), 0o644))
	r := start(t, data, path, "BULKHEAD_LOG_LEVEL=debug", "BULKHEAD_PREFILL_POOL_TOKENS=1024", "BULKHEAD_DECODE_POOL_TOKENS=1024")
	tenants := []struct {
		as     *run
		canary string // as long as the model looks back
	}{
		{r.tenant(t, "first"), "first-canary/7f3a9c1e-0b5d2468;"},
		{r.tenant(t, "second"), "SECOND+CANARY=5E8D1F40_9C7B3A6|"},
	}
	for i := range tenants {
		c := &tenants[i].canary
		*c += strings.Repeat(".", synth.CopyDistance-len(*c))
	}

	// Both begin alike, which is what remembered prompts are found by.
	prompt := func(canary string) string {
		return strings.Repeat("What both of them ask is the same at first. ", 3) + strings.Repeat(canary, 8)
	}
	var mu sync.Mutex
	seen := map[string][2]int{} // request id: whose, status
	answered := 0
	var wg sync.WaitGroup
	for who := range tenants {
		for range 3 {
			wg.Go(func() {
				me, other := tenants[who], tenants[1-who]
				for i := range 8 {
					stream := i%2 == 1
					bodies := []string{
						fmt.Sprintf(`{"model":"copy","messages":[{"role":"user","content":%q}],"max_tokens":40,"temperature":0,"stream":%v}`, prompt(me.canary), stream),
						fmt.Sprintf(`{"model":%q,"messages":[{"role":%q,"content":%q}],"temperature":%q}`, me.canary, me.canary, me.canary, me.canary),
						fmt.Sprintf(`{"model":"copy","messages":[{"role":"user","content":%q}]}`, strings.Repeat(me.canary, 100)),
					}
					for n, body := range bodies {
						res, text := me.as.ask(t, "/v1/chat/completions", body)
						said := text
						if n == 0 && res.StatusCode == http.StatusOK {
							said = saidIn(t, text, stream)
							if want := (me.canary + me.canary)[:40]; said != want {
								t.Errorf("the answer is %q, want %q", said, want)
							}
						}
						for _, w := range words(other.canary) {
							if strings.Contains(said, w) || strings.Contains(text, w) || strings.Contains(fmt.Sprint(res.Header), w) {
								t.Errorf("%q of the other tenant in %q", w, text)
							}
						}
						mu.Lock()
						seen[res.Header.Get("X-Request-Id")] = [2]int{who, res.StatusCode}
						if n == 0 && res.StatusCode == http.StatusOK {
							answered++
						}
						mu.Unlock()
					}
				}
			})
		}
	}
	wg.Wait()
	assert.Equal(t, len(seen), 2*3*8*3)
	assert.Equal(t, answered, 2*3*8)

	// A receipt is its tenant's. To the other it does not exist.
	for id, s := range seen {
		if s[1] != http.StatusOK {
			continue
		}
		out, errs, err := tenants[s[0]].as.bulkhead(t, "receipt", "get", id)
		if err != nil || !strings.Contains(out, "completed") {
			t.Fatalf("receipt of %s: %s", id, errs)
		}
		out, errs, err = tenants[1-s[0]].as.bulkhead(t, "receipt", "get", id)
		_, missing, _ := tenants[1-s[0]].as.bulkhead(t, "receipt", "get", "req_00000000000000000000000000")
		if err == nil || out != "" || errs != missing {
			t.Fatalf("the other tenant gets %q, and for one that does not exist %q", out+errs, missing)
		}
		break
	}
	all := append(words(tenants[0].canary), words(tenants[1].canary)...)
	r.searched(t, all...)
}

// saidIn puts the text of an answer together.
func saidIn(t *testing.T, body string, stream bool) string {
	t.Helper()
	type choices struct {
		Choices []struct{ Message, Delta struct{ Content string } }
	}
	var c choices
	if !stream {
		if err := json.Unmarshal([]byte(body), &c); err != nil || len(c.Choices) != 1 {
			t.Errorf("not an answer: %s", body)
			return ""
		}
		return c.Choices[0].Message.Content
	}
	var said strings.Builder
	for line := range strings.SplitSeq(body, "\n") {
		event, ok := strings.CutPrefix(line, "data: ")
		if !ok || event == "[DONE]" {
			continue
		}
		c = choices{}
		if err := json.Unmarshal([]byte(event), &c); err != nil {
			t.Errorf("not an event: %s", line)
		}
		for _, x := range c.Choices {
			said.WriteString(x.Delta.Content)
		}
	}
	return said.String()
}
