package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"bulkhead.dev/infra/pgembed"
	"bulkhead.dev/infra/secret"
)

// options are the flags.
type options struct {
	binary  string
	rounds  int
	window  time.Duration
	warm    time.Duration
	conns   int
	speeds  speeds
	idle    int
	big     bool
	soak    time.Duration
	litellm string
	profile string
	only    string
	chunks  int // of a stream
	pace    pace
	sizes   [2]int // tenants of the small and of the big database
	out     io.Writer
}

// pace is how long idle streams and those who look at them wait.
type pace struct {
	step   time.Duration // between two chunks
	settle time.Duration // before a process is looked at
}

func defaults() options {
	return options{speeds: speeds{slow: 50, fast: 1000}, chunks: 64, pace: pace{step: 4 * time.Second, settle: 5 * time.Second},
		sizes: [2]int{1_000, 100_000}, out: os.Stdout}
}

// speeds are the open loads, in requests a second.
type speeds struct{ slow, fast float64 }

func main() {
	if len(os.Args) == 2 && os.Args[1] == upstreamMark {
		if err := upstreamMain(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	o := defaults()
	flag.StringVar(&o.binary, "binary", "", "bulkhead program; default: built from this checkout")
	flag.IntVar(&o.rounds, "rounds", 5, "rounds, of which medians are taken")
	flag.DurationVar(&o.window, "window", 5*time.Second, "measured time of each target in a round")
	flag.DurationVar(&o.warm, "warm", time.Second, "load before it")
	flag.IntVar(&o.conns, "conns", 32, "callers of the closed load")
	flag.Float64Var(&o.speeds.fast, "rate", o.speeds.fast, "requests a second of the fast open load")
	flag.IntVar(&o.idle, "idle", 10_000, "streams that are open and idle; 0: leave that out")
	flag.BoolVar(&o.big, "big", false, "compare with a database of 100,000 tenants and 1,000,000 keys")
	flag.DurationVar(&o.soak, "soak", 0, "run for this long under load instead, and see that memory and goroutines stay")
	flag.StringVar(&o.litellm, "litellm", "litellm", "LiteLLM's program, measured beside if it is there")
	flag.StringVar(&o.profile, "profile", "", "folder for profiles of the gateway; the program is then built for it")
	flag.StringVar(&o.only, "only", "", "one phase: cpu, latency, streams, idle, tokens")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "bench-gateway:", err)
		os.Exit(1)
	}
}

// bench is what all phases share.
type bench struct {
	options
	dir        string // scratch
	cache      string // what is kept between runs
	model      string
	keyFile    string
	profileDir string
	password   secret.String
	postgres   *pgembed.Server
	upstream   *upstream
	bare       *target
	checked    sync.Mutex
	problems   []string // windows that were no measurement; under checked where loads run at once
	table      table
	profiled   int // profiles so far
}

func run(ctx context.Context, o options) (err error) {
	if err := o.validate(); err != nil {
		return err
	}
	b := &bench{options: o}
	if b.dir, err = os.MkdirTemp("", "bulkhead-bench-"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(b.dir)) }()
	if err := os.Chmod(b.dir, 0o711); err != nil { // the server runs as another user under root
		return err
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		cache = b.dir
	}
	b.cache = filepath.Join(cache, "bulkhead-bench")
	b.model = filepath.Join(b.dir, "bench.gguf")
	if err := os.WriteFile(b.model, modelFile(), 0o600); err != nil {
		return err
	}
	if err := b.build(ctx); err != nil {
		return err
	}
	if err := b.startPostgres(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.postgres.Close()) }()
	if b.upstream, err = startUpstream(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.upstream.close()) }()
	b.bare = newTarget("bare upstream", b.upstream.url, "bench", []string{"none"}, process{name: upstreamProc, pid: b.upstream.cmd.Process.Pid})
	if o.soak > 0 {
		return b.soakFor(ctx, o.soak)
	}
	return b.all(ctx)
}

// build makes the program.
func (b *bench) build(ctx context.Context) error {
	if b.profile != "" {
		var err error
		if b.profileDir, err = filepath.Abs(b.profile); err != nil {
			return err
		}
		if err := os.MkdirAll(b.profileDir, 0o755); err != nil {
			return err
		}
	} else if b.binary != "" {
		return nil
	}
	b.binary = filepath.Join(b.dir, "bulkhead")
	args := []string{"build", "-o", b.binary}
	if b.profile != "" {
		args = append(args, "-tags", "profile")
	}
	cmd := exec.CommandContext(ctx, "go", append(args, "bulkhead.dev/cmd/bulkhead")...)
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("build bulkhead: %w", err)
	}
	return nil
}

// all runs every phase and prints the table.
func (b *bench) all(ctx context.Context) error {
	small, err := b.makeDatabase(ctx, "bench")
	if err != nil {
		return err
	}
	if err := b.printMachine(ctx); err != nil {
		return err
	}
	for _, phase := range []struct {
		name string
		want bool
		run  func(context.Context, *database) error
	}{
		{"tokens", true, b.tokenise},
		{"cpu", true, b.requests},
		{"latency", true, b.latency},
		{"streams", true, b.streams},
		{"idle", b.idle > 0, b.idleStreams},
		{"big", b.big, b.compareBig},
	} {
		if !phase.want || b.only != "" && b.only != phase.name {
			continue
		}
		fmt.Fprintf(os.Stderr, "measuring: %s\n", phase.name)
		if err := phase.run(ctx, small); err != nil {
			return fmt.Errorf("%s: %w", phase.name, err)
		}
	}
	b.table.print(b.out)
	if len(b.problems) > 0 {
		for _, p := range b.problems {
			fmt.Fprintln(os.Stderr, "no measurement:", p)
		}
		fmt.Fprintf(os.Stderr, "the platform logged:\n%s", b.lastLog())
		return errors.New("there were errors under load")
	}
	return nil
}

func timed(f func()) time.Duration {
	start := time.Now()
	f()
	return time.Since(start)
}
