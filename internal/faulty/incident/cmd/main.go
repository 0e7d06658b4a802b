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
	"time"

	"bulkhead.dev/engine/model/synth"
	"bulkhead.dev/internal/faulty/incident"
	"bulkhead.dev/internal/rig"
)

func main() {
	rig.Main(incident.Programs())
	n := flag.Int("prompts", incident.Leaked, "prompts that prefill rejects, in each row")
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
	if err := os.WriteFile(model, synth.DeepCopyModel(incident.Window), 0o600); err != nil {
		return err
	}
	var logs *os.File
	if verbose {
		logs = os.Stderr
	}
	began := time.Now()
	for _, cause := range []incident.Cause{incident.TooLong, incident.Other} {
		if cause == incident.Other {
			n = (n + 4) / 5
		}
		fmt.Print(incident.Header(cause))
		var leak *incident.Leak
		err := incident.Matrix(ctx, model, cause, n, logs, func(r incident.Row) {
			fmt.Print(r.Line())
			if leak == nil && r.Leaks > 0 {
				leak = &r.Leak
			}
		})
		if leak != nil {
			fmt.Printf("\n%v", leak)
		}
		if err != nil {
			return err
		}
		fmt.Println()
	}
	fmt.Printf("%s\nEvery row is as promised (%.0f s).\n", incident.Columns, time.Since(began).Seconds())
	return nil
}
