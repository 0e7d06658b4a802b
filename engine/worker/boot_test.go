package worker

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"bulkhead.dev/engine/worker/peer"
	"bulkhead.dev/infra/assert"
)

func TestBootRoundTrip(t *testing.T) {
	t.Parallel()
	b := boot(t, authority(t), peer.Prefill)
	b.OfferWait = Span(90 * time.Second)
	doc, err := json.Marshal(b)
	assert.NoError(t, err)
	assert.True(t, strings.Contains(string(doc), `"offer_wait":"1m30s"`))
	got, err := ParseBoot(doc)
	assert.NoError(t, err)
	assert.Equal(t, got, b)
}

// The key of a worker appears neither when a boot document is printed nor when
// one cannot be read.
func TestBootKeepsItsSecret(t *testing.T) {
	t.Parallel()
	b := boot(t, authority(t), peer.Decode)
	for _, f := range []string{"%v", "%+v", "%#v", "%d", "%x"} {
		s := fmt.Sprintf(f, b)
		assert.False(t, strings.Contains(s, "PRIVATE"))
		assert.True(t, len(s) < 4000)
	}
	for _, doc := range []string{
		"", "{", "[]", "null x", `{"rôle":"x"}`, `{"credentials":{"key":"SECRET"}}`, `{} {}`, `{"offer_wait":"SECRET"}`, `{"pages":"SECRET"}`,
	} {
		_, err := ParseBoot([]byte(doc))
		if err == nil || strings.Contains(err.Error(), "SECRET") {
			t.Errorf("%q: %v", doc, err)
		}
	}
}

func FuzzParseBoot(f *testing.F) {
	f.Add([]byte(`{"role":"prefill","pages":3}`))
	f.Fuzz(func(t *testing.T, doc []byte) {
		if b, err := ParseBoot(doc); err == nil {
			_, _ = b.check()
		}
	})
}
