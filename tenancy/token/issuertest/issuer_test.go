package issuertest_test

import (
	"bufio"
	"context"
	"io"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/go-json-experiment/json"
	"go.uber.org/goleak"

	"bulkhead.dev/infra/assert"
	"bulkhead.dev/tenancy/token"
	"bulkhead.dev/tenancy/token/issuertest"
)

func TestMain(m *testing.M) {
	issuertest.Main()
	goleak.VerifyTestMain(m)
}

type trust []token.Issuer

func (s trust) IssuersByURL(context.Context, string) ([]token.Issuer, error) { return s, nil }

// A test binary serves as an issuer in another process, gives tokens to whoever asks, and ends with
// SIGTERM.
func TestMainServes(t *testing.T) {
	t.Parallel()
	self, err := os.Executable()
	assert.NoError(t, err)
	cmd := exec.CommandContext(t.Context(), self)
	cmd.Env = []string{issuertest.Env + "=127.0.0.1:0"}
	out, err := cmd.StdoutPipe()
	assert.NoError(t, err)
	assert.NoError(t, cmd.Start())
	lines := bufio.NewReader(out)
	url, err := lines.ReadString('\n')
	assert.NoError(t, err)
	url = strings.TrimSpace(url)

	raw := get(t, url, `{"sub":"bob","aud":"here","groups":["a"]}`, http.StatusOK)
	v := token.NewVerifier(trust{{ID: "i", URL: url, Audience: "here", Claims: token.Mapping{Roles: "groups", RoleNames: map[string]string{"a": "admin"}}}},
		time.Now, token.Options{Internal: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}})
	defer v.Close()
	who, err := v.Verify(t.Context(), raw)
	assert.NoError(t, err)
	assert.Equal(t, who.Subject, "bob")
	assert.Equal(t, who.Roles, []string{"admin"})
	get(t, url, `[]`, http.StatusBadRequest)
	get(t, url, `{"x":"`+strings.Repeat("x", 1<<17)+`"}`, http.StatusBadRequest)

	assert.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	_, err = lines.ReadString('\n')
	assert.ErrorIs(t, err, io.EOF)
	assert.NoError(t, cmd.Wait())
}

func get(t *testing.T, url, claims string, status int) string {
	t.Helper()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Post(url+"/token", "application/json", strings.NewReader(claims))
	assert.NoError(t, err)
	defer resp.Body.Close()
	assert.Equal(t, resp.StatusCode, status)
	if status != http.StatusOK {
		return ""
	}
	var answer struct {
		Token string `json:"id_token"`
	}
	b, err := io.ReadAll(resp.Body)
	assert.NoError(t, err)
	assert.NoError(t, json.Unmarshal(b, &answer))
	return answer.Token
}

func TestBadIssuers(t *testing.T) {
	t.Parallel()
	_, err := issuertest.New(":", time.Now)
	assert.True(t, err != nil)
	_, err = issuertest.NewKey("k", "HS256")
	assert.True(t, err != nil)
	i := issuertest.Start(t, "/realms/one", time.Now)
	for path, status := range map[string]int{"/realms/one/keys": 200, "/realms/one/token": 404, "/other": 404} {
		client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
		resp, err := client.Get(strings.TrimSuffix(i.URL(), "/realms/one") + path)
		assert.NoError(t, err)
		resp.Body.Close()
		assert.Equal(t, resp.StatusCode, status)
	}
}
