package main_test

import (
	"encoding/json"
	"strings"
	"testing"

	"bulkhead.dev/infra/assert"
)

// A limit holds across a kill -9, and says what it says in the terms of SDKs.
func TestLimits(t *testing.T) {
	t.Parallel()
	data := scratch(t)
	path := randomModel(t, data)
	r := start(t, data, path)
	do := func(args ...string) string {
		t.Helper()
		out, errs, err := r.bulkhead(t, args...)
		if err != nil {
			t.Fatal(errs)
		}
		return out
	}
	ask := func() (status int, header map[string][]string, code, kind string) {
		res, body := r.ask(t, "/v1/chat/completions", r.chat(r.Model, `,"max_tokens":3`))
		var e struct {
			Error struct{ Code, Type string } `json:"error"`
		}
		_ = json.Unmarshal([]byte(body), &e)
		return res.StatusCode, res.Header, e.Error.Code, e.Error.Type
	}
	assert.True(t, strings.Count(do("limit", "list"), "operator") == 6)
	assert.True(t, strings.HasPrefix(do("limit", "set", "requests", "3", "--per", "day"), "lim_"))
	status, first, _, _ := ask()
	assert.Equal(t, status, 200)
	assert.Equal(t, first["X-Ratelimit-Limit-Requests"], []string{"1000"})
	status, second, _, _ := ask()
	assert.Equal(t, status, 200)
	assert.True(t, first["X-Ratelimit-Remaining-Tokens"][0] > second["X-Ratelimit-Remaining-Tokens"][0])

	r.kill(t)
	again := start(t, data, path)
	again.APIKey = r.APIKey
	r = again
	status, _, _, _ = ask()
	assert.Equal(t, status, 200)
	status, header, code, kind := ask()
	assert.Equal(t, []any{status, code, kind, header["X-Should-Retry"]}, []any{429, "organization_usage_limit_exceeded", "insufficient_quota", []string{"false"}})
	assert.True(t, strings.Contains(do("limit", "effective", "--model", r.Model), "requests per day, 0 of 3 are left"))
	do("limit", "set", "concurrent", "0")
	status, _, code, kind = ask()
	assert.Equal(t, []any{status, code, kind}, []any{429, "rate_limit_exceeded", "requests"})
	// There is no way around it.
	for path, body := range map[string]string{
		"/v1/completions":      `{"model":"` + r.Model + `","prompt":"x","max_tokens":1}`,
		"/v1/chat/completions": r.chat(r.Model, `,"max_tokens":1,"stream":true`),
	} {
		res, body := r.ask(t, path, body)
		assert.Equal(t, res.StatusCode, 429)
		assert.True(t, strings.Contains(body, "may run at once"))
	}
	_, _, err := r.bulkhead(t, "chat", "--model", r.Model, "hello") // a stream of Connect
	assert.True(t, err != nil)
	assert.Equal(t, do("price", "list"), "MODEL  METER  PER MILLION  FROM\n")
}
