// Command bulkhead is the whole platform in one binary: the gateway, the two
// workers it starts, and the tools of operators and tenants.
//
//	bulkhead up        run everything on this machine
//	bulkhead chat      talk to a model
//	bulkhead key       create, list and revoke API keys
//	bulkhead limit     show and set what tenants may use
//	bulkhead price     show and set list prices
//	bulkhead model     get and list models
//	bulkhead receipt   show the evidence about a response
//	bulkhead pages     show whose every KV page is, now
//	bulkhead doctor    say what this machine offers
//	bulkhead config    print a configuration file with every field
//	bulkhead version   print version, commit and CPU level
//
// Exit status is 0 for success, 1 for failure and 2 for wrong usage.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/alecthomas/kong"

	"bulkhead.dev/infra/apperr"
)

type cli struct {
	Up      upCmd      `cmd:"" help:"Run the platform on this machine: API, prefill and decode workers, and a private PostgreSQL unless DATABASE_URL is set."`
	Chat    chatCmd    `cmd:"" help:"Ask a model and print its answer as it comes."`
	Key     keyCmd     `cmd:"" help:"Create, list and revoke API keys."`
	Limit   limitCmd   `cmd:"" help:"Show and set what tenants may use."`
	Price   priceCmd   `cmd:"" help:"Show and set list prices."`
	Model   modelCmd   `cmd:"" help:"Get, add and list models."`
	Receipt receiptCmd `cmd:"" help:"Show the evidence that a response left."`
	Pages   pagesCmd   `cmd:"" help:"Show whose every KV page is, on every worker, now."`
	Doctor  doctorCmd  `cmd:"" help:"Say what this machine offers and what each missing thing costs."`
	Config  configCmd  `cmd:"" help:"Print a configuration file with every field, commented, at its default."`
	Version versionCmd `cmd:"" help:"Print version, commit, Go version and CPU level."`
	Engine  engineCmd  `cmd:"" hidden:"" help:"Run a worker. Started by up, not by hand."`
}

// env is what commands get from the process, so that tests can stand in.
type env struct {
	stdout, stderr io.Writer
	getenv         func(string) string
	// again is told of a second request to stop; the first one cancels the
	// context of the command.
	again <-chan os.Signal
}

const (
	exitFailure = 1
	exitUsage   = 2
)

func main() { os.Exit(run(os.Args[1:])) }

func run(args []string) int {
	var c cli
	parser := kong.Must(&c,
		kong.Name("bulkhead"),
		kong.Description("A multi-tenant LLM inference platform in which no tenant's data reaches another tenant's response."),
		kong.UsageOnError(),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true}),
	)
	if len(args) == 0 {
		args = []string{"--help"}
	}
	kctx, err := parser.Parse(args)
	if err != nil {
		parser.Errorf("%s", err)
		return exitUsage
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	signals, again := make(chan os.Signal, 2), make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	go func() {
		s := <-signals
		cancel(fmt.Errorf("received %v", s))
		again <- <-signals
	}()
	e := &env{stdout: os.Stdout, stderr: os.Stderr, getenv: os.Getenv, again: again}
	kctx.BindTo(ctx, (*context.Context)(nil))
	if err := kctx.Run(e); err != nil {
		fmt.Fprintln(os.Stderr, "bulkhead: "+explain(err))
		return exitFailure
	}
	return 0
}

// explain is one line for a person: the public part of an error, or all of it
// where nothing is private.
func explain(err error) string {
	if e, ok := errors.AsType[*apperr.Error](err); ok {
		return e.Message
	}
	return err.Error()
}
