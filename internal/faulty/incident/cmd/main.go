//go:build faulty

// Command cmd replays the incident and prints the matrix of walls.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"

	"bulkhead.dev/engine/model/synth"
	"bulkhead.dev/internal/faulty/incident"
	"bulkhead.dev/internal/rig"
)

func main() {
	rig.Main(incident.Programs())
	n := flag.Int("oversized", incident.Leaked, "prompts that prefill cannot hold, in each row")
	verbose := flag.Bool("v", false, "show what the workers log")
	flag.Parse()
	if err := run(*n, *verbose); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(n int, verbose bool) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	dir, err := os.MkdirTemp("", "incident")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	model := filepath.Join(dir, "copy.gguf")
	if err := os.WriteFile(model, synth.CopyModel(incident.Window), 0o600); err != nil {
		return err
	}
	var logs *os.File
	if verbose {
		logs = os.Stderr
	}
	fmt.Print(incident.Header())
	leak := ""
	err = incident.Matrix(ctx, model, n, logs, func(r incident.Row) {
		fmt.Print(r.Line())
		if len(r.Up) == 0 {
			leak = r.Sample
		}
	})
	incident.Explain(os.Stdout, leak)
	return err
}
