package main_test

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"bulkhead.dev/engine/compute"
	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/model"
	"bulkhead.dev/engine/model/chat"
	"bulkhead.dev/engine/model/gguf"
	"bulkhead.dev/engine/model/tokenizer"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/tenancy"
)

// The two workers, a hand-off between them, give what one process with one
// pool gives.

// golden is a run of llama.cpp.
type golden struct {
	Model     string `json:"model"`
	Prompt    string `json:"prompt"`
	Text      string `json:"text"`
	GreedyIDs []int  `json:"greedy_ids"`
}

func TestGoldenParityAcrossWorkers(t *testing.T) {
	t.Parallel()
	file := assert.SharedData(t, "stories260K/golden_llamacpp.json")
	b, err := os.ReadFile(file)
	assert.NoError(t, err)
	var all struct {
		Runs []golden `json:"runs"`
	}
	assert.NoError(t, json.Unmarshal(b, &all))
	path, err := filepath.Abs(filepath.Join(filepath.Dir(file), "converted", "stories260K-f32.gguf"))
	assert.NoError(t, err)
	f, err := gguf.Open(path)
	assert.NoError(t, err)
	defer f.Close()
	tok, err := tokenizer.FromGGUF(f)
	assert.NoError(t, err)
	r := start(t, scratch(t), path, "BULKHEAD_KV_TYPE=f32")
	tested := 0
	for _, g := range all.Runs {
		if !strings.Contains(g.Model, "f32") || g.Prompt == "" {
			continue
		}
		dec, want := tok.NewDecoder(), ""
		for _, v := range g.GreedyIDs {
			want += dec.Push(int32(v))
		}
		want += dec.Flush()
		body, err := json.Marshal(map[string]any{"model": r.Model, "prompt": g.Prompt, "temperature": 0, "max_tokens": len(g.GreedyIDs)})
		assert.NoError(t, err)
		res, text := r.ask(t, "/v1/completions", string(body))
		if res.StatusCode != 200 {
			t.Fatal(text)
		}
		assert.Equal(t, completionText(t, text), want)
		got := r.receipt(t, res)
		assert.True(t, *got.Prefill.Tokens == *got.EdgeTokens && *got.Decode.Tokens == *got.EdgeTokens)
		tested++
	}
	assert.True(t, tested >= 5)
}

func completionText(t testing.TB, body string) string {
	t.Helper()
	var c struct {
		Choices []struct{ Text string }
	}
	assert.NoError(t, json.Unmarshal([]byte(body), &c))
	return c.Choices[0].Text
}

// parityTokens is the length of the prompt: BULKHEAD_PARITY_TOKENS, or 600.
func parityTokens() int {
	if n, err := strconv.Atoi(os.Getenv("BULKHEAD_PARITY_TOKENS")); err == nil {
		return n
	}
	return 600
}

// A long prompt to the default model, alone and beside seven others, yields
// the ids of a loop in this process. The receipt has a keyed digest of the ids
// that decode computed, and the test has the key.
func TestParity(t *testing.T) {
	path := os.Getenv("BULKHEAD_TEST_MODEL")
	if path == "" {
		assert.Skip(t, "BULKHEAD_TEST_MODEL does not name the default model")
	}
	f, err := gguf.Open(path)
	assert.NoError(t, err)
	defer f.Close()
	l, err := model.LoadLlama(f)
	assert.NoError(t, err)
	tok, err := tokenizer.FromGGUF(f)
	assert.NoError(t, err)
	n := parityTokens()
	prompts := make([]string, 8)
	for i := range prompts {
		prompts[i] = prompt(tok, i, n)
	}
	const output = 32
	want := alone(t, l, chat.EncodeText(tok, prompts[0]), output)

	data := scratch(t)
	r := start(t, data, path)
	keys, err := tenancy.LoadKeyFile(filepath.Join(data, "keys.json"))
	assert.NoError(t, err)
	ask := func(prompt string) *http.Response {
		body, err := json.Marshal(map[string]any{"model": r.Model, "prompt": prompt, "temperature": 0, "max_tokens": output})
		assert.NoError(t, err)
		res, text := r.ask(t, "/v1/completions", string(body))
		if res.StatusCode != 200 {
			t.Error(text)
		}
		return res
	}
	check := func(what string, res *http.Response) {
		t.Helper()
		got := r.receipt(t, res)
		assert.Equal(t, *got.EdgeTokens, len(chat.EncodeText(tok, prompts[0])))
		if got.Response.IDs != idsDigest(t, r, keys, got.Response.KeyID, want) {
			t.Errorf("%s: the workers computed other ids than one process does", what)
		}
	}
	check("alone", ask(prompts[0]))
	var wg sync.WaitGroup
	var first *http.Response
	for i, p := range prompts {
		wg.Go(func() {
			if res := ask(p); i == 0 {
				first = res
			}
		})
	}
	wg.Wait()
	check("beside seven others", first)
}

// prompt makes English of at least n tokens; no two share a beginning.
func prompt(tok *tokenizer.Tokenizer, seed, n int) string {
	words := strings.Fields("the ship sails over a calm sea while its crew sings of far harbours and old storms that nobody else remembers any more")
	var b strings.Builder
	fmt.Fprintf(&b, "Log book number %d.", seed)
	for i := seed; ; i++ {
		fmt.Fprintf(&b, " %s %s %s.", words[i%len(words)], words[(i*7+seed)%len(words)], words[(i*3)%len(words)])
		if i%16 == 0 && len(tok.Encode(nil, b.String(), tokenizer.Plain)) >= n {
			return b.String()
		}
	}
}

// alone generates greedily in this process, prompt and output in one pool.
func alone(t *testing.T, l *model.Llama, ids []int32, output int) []int32 {
	t.Helper()
	m, err := compute.Load(l, compute.Options{DType: kv.F16, Threads: 2})
	assert.NoError(t, err)
	defer func() { assert.NoError(t, m.Close()) }()
	pool, err := kv.New(kv.Config{Geometry: m.Geometry(), Pages: m.Geometry().PagesFor(len(ids) + output)})
	assert.NoError(t, err)
	defer func() { assert.NoError(t, pool.Close()) }()
	credits, err := pool.Reserve(id.Owner{1}, m.Geometry().PagesFor(len(ids)+output))
	assert.NoError(t, err)
	pages, err := credits.Fill(id.NewLease())
	assert.NoError(t, err)
	defer pages.Abort()
	assert.NoError(t, pages.Grant(m.Geometry().PagesFor(len(ids)+output)))
	logits := make([]float32, m.Vocab())
	step := func(tokens []int32, pos int) {
		table, err := pages.Table(pos, len(tokens))
		assert.NoError(t, err)
		defer table.Close()
		s := []compute.Span{{Tokens: tokens, Pos: pos, Pages: table, Logits: logits}}
		assert.NoError(t, m.Forward(s))
		assert.NoError(t, table.Advance(s[0].Wrote))
	}
	step(ids, 0)
	var out []int32
	for len(out) < output {
		best := 0
		for i, v := range logits {
			if v > logits[best] {
				best = i
			}
		}
		out = append(out, int32(best))
		step(out[len(out)-1:], len(ids)+len(out)-1)
	}
	return out
}

// idsDigest is the digest that audit/receipt documents, made anew here.
func idsDigest(t *testing.T, r *run, keys tenancy.KeyFile, keyID string, ids []int32) string {
	t.Helper()
	out, errs, err := r.bulkhead(t, "receipt", "get", latest(t, r))
	if err != nil {
		t.Fatal(errs)
	}
	var who struct {
		Tenant string `json:"tenant_id"`
	}
	assert.NoError(t, json.Unmarshal([]byte(out), &who))
	tenant, err := id.ParseTenant(who.Tenant)
	assert.NoError(t, err)
	key, ok := keys.DigestKeyByID(keyID, tenant)
	assert.True(t, ok)
	m := hmac.New(sha256.New, key[:])
	m.Write([]byte("bulkhead response ids v1\x00"))
	for _, v := range ids {
		m.Write(binary.LittleEndian.AppendUint32(nil, uint32(v)))
	}
	return hex.EncodeToString(m.Sum(nil))
}

// latest makes a request and returns the id of its receipt: a way to learn the
// tenant of the key.
func latest(t *testing.T, r *run) string {
	t.Helper()
	res, _ := r.ask(t, "/v1/completions", fmt.Sprintf(`{"model":%q,"prompt":"x","max_tokens":1}`, r.Model))
	return res.Header.Get("X-Bulkhead-Receipt")
}
