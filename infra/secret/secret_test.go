package secret_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/secret"
)

func TestNeverPrinted(t *testing.T) {
	t.Parallel()
	type config struct {
		Password secret.String
		Nested   *struct{ Key secret.String }
	}
	c := config{Password: secret.New("hunter2"), Nested: &struct{ Key secret.String }{secret.New("hunter2")}}
	var out bytes.Buffer
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%d"} {
		fmt.Fprintf(&out, verb+" "+verb+"\n", c, c.Password)
		fmt.Fprintf(&out, verb+"\n", *c.Nested)
	}
	assert.NoError(t, json.NewEncoder(&out).Encode(c))
	slog.New(slog.NewJSONHandler(&out, nil)).Info("x", "config", c, "password", c.Password)
	slog.New(slog.NewTextHandler(&out, nil)).Info("x", "config", c, "password", c.Password)
	for _, leaked := range []string{"hunter2", fmt.Sprintf("%x", "hunter2")} {
		if strings.Contains(out.String(), leaked) {
			t.Fatalf("%q is in:\n%s", leaked, out.String())
		}
	}
	assert.Equal(t, c.Password.Reveal(), "hunter2")
}
