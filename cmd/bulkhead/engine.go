package main

import (
	"context"
	"errors"
	"os"

	"bulkhead.dev/engine/worker"
	"bulkhead.dev/infra/proc"
	"bulkhead.dev/infra/telemetry"
)

// engineCmd runs a worker. What is secret comes over a pipe; these flags may be
// seen by anybody on the machine.
type engineCmd struct {
	Parent    int    `required:"" help:"Process that started the worker."`
	LogLevel  string `default:"info"`
	LogFormat string `default:"json"`
}

// Run runs the worker that the boot document describes.
func (c *engineCmd) Run(ctx context.Context, _ *env) error {
	if !proc.AdoptBoot(c.Parent) {
		return errors.New("this command is started by `bulkhead up`, which is gone")
	}
	doc, err := proc.ReadBoot()
	if err != nil {
		return err
	}
	boot, err := worker.ParseBoot(doc)
	clear(doc)
	if err != nil {
		return err
	}
	return worker.Run(ctx, boot, telemetry.NewLogger(os.Stderr, c.LogLevel, c.LogFormat))
}
