package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sync/errgroup"

	"bulkhead.dev/engine/worker/harden"
	"bulkhead.dev/infra/config"
	"bulkhead.dev/infra/telemetry"
)

type upCmd struct {
	Config    string `type:"existingfile" env:"BULKHEAD_CONFIG" help:"Configuration file (see bulkhead config)."`
	Data      string `type:"path" help:"Folder for keys, models and the private database."`
	Listen    string `help:"Address of the API; port 0 takes a free one. Default 127.0.0.1:8080."`
	OpsListen string `help:"Address of /healthz, /readyz and /metrics. Default 127.0.0.1:9090."`
	Model     string `help:"Name of a model, or a GGUF file. Default smollm2-135m."`
	JSON      bool   `name:"json" help:"Print one line of JSON when ready instead of a banner."`
}

// config merges file, environment and flags.
func (c *upCmd) config(e *env) (config.Config, error) {
	var cfg config.Config
	var err error
	if c.Config == "" {
		cfg, err = config.Load(nil, e.getenv)
	} else {
		f, errOpen := os.Open(c.Config)
		if errOpen != nil {
			return cfg, fmt.Errorf("open configuration: %w", errOpen)
		}
		defer f.Close()
		cfg, err = config.Load(f, e.getenv)
	}
	if err != nil {
		return cfg, err
	}
	for _, o := range []struct{ flag, field *string }{
		{&c.Data, &cfg.Data}, {&c.Listen, &cfg.Public.Listen}, {&c.OpsListen, &cfg.Ops.Listen}, {&c.Model, &cfg.Model},
	} {
		if *o.flag != "" {
			*o.field = *o.flag
		}
	}
	return cfg, cfg.Validate()
}

// Run runs the platform until it is told to stop. The first signal drains: no
// new requests, running ones may end until the deadline. The second stops at
// once.
func (c *upCmd) Run(ctx context.Context, e *env) (err error) {
	began := time.Now()
	cfg, err := c.config(e)
	if err != nil {
		return err
	}
	log := telemetry.NewLogger(e.stderr, cfg.Log.Level, cfg.Log.Format)
	// Prompts pass through this process: they must not end up in a core dump.
	if err := harden.Apply(); err != nil {
		log.WarnContext(ctx, "process is not fully hardened", "error", err)
	}
	// Work outlives the signal by the drain; hard ends it.
	hard, kill := context.WithCancel(context.WithoutCancel(ctx))
	defer kill()
	go func() {
		select {
		case <-e.again:
			kill()
		case <-hard.Done():
		}
	}()
	p, err := startPlatform(ctx, hard, cfg, e, log)
	if err != nil {
		if ctx.Err() != nil {
			return errors.New("stopped before it was ready")
		}
		return err
	}
	defer func() { err = errors.Join(err, p.close()) }()
	g, running := errgroup.WithContext(ctx)
	p.run(g, running)
	if err := p.waitReady(running); err != nil {
		if ctx.Err() != nil {
			return errors.Join(errors.New("stopped before it was ready"), p.stop(g, hard, 0))
		}
		// A worker or the database that failed is the cause, not the waiting.
		if cause := p.stop(g, hard, 0); cause != nil {
			return cause
		}
		return err
	}
	if err := p.announce(e, c.JSON, time.Since(began)); err != nil {
		return err
	}
	<-running.Done()
	if ctx.Err() != nil {
		log.InfoContext(hard, "draining", "deadline", cfg.Timeout.Drain.Std().String())
	}
	return p.stop(g, hard, cfg.Timeout.Drain.Std())
}
