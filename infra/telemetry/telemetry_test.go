package telemetry_test

import (
	"bytes"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/telemetry"
)

func TestMetrics(t *testing.T) {
	t.Parallel()
	m := telemetry.NewMetrics()
	m.Collect(func() []telemetry.WorkerStats {
		return []telemetry.WorkerStats{
			{Role: "decode", Live: true, Pages: map[string]uint32{"free": 7}, Granted: 2, Refusals: map[string]uint64{"digest": 1}},
			{Role: "decode", Pages: map[string]uint32{"free": 3}, Granted: 5},
		}
	}, func() []telemetry.PoolStats {
		return []telemetry.PoolStats{{Name: "auth", Total: 3, Acquired: 1, Max: 8}}
	}, func() telemetry.LimitStats { return telemetry.LimitStats{Local: 4, Slices: 6} })
	m.Request("chat", "200", 30*time.Millisecond)
	out := m.Admitted()
	m.FirstToken(20 * time.Millisecond)
	m.NextToken(5 * time.Millisecond)
	m.Refused("decode", "digest")
	m.Settled(time.Millisecond, 10, 20)
	m.Withheld()
	m.WorkerRestarted("decode")
	m.Unauthenticated()
	rec := httptest.NewRecorder()
	m.Handler().ServeHTTP(rec, httptest.NewRequest("GET", "/metrics", nil))
	body := rec.Body.String()
	for _, want := range []string{
		`bulkhead_requests_total{code="200",route="chat"} 1`,
		`bulkhead_kv_pages{role="decode",state="free"} 10`,
		`bulkhead_kv_granted_pages_total{role="decode"} 7`,
		`bulkhead_worker_refusals_total{reason="digest",role="decode"} 1`,
		`bulkhead_postgres_connections{pool="auth",state="idle"} 2`,
		`bulkhead_requests_in_flight 1`,
		`bulkhead_limit_reservations_total{outcome="local"} 4`,
		`bulkhead_limit_slices 6`,
		`bulkhead_output_tokens_total 20`,
		`bulkhead_time_to_first_token_seconds_count 1`,
	} {
		if !strings.Contains(body, want) {
			t.Errorf("metrics lack %s", want)
		}
	}
	out()
}

func TestLogger(t *testing.T) {
	t.Parallel()
	var b bytes.Buffer
	telemetry.NewLogger(&b, "warn", "").Info("hidden")
	assert.Equal(t, b.Len(), 0)
	telemetry.NewLogger(&b, "warn", "").Warn("shown")
	assert.True(t, strings.HasPrefix(b.String(), "{"))
	b.Reset()
	telemetry.NewLogger(&b, "debug", "text").Debug("shown")
	assert.True(t, strings.HasPrefix(b.String(), "time="))
}
