package main_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"bulkhead.dev/audit/history"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/infra/pgdb"
	"bulkhead.dev/infra/pgembed"
	"bulkhead.dev/infra/secret"
	"bulkhead.dev/tenancy"
)

// pools connects to the private server of a running platform.
func (r *run) pools(t *testing.T) *pgdb.Pools {
	t.Helper()
	keys, err := tenancy.LoadKeyFile(filepath.Join(r.Data, "keys.json"))
	assert.NoError(t, err)
	b, err := os.ReadFile(filepath.Join(r.Data, "postgres", "data", "postmaster.pid"))
	assert.NoError(t, err)
	dsn := fmt.Sprintf("host='%s' port=%d dbname=postgres sslmode=disable", strings.Split(string(b), "\n")[4], pgembed.Port)
	p, err := pgdb.Open(t.Context(), pgdb.Source{DSN: secret.New(dsn), RoleSecret: keys.PostgresSecret()}, pgdb.DefaultSizes)
	assert.NoError(t, err)
	t.Cleanup(p.Close)
	return p
}

// What happened to the pages of a request can be looked up while the platform
// runs, and all of it after the platform ended in order.
func TestPageHistoryOfARequest(t *testing.T) {
	t.Parallel()
	data := scratch(t)
	model := randomModel(t, data)
	r := start(t, data, model)
	store := history.NewStore(r.pools(t).Settle)
	res, text := r.ask(t, "/v1/chat/completions", r.chat(r.Model, `,"max_tokens":40`))
	if res.StatusCode != 200 {
		t.Fatal(text)
	}
	out, errs, err := command(t, []string{"BULKHEAD_URL=" + r.URL, "BULKHEAD_DATA=" + data}, "pages", "--json")
	if err != nil {
		t.Fatal(errs)
	}
	var shown struct {
		Workers []struct{ Epoch, Role string }
	}
	assert.NoError(t, json.Unmarshal([]byte(out), &shown))
	epochs := map[string]id.Epoch{}
	for _, w := range shown.Workers {
		epochs[w.Role], err = id.ParseEpoch(w.Epoch)
		assert.NoError(t, err)
	}
	assert.Equal(t, len(epochs), 2)
	for role, epoch := range epochs {
		var p history.Past
		eventually(t, "history of "+role, func() bool {
			p, err = store.Grant(t.Context(), epoch, 0, 1)
			return err == nil && len(p.Tenures) == 1 && !p.Tenures[0].LastWrite.IsZero()
		})
		assert.True(t, p.Tenures[0].Owner != id.Owner{} && len(p.Gaps) == 0)
		_, sure := p.Before(1)
		assert.True(t, sure)
	}
	res, _ = r.ask(t, "/v1/chat/completions", r.chat(r.Model, `,"max_tokens":40`))
	assert.Equal(t, res.StatusCode, 200)
	r.stop(t)

	r = start(t, data, model)
	store = history.NewStore(r.pools(t).Settle)
	for role, epoch := range epochs {
		link, err := store.Verify(t.Context(), epoch)
		assert.NoError(t, err)
		p, err := store.Of(t.Context(), epoch, 0)
		assert.NoError(t, err)
		n := len(p.Tenures)
		assert.True(t, link.Number > 0 && n > 0 && len(p.Gaps) == 0)
		if role == "decode" { // prefill remembers prompts until it ends
			assert.True(t, !p.Tenures[n-1].Freed.IsZero())
		}
	}
}
