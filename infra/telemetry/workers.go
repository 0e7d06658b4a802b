package telemetry

import "github.com/prometheus/client_golang/prometheus"

// WorkerStats is what one worker reported last.
type WorkerStats struct {
	Role          string
	Live          bool
	Pages         map[string]uint32 // by state
	Queued        uint32
	Running       uint32
	Granted       uint64
	Scrubbed      uint64
	ScrubbedAhead uint64 // of Scrubbed
	Cached        uint32 // pages of remembered prompts
	CachedTokens  uint64 // prompt tokens found in them
	MaxQuarantine uint32 // pages beyond which work is refused
	HandoffBytes  uint64
	PrefillTokens uint64
	DecodeTokens  uint64
	Refusals      map[string]uint64 // by reason
}

// PoolStats is the state of one pool of database connections.
type PoolStats struct {
	Name     string
	Total    int32
	Acquired int32
	Max      int32
	Waits    int64 // acquisitions that had to wait
}

// LimitStats counts what became of reservations from limits, since the start.
type LimitStats struct {
	Local       uint64 // out of slices, without asking the database
	Asked       uint64 // after an exchange with it
	Refused     uint64
	Unavailable uint64 // it could not be known
	Exchanges   uint64
	Warnings    uint64 // soft limits that were passed
	Slices      int    // held now
}

// Collect registers metrics that are read from their owners when asked for.
// Workers are labelled by role, not by epoch: an epoch is a new label value at
// every restart.
func (m *Metrics) Collect(workers func() []WorkerStats, pools func() []PoolStats, limits func() LimitStats) {
	m.Registry.MustRegister(&collector{workers: workers, pools: pools, limits: limits})
}

type collector struct {
	workers func() []WorkerStats
	pools   func() []PoolStats
	limits  func() LimitStats
}

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(name, help, labels, nil)
}

var (
	descLive     = desc("bulkhead_worker_live", "Whether a worker of the role reports in time.", "role")
	descPages    = desc("bulkhead_kv_pages", "KV pages by state.", "role", "state")
	descQueued   = desc("bulkhead_worker_queued", "Requests that wait at the worker.", "role")
	descRunning  = desc("bulkhead_worker_running", "Requests that the worker computes.", "role")
	descGranted  = desc("bulkhead_kv_granted_pages_total", "Pages granted since the worker started.", "role")
	descScrubbed = desc("bulkhead_kv_scrubbed_pages_total", "Pages scrubbed since the worker started.", "role")
	descAhead    = desc("bulkhead_kv_scrubbed_ahead_pages_total", "Pages scrubbed ahead of their use since the worker started.", "role")
	descCached   = desc("bulkhead_kv_cached_pages", "Pages of remembered prompts.", "role")
	descHits     = desc("bulkhead_prefill_cached_tokens_total", "Prompt positions found in remembered pages since the worker started.", "role")
	descMaxQuar  = desc("bulkhead_kv_quarantine_limit_pages", "Pages in quarantine beyond which the worker refuses work.", "role")
	descHandoff  = desc("bulkhead_handoff_bytes_total", "Bytes of pages handed over since the worker started.", "role")
	descPrefill  = desc("bulkhead_prefill_computed_tokens_total", "Prompt positions computed since the worker started.", "role")
	descDecode   = desc("bulkhead_decode_computed_tokens_total", "Tokens decoded since the worker started.", "role")
	descRefusals = desc("bulkhead_worker_refusals_total", "Refusals of the worker since it started, by reason.", "role", "reason")
	descConns    = desc("bulkhead_postgres_connections", "Database connections.", "pool", "state")
	descMax      = desc("bulkhead_postgres_connections_max", "Largest number of database connections.", "pool")
	descReserved = desc("bulkhead_limit_reservations_total", "Reservations from limits, by what became of them: local, asked, refused or unavailable.", "outcome")
	descExchange = desc("bulkhead_limit_exchanges_total", "Exchanges of slices of limits with the database.")
	descWarnings = desc("bulkhead_limit_warnings_total", "Limits that passed the amount at which to warn.")
	descSlices   = desc("bulkhead_limit_slices", "Limits of which this replica holds a slice.")
	descWaits    = desc("bulkhead_postgres_waits_total", "Acquisitions of a database connection that had to wait.", "pool")
)

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descLive, descPages, descQueued, descRunning, descGranted, descScrubbed, descAhead, descCached, descHits, descMaxQuar, descHandoff,
		descPrefill, descDecode, descRefusals, descConns, descMax, descWaits, descReserved, descExchange, descWarnings, descSlices} {
		ch <- d
	}
}

// Collect implements prometheus.Collector. Workers of one role are added up.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	byRole := map[string]*WorkerStats{}
	for _, w := range c.workers() {
		t := byRole[w.Role]
		if t == nil {
			t = &WorkerStats{Role: w.Role, Pages: map[string]uint32{}, Refusals: map[string]uint64{}}
			byRole[w.Role] = t
		}
		t.Live = t.Live || w.Live
		t.Queued += w.Queued
		t.Running += w.Running
		t.Granted += w.Granted
		t.Scrubbed += w.Scrubbed
		t.ScrubbedAhead += w.ScrubbedAhead
		t.Cached += w.Cached
		t.CachedTokens += w.CachedTokens
		t.MaxQuarantine += w.MaxQuarantine
		t.HandoffBytes += w.HandoffBytes
		t.PrefillTokens += w.PrefillTokens
		t.DecodeTokens += w.DecodeTokens
		for s, n := range w.Pages {
			t.Pages[s] += n
		}
		for r, n := range w.Refusals {
			t.Refusals[r] += n
		}
	}
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	count := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, v, labels...)
	}
	for role, w := range byRole {
		live := 0.0
		if w.Live {
			live = 1
		}
		gauge(descLive, live, role)
		gauge(descQueued, float64(w.Queued), role)
		gauge(descRunning, float64(w.Running), role)
		count(descGranted, float64(w.Granted), role)
		count(descScrubbed, float64(w.Scrubbed), role)
		count(descAhead, float64(w.ScrubbedAhead), role)
		count(descHits, float64(w.CachedTokens), role)
		gauge(descCached, float64(w.Cached), role)
		gauge(descMaxQuar, float64(w.MaxQuarantine), role)
		count(descHandoff, float64(w.HandoffBytes), role)
		count(descPrefill, float64(w.PrefillTokens), role)
		count(descDecode, float64(w.DecodeTokens), role)
		for s, n := range w.Pages {
			gauge(descPages, float64(n), role, s)
		}
		for r, n := range w.Refusals {
			count(descRefusals, float64(n), role, r)
		}
	}
	for _, p := range c.pools() {
		gauge(descConns, float64(p.Acquired), p.Name, "acquired")
		gauge(descConns, float64(p.Total-p.Acquired), p.Name, "idle")
		gauge(descMax, float64(p.Max), p.Name)
		count(descWaits, float64(p.Waits), p.Name)
	}
	l := c.limits()
	for outcome, n := range map[string]uint64{"local": l.Local, "asked": l.Asked, "refused": l.Refused, "unavailable": l.Unavailable} {
		count(descReserved, float64(n), outcome)
	}
	count(descExchange, float64(l.Exchanges))
	count(descWarnings, float64(l.Warnings))
	gauge(descSlices, float64(l.Slices))
}
