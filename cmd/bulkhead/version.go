package main

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"bulkhead.dev/engine/compute"
	"bulkhead.dev/infra/config"
)

// version is set at link time by the Makefile.
var version = "dev"

type versionCmd struct{}

// Run prints what a bug report needs.
func (versionCmd) Run(e *env) error {
	v, commit := buildInfo()
	_, err := fmt.Fprintf(e.stdout, "bulkhead %s\ncommit   %s\ngo       %s %s/%s\ncpu      %s\n",
		v, commit, runtime.Version(), runtime.GOOS, runtime.GOARCH, compute.Detect())
	return err
}

// buildInfo returns the version and the commit of this binary.
func buildInfo() (v, commit string) {
	v, commit = version, "unknown"
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return v, commit
	}
	dirty := ""
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			commit = s.Value
		case "vcs.modified":
			if s.Value == "true" {
				dirty = " (modified)"
			}
		}
	}
	return v, commit + dirty
}

// buildText names this build in registrations and receipts.
func buildText() string {
	v, commit := buildInfo()
	if len(commit) > 12 {
		commit = commit[:12]
	}
	return v + "+" + commit
}

type configCmd struct{}

// Run prints the commented example.
func (configCmd) Run(e *env) error {
	_, err := fmt.Fprint(e.stdout, config.Example)
	return err
}
