package config_test

import (
	"net/netip"
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/config"
	"bulkhead.dev/infra/secret"
)

var opts = cmp.Options{
	cmp.Comparer(func(a, b secret.String) bool { return a.Reveal() == b.Reveal() }),
	cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
	cmp.Comparer(func(a, b []netip.Prefix) bool { return len(a) == 0 && len(b) == 0 || reflect.DeepEqual(a, b) }),
}

func none(string) string { return "" }

func TestExampleIsTheDefault(t *testing.T) {
	t.Parallel()
	c, err := config.Load(strings.NewReader(config.Example), none)
	assert.NoError(t, err)
	assert.Equal(t, c, config.Default(), opts)
	assert.NoError(t, c.Validate())
}

// The example is the manual: it must name every field and every variable.
func TestExampleNamesEverything(t *testing.T) {
	t.Parallel()
	var walk func(reflect.Type)
	walk = func(typ reflect.Type) {
		for i := range typ.NumField() {
			f := typ.Field(i)
			if y := f.Tag.Get("yaml"); y != "" && !regexp.MustCompile(`(?m)^ *`+y+`:`).MatchString(config.Example) {
				t.Errorf("the example lacks the field %s", y)
			}
			if e := f.Tag.Get("env"); e != "" && !strings.Contains(config.Example, e) {
				t.Errorf("the example lacks the variable %s", e)
			} else if e == "" && f.Type.Kind() == reflect.Struct {
				walk(f.Type)
			}
		}
	}
	walk(reflect.TypeFor[config.Config]())
}

func TestStrict(t *testing.T) {
	t.Parallel()
	_, err := config.Load(strings.NewReader("wroker:\n  threads: 3\n"), none)
	assert.True(t, err != nil && strings.Contains(err.Error(), "wroker"))
}

func TestOrder(t *testing.T) {
	t.Parallel()
	env := map[string]string{"BULKHEAD_THREADS": "3", "DATABASE_URL": "postgres://u:hunter2@h/d", "BULKHEAD_DRAIN_TIMEOUT": "1m", "BULKHEAD_BEHIND_PROXY": "true"}
	c, err := config.Load(strings.NewReader("worker:\n  threads: 2\n  queue: 7\npublic:\n  trusted_proxies: [10.0.0.0/8]\n"), func(k string) string { return env[k] })
	assert.NoError(t, err)
	assert.Equal(t, c.Worker.Threads, 3)
	assert.Equal(t, c.Worker.Queue, 7)
	assert.Equal(t, c.Timeout.Drain.Std(), time.Minute)
	assert.Equal(t, c.DatabaseURL.Reveal(), "postgres://u:hunter2@h/d")
	assert.True(t, c.Public.BehindProxy)
	assert.Equal(t, c.Public.TrustedProxies[0].String(), "10.0.0.0/8")
}

func TestBadValues(t *testing.T) {
	t.Parallel()
	for env, want := range map[string]string{
		"BULKHEAD_THREADS=many":      "BULKHEAD_THREADS",
		"BULKHEAD_DRAIN_TIMEOUT=-1s": "BULKHEAD_DRAIN_TIMEOUT",
		"BULKHEAD_BEHIND_PROXY=si":   "BULKHEAD_BEHIND_PROXY",
	} {
		k, v, _ := strings.Cut(env, "=")
		_, err := config.Load(nil, func(n string) string { return map[string]string{k: v}[n] })
		assert.True(t, err != nil && strings.Contains(err.Error(), want))
	}
	for field, change := range map[string]func(*config.Config){
		"worker.kv_type":        func(c *config.Config) { c.Worker.KVType = "f8" },
		"worker.scrub":          func(c *config.Config) { c.Worker.Scrub = "never" },
		"public.tls_cert":       func(c *config.Config) { c.Public.TLSCert = "x" },
		"limits.body_bytes":     func(c *config.Config) { c.Limits.BodyBytes = 1 },
		"worker.max_running":    func(c *config.Config) { c.Worker.MaxRunning = 0 },
		"worker.backend":        func(c *config.Config) { c.Worker.Backend = "fortran" },
		"worker.sim: needs":     func(c *config.Config) { c.Worker.Sim.StepUS = 1 },
		"worker.sim.step_us":    func(c *config.Config) { c.Worker.Backend, c.Worker.Sim.StepUS = config.Simulated, -1 },
		"outside 1 to 1024":     func(c *config.Config) { c.Worker.MaxRunning = 2048 },
		"model":                 func(c *config.Config) { c.Model = "" },
		"log.format":            func(c *config.Config) { c.Log.Format = "xml" },
		"worker.prefill_chunk":  func(c *config.Config) { c.Worker.PrefillChunk = 1 },
		"limits.default_output": func(c *config.Config) { c.Limits.DefaultOutputTokens = 0 },
	} {
		c := config.Default()
		change(&c)
		err := c.Validate()
		assert.True(t, err != nil && strings.Contains(err.Error(), field))
	}
}

// Without a model there is no scratch for each sequence.
func TestSimulatedRunsMore(t *testing.T) {
	t.Parallel()
	c := config.Default()
	c.Worker.Backend, c.Worker.MaxRunning, c.Worker.Sim.PromptTokenUS = config.Simulated, 10_000, 5
	assert.NoError(t, c.Validate())
}

func FuzzLoad(f *testing.F) {
	f.Add(config.Example)
	f.Add("worker: {threads: 1}")
	f.Fuzz(func(t *testing.T, s string) {
		c, err := config.Load(strings.NewReader(s), os.Getenv)
		if err == nil {
			_ = c.Validate()
		}
	})
}
