// Package config is the configuration of the platform: one struct whose field
// comments are the operator's manual. A file is decoded strictly (an unknown
// field is an error, not a typo that has no effect), the environment overrides
// the file, and command-line flags override both.
//
// bulkhead.yaml beside this file lists every field with its default; a test
// keeps it equal to [Default].
package config

import (
	"bytes"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"reflect"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/goccy/go-yaml"

	"bulkhead.dev/infra/secret"
)

// Example is a configuration file with every field, commented, at its default.
//
//go:embed bulkhead.yaml
var Example string

// Config is the whole configuration. The tag env names the variable that
// overrides a field.
type Config struct {
	// Data is the folder that holds keys, models and the private database.
	// Empty: /var/lib/bulkhead for root, ~/.local/share/bulkhead otherwise.
	Data string `yaml:"data" env:"BULKHEAD_DATA"`
	// DatabaseURL is a PostgreSQL 15 or later whose user may create roles and
	// the database's tables. Empty: a private server in the data folder.
	DatabaseURL secret.String `yaml:"database_url" env:"DATABASE_URL"`
	// PostgresBin is the folder with the binaries for the private server.
	// Empty: the newest that is found on the machine.
	PostgresBin string `yaml:"postgres_bin" env:"BULKHEAD_PG_BIN"`
	// Model is the name of a model in the data folder, or a GGUF file.
	Model string `yaml:"model" env:"BULKHEAD_MODEL"`
	// UnlistedTemplates lets a model chat although its chat template is not one
	// that was checked against a reference. It still runs in the sandbox.
	UnlistedTemplates bool `yaml:"unlisted_templates" env:"BULKHEAD_UNLISTED_TEMPLATES"`

	Public  Public  `yaml:"public"`
	Ops     Ops     `yaml:"ops"`
	Worker  Worker  `yaml:"worker"`
	Limits  Limits  `yaml:"limits"`
	Log     Log     `yaml:"log"`
	Timeout Timeout `yaml:"timeout"`
}

// Public is the listener for clients.
type Public struct {
	// Listen is host:port; port 0 takes a free one.
	Listen string `yaml:"listen" env:"BULKHEAD_LISTEN"`
	// TLSCert and TLSKey are PEM files. Without them the platform refuses to
	// listen on anything but loopback, unless BehindProxy is set.
	TLSCert string `yaml:"tls_cert" env:"BULKHEAD_TLS_CERT"`
	TLSKey  string `yaml:"tls_key" env:"BULKHEAD_TLS_KEY"`
	// BehindProxy says that something in front terminates TLS.
	BehindProxy bool `yaml:"behind_proxy" env:"BULKHEAD_BEHIND_PROXY"`
	// TrustedProxies are the networks whose X-Forwarded-For is believed.
	TrustedProxies []netip.Prefix `yaml:"trusted_proxies"`
}

// Ops is the listener for operations: /healthz, /readyz, /metrics. It has no
// authentication and should stay on loopback or a private network.
type Ops struct {
	// Listen is host:port; port 0 takes a free one.
	Listen string `yaml:"listen" env:"BULKHEAD_OPS_LISTEN"`
}

// Worker is how the two engine processes are set up.
type Worker struct {
	// Threads per worker for arithmetic. 0: one per CPU.
	Threads int `yaml:"threads" env:"BULKHEAD_THREADS"`
	// ContextWindow is how many tokens prompt and answer may have together, at
	// most the model's window. 0: the model's.
	ContextWindow int `yaml:"context_window" env:"BULKHEAD_CONTEXT_WINDOW"`
	// PrefillPoolTokens and DecodePoolTokens are the token positions in the KV
	// pool of each worker. 0: twice the context window on prefill and four times on decode,
	// at most a quarter of the machine's memory, at least one window.
	PrefillPoolTokens int `yaml:"prefill_pool_tokens" env:"BULKHEAD_PREFILL_POOL_TOKENS"`
	DecodePoolTokens  int `yaml:"decode_pool_tokens" env:"BULKHEAD_DECODE_POOL_TOKENS"`
	// KVType is the number format of the KV cache: f16, or f32 for tests.
	KVType string `yaml:"kv_type" env:"BULKHEAD_KV_TYPE"`
	// Scrub says when a granted page is overwritten: on-tenant-change, or
	// always.
	Scrub string `yaml:"scrub" env:"BULKHEAD_SCRUB"`
	// ScrubMBPerSecond is the memory bandwidth, in millions of bytes a second,
	// that wiping free pages ahead of their use may take. 0 wipes at use.
	ScrubMBPerSecond int `yaml:"scrub_mb_per_second" env:"BULKHEAD_SCRUB_MB_PER_SECOND"`
	// QuarantinePages is how many pages may be in quarantine on each worker, on
	// top of the pool, before it refuses work. 0: a sixteenth of the pool.
	QuarantinePages int `yaml:"quarantine_pages" env:"BULKHEAD_QUARANTINE_PAGES"`
	// PrefixCachePercent is the share of the prefill pool that remembers the
	// prompts of one tenant. 0 remembers none.
	PrefixCachePercent int `yaml:"prefix_cache_percent" env:"BULKHEAD_PREFIX_CACHE_PERCENT"`
	// HandoffVersion is the highest version of the hand-off that workers speak,
	// to hold back a new one. 0: the newest.
	HandoffVersion int `yaml:"handoff_version" env:"BULKHEAD_HANDOFF_VERSION"`
	// Backend is c, go, or empty for the best that this build has. sim computes
	// nothing: answers are words without meaning, and receipts say so. It is for
	// measuring everything but the model.
	Backend string `yaml:"backend" env:"BULKHEAD_BACKEND"`
	// Sim is how long the backend sim takes.
	Sim Sim `yaml:"sim"`
	// MaxRunning is the number of sequences that decode steps together.
	MaxRunning int `yaml:"max_running" env:"BULKHEAD_MAX_RUNNING"`
	// Queue is the number of requests that wait at a worker before it answers
	// that it is overloaded.
	Queue int `yaml:"queue" env:"BULKHEAD_QUEUE"`
	// PrefillChunk is the number of prompt tokens computed at a time; between
	// chunks other prompts get their turn and a canceled one stops.
	PrefillChunk int `yaml:"prefill_chunk" env:"BULKHEAD_PREFILL_CHUNK"`
}

// Sim is how long the simulated backend takes, in microseconds. All 0: it answers at
// once.
type Sim struct {
	// PromptTokenUS is for each token of a prompt.
	PromptTokenUS int `yaml:"prompt_token_us" env:"BULKHEAD_SIM_PROMPT_TOKEN_US"`
	// StepUS is for each step of decoding, and SequenceUS for each sequence in it.
	StepUS     int `yaml:"step_us" env:"BULKHEAD_SIM_STEP_US"`
	SequenceUS int `yaml:"sequence_us" env:"BULKHEAD_SIM_SEQUENCE_US"`
}

// Limits protect tenants from each other.
type Limits struct {
	// TenantConcurrency is the number of requests of one tenant that may run
	// or wait at once.
	TenantConcurrency int `yaml:"tenant_concurrency" env:"BULKHEAD_TENANT_CONCURRENCY"`
	// BodyBytes is the size of the largest request body.
	BodyBytes int64 `yaml:"body_bytes" env:"BULKHEAD_BODY_BYTES"`
	// DefaultOutputTokens is the longest answer to a request that names no
	// maximum; the rest of the context window caps it.
	DefaultOutputTokens int `yaml:"default_output_tokens" env:"BULKHEAD_DEFAULT_OUTPUT_TOKENS"`
}

// Log is how the platform reports what it does. Content never appears in it.
type Log struct {
	// Level is debug, info, warn or error.
	Level string `yaml:"level" env:"BULKHEAD_LOG_LEVEL"`
	// Format is text or json; empty is text on a terminal and json elsewhere.
	Format string `yaml:"format" env:"BULKHEAD_LOG_FORMAT"`
}

// Timeout bounds waits.
type Timeout struct {
	// Drain is how long running requests may go on after SIGTERM.
	Drain Duration `yaml:"drain" env:"BULKHEAD_DRAIN_TIMEOUT"`
	// Handoff is how long decode waits for the pages of a prompt after prefill
	// was asked for them.
	Handoff Duration `yaml:"handoff" env:"BULKHEAD_HANDOFF_TIMEOUT"`
	// Evidence is how long the end of an answer waits for its receipt to be
	// durable; after that the answer ends in an error and the receipt says
	// that it was withheld.
	Evidence Duration `yaml:"evidence" env:"BULKHEAD_EVIDENCE_TIMEOUT"`
}

// Duration is a time span that reads and prints as "10s".
type Duration time.Duration

// UnmarshalText reads the form of time.ParseDuration.
func (d *Duration) UnmarshalText(b []byte) error {
	v, err := time.ParseDuration(string(b))
	if err != nil {
		return err
	}
	if v <= 0 {
		return fmt.Errorf("%s is not a positive time span", b)
	}
	*d = Duration(v)
	return nil
}

// MarshalText prints the form of time.Duration.
func (d Duration) MarshalText() ([]byte, error) { return []byte(time.Duration(d).String()), nil }

// Std returns the time.Duration.
func (d Duration) Std() time.Duration { return time.Duration(d) }

// Default returns the configuration that holds where nothing is said.
func Default() Config {
	return Config{
		Model:  "smollm2-135m",
		Public: Public{Listen: "127.0.0.1:8080"},
		Ops:    Ops{Listen: "127.0.0.1:9090"},
		Worker: Worker{KVType: "f16", Scrub: "on-tenant-change", MaxRunning: 32, Queue: 128, PrefillChunk: 256, ScrubMBPerSecond: 512, PrefixCachePercent: 25},
		Limits: Limits{TenantConcurrency: 16, BodyBytes: 8 << 20, DefaultOutputTokens: 1024},
		Log:    Log{Level: "info"},
		Timeout: Timeout{
			Drain:    Duration(20 * time.Second),
			Handoff:  Duration(2 * time.Minute),
			Evidence: Duration(10 * time.Second),
		},
	}
}

// Load reads a file (nil for none) over the defaults, and then the environment,
// which getenv stands for. The result is not validated yet: flags come last.
func Load(file io.Reader, getenv func(string) string) (Config, error) {
	c := Default()
	if file != nil {
		b, err := io.ReadAll(io.LimitReader(file, maxFile+1))
		if err != nil {
			return c, fmt.Errorf("read configuration: %w", err)
		}
		if len(b) > maxFile {
			return c, fmt.Errorf("configuration is over %d bytes", maxFile)
		}
		if err := yaml.NewDecoder(bytes.NewReader(b), yaml.Strict()).Decode(&c); err != nil && !errors.Is(err, io.EOF) {
			// Without the excerpt of the file: one line, and no secret in it.
			return c, fmt.Errorf("configuration: %s", yaml.FormatError(err, false, false))
		}
	}
	if err := fromEnv(reflect.ValueOf(&c).Elem(), getenv); err != nil {
		return c, err
	}
	return c, nil
}

// maxFile bounds a configuration file.
const maxFile = 1 << 20

func fromEnv(v reflect.Value, getenv func(string) string) error {
	for i := range v.NumField() {
		f, field := v.Field(i), v.Type().Field(i)
		name := field.Tag.Get("env")
		if name == "" {
			if f.Kind() == reflect.Struct {
				if err := fromEnv(f, getenv); err != nil {
					return err
				}
			}
			continue
		}
		s := getenv(name)
		if s == "" {
			continue
		}
		if err := setText(f, s); err != nil {
			// The value may be a secret: name the variable, not what it holds.
			return fmt.Errorf("environment variable %s: %w", name, err)
		}
	}
	return nil
}

func setText(f reflect.Value, s string) error {
	if u, ok := f.Addr().Interface().(interface{ UnmarshalText([]byte) error }); ok {
		return u.UnmarshalText([]byte(s))
	}
	switch f.Kind() {
	case reflect.String:
		f.SetString(s)
	case reflect.Bool:
		b, err := strconv.ParseBool(s)
		if err != nil {
			return errors.New("want true or false")
		}
		f.SetBool(b)
	case reflect.Int, reflect.Int64:
		n, err := strconv.ParseInt(s, 10, 64)
		if err != nil {
			return errors.New("want a whole number")
		}
		f.SetInt(n)
	default:
		panic("config: no environment form for " + f.Type().String())
	}
	return nil
}

// Validate refuses values that cannot work, each with the field's name.
func (c *Config) Validate() error {
	var errs []error
	bad := func(field, format string, args ...any) {
		errs = append(errs, fmt.Errorf("%s: %s", field, fmt.Sprintf(format, args...)))
	}
	oneOf := func(field, v string, allowed ...string) {
		for _, a := range allowed {
			if v == a {
				return
			}
		}
		bad(field, "%q is not one of %s", v, strings.Join(allowed, ", "))
	}
	within := func(field string, v, lo, hi int) {
		if v < lo || v > hi {
			bad(field, "%d is outside %d to %d", v, lo, hi)
		}
	}
	if c.Model == "" {
		bad("model", "is empty")
	}
	if (c.Public.TLSCert == "") != (c.Public.TLSKey == "") {
		bad("public.tls_cert", "needs public.tls_key, and the other way round")
	}
	oneOf("worker.kv_type", c.Worker.KVType, "f16", "f32")
	oneOf("worker.scrub", c.Worker.Scrub, "on-tenant-change", "always")
	oneOf("worker.backend", c.Worker.Backend, "", "c", "go", Simulated)
	oneOf("log.level", c.Log.Level, "debug", "info", "warn", "error")
	oneOf("log.format", c.Log.Format, "", "text", "json")
	within("worker.threads", c.Worker.Threads, 0, maxThreads)
	running := maxRunning
	if c.Worker.Backend == Simulated {
		running = maxSimulated
	} else if c.Worker.Sim != (Sim{}) {
		bad("worker.sim", "needs worker.backend: %s", Simulated)
	}
	within("worker.max_running", c.Worker.MaxRunning, 1, running)
	within("worker.sim.prompt_token_us", c.Worker.Sim.PromptTokenUS, 0, maxSimMicros)
	within("worker.sim.step_us", c.Worker.Sim.StepUS, 0, maxSimMicros)
	within("worker.sim.sequence_us", c.Worker.Sim.SequenceUS, 0, maxSimMicros)
	within("worker.queue", c.Worker.Queue, 1, 1<<16)
	within("worker.prefill_chunk", c.Worker.PrefillChunk, 16, 4096)
	within("worker.context_window", c.Worker.ContextWindow, 0, 1<<30)
	within("worker.scrub_mb_per_second", c.Worker.ScrubMBPerSecond, 0, 1<<20)
	within("worker.quarantine_pages", c.Worker.QuarantinePages, 0, 1<<20)
	within("worker.prefix_cache_percent", c.Worker.PrefixCachePercent, 0, 100)
	within("worker.handoff_version", c.Worker.HandoffVersion, 0, 1<<15)
	within("worker.prefill_pool_tokens", c.Worker.PrefillPoolTokens, 0, 1<<30)
	within("worker.decode_pool_tokens", c.Worker.DecodePoolTokens, 0, 1<<30)
	within("limits.tenant_concurrency", c.Limits.TenantConcurrency, 1, 1<<16)
	within("limits.default_output_tokens", c.Limits.DefaultOutputTokens, 1, 1<<20)
	if c.Limits.BodyBytes < 1024 || c.Limits.BodyBytes > 1<<30 {
		bad("limits.body_bytes", "%d is outside 1024 to %d", c.Limits.BodyBytes, 1<<30)
	}
	return errors.Join(errs...)
}

// Simulated is the backend that computes nothing.
const Simulated = "sim"

const (
	// maxThreads bounds the threads of a worker.
	maxThreads = 256
	// maxRunning bounds the sequences of a step: a model has scratch for each.
	maxRunning = 1 << 10
	// maxSimulated is the same without a model.
	maxSimulated = 1 << 14
	// maxSimMicros is a minute, beyond which a worker looks dead.
	maxSimMicros = 60_000_000
)

// ThreadsOrDefault returns the number of threads of a worker.
func (w Worker) ThreadsOrDefault() int {
	if w.Threads > 0 {
		return w.Threads
	}
	return min(runtime.GOMAXPROCS(0), maxThreads)
}
