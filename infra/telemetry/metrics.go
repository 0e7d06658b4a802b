// Package telemetry is what the platform tells its operator: Prometheus metrics
// with units in their names and bounded labels, and structured logs. Neither
// holds the content of a request, and no metric has a label that a tenant or a
// client chooses.
package telemetry

import (
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Buckets of the latency histograms, in seconds. Time to first token spans a
// short prompt on an idle machine to a full window behind a queue; time between
// tokens spans a small model to an overloaded one.
var (
	ttftBuckets     = []float64{.01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 20, 60}
	durationBuckets = []float64{.01, .05, .1, .5, 1, 2, 5, 10, 30, 60, 300}
	tokenBuckets    = []float64{.002, .005, .01, .02, .05, .1, .2, .5, 1}
	settleBuckets   = []float64{.0005, .001, .002, .005, .01, .05, .1, .5, 1, 5, 10}
)

// Metrics are the platform's own counters. Its methods are safe for concurrent
// use.
type Metrics struct {
	Registry *prometheus.Registry

	requests  *prometheus.CounterVec
	duration  *prometheus.HistogramVec
	ttft      prometheus.Histogram
	inter     prometheus.Histogram
	prompt    prometheus.Counter
	output    prometheus.Counter
	refusals  *prometheus.CounterVec
	settle    prometheus.Histogram
	withheld  prometheus.Counter
	inflight  prometheus.Gauge
	restarts  *prometheus.CounterVec
	unauthorz prometheus.Counter
}

// NewMetrics makes the metrics in a registry of their own.
func NewMetrics() *Metrics {
	m := &Metrics{Registry: prometheus.NewRegistry()}
	counter := func(name, help string) prometheus.Counter {
		c := prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
		m.Registry.MustRegister(c)
		return c
	}
	counters := func(name, help string, labels ...string) *prometheus.CounterVec {
		c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
		m.Registry.MustRegister(c)
		return c
	}
	histogram := func(name, help string, buckets []float64) prometheus.Histogram {
		h := prometheus.NewHistogram(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets})
		m.Registry.MustRegister(h)
		return h
	}
	m.requests = counters("bulkhead_requests_total", "Requests by route and status code.", "route", "code")
	m.duration = prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "bulkhead_request_duration_seconds",
		Help: "Time from the first byte of a request to the last of its answer.", Buckets: durationBuckets}, []string{"route"})
	m.Registry.MustRegister(m.duration)
	m.ttft = histogram("bulkhead_time_to_first_token_seconds", "Time from admission to the first piece of text (TTFT).", ttftBuckets)
	m.inter = histogram("bulkhead_inter_token_seconds", "Time between pieces of text of one answer.", tokenBuckets)
	m.prompt = counter("bulkhead_prompt_tokens_total", "Prompt tokens of finished requests, as settled.")
	m.output = counter("bulkhead_output_tokens_total", "Output tokens of finished requests, as settled.")
	m.refusals = counters("bulkhead_refusals_total", "Requests that ended without an answer after admission, by leg and reason.", "leg", "reason")
	m.settle = histogram("bulkhead_settle_duration_seconds", "Time until usage and receipt of a request were durable.", settleBuckets)
	m.withheld = counter("bulkhead_withheld_total", "Answers withheld because their receipt was not durable in time.")
	m.inflight = prometheus.NewGauge(prometheus.GaugeOpts{Name: "bulkhead_requests_in_flight", Help: "Admitted requests that are not settled yet."})
	m.Registry.MustRegister(m.inflight)
	m.restarts = counters("bulkhead_worker_restarts_total", "Worker processes that ended and were started anew, by role.", "role")
	m.unauthorz = counter("bulkhead_unauthenticated_total", "Requests without a valid key.")
	m.Registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// Handler serves the metrics in the text format.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.Registry, promhttp.HandlerOpts{})
}

// Request counts an HTTP or RPC request; code is the status that the caller saw.
func (m *Metrics) Request(route, code string, d time.Duration) {
	m.requests.WithLabelValues(route, code).Inc()
	m.duration.WithLabelValues(route).Observe(d.Seconds())
}

// Unauthenticated counts a request without a valid key.
func (m *Metrics) Unauthenticated() { m.unauthorz.Inc() }

// Admitted counts a request in; the returned function counts it out.
func (m *Metrics) Admitted() func() {
	m.inflight.Inc()
	return m.inflight.Dec
}

// FirstToken records the time to first token.
func (m *Metrics) FirstToken(d time.Duration) { m.ttft.Observe(d.Seconds()) }

// NextToken records the time since the piece of text before.
func (m *Metrics) NextToken(d time.Duration) { m.inter.Observe(d.Seconds()) }

// Refused counts a request that ended without an answer. Reasons come from the
// closed lists of the legs, so the label is bounded.
func (m *Metrics) Refused(leg, reason string) { m.refusals.WithLabelValues(leg, reason).Inc() }

// Settled records a settlement.
func (m *Metrics) Settled(d time.Duration, prompt, output int) {
	m.settle.Observe(d.Seconds())
	m.prompt.Add(float64(prompt))
	m.output.Add(float64(output))
}

// Withheld counts an answer that was not released for want of evidence.
func (m *Metrics) Withheld() { m.withheld.Inc() }

// WorkerRestarted counts a restart.
func (m *Metrics) WorkerRestarted(role string) { m.restarts.WithLabelValues(role).Inc() }
