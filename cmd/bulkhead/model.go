package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/schollz/progressbar/v3"

	"bulkhead.dev/engine/model/store"
	"bulkhead.dev/infra/telemetry"
)

type modelCmd struct {
	Pull modelPullCmd `cmd:"" help:"Download a model by name, verify it and store it."`
	Add  modelAddCmd  `cmd:"" help:"Store a GGUF file."`
	List modelListCmd `cmd:"" help:"List the models in the data folder."`
}

type dataFlag struct {
	Data string `env:"BULKHEAD_DATA" type:"path" help:"Data folder."`
}

func (d *dataFlag) store(e *env) (*store.Store, error) {
	dir, err := dataDir(d.Data, e.getenv)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o711); err != nil {
		return nil, fmt.Errorf("create data folder: %w (choose another with --data DIR)", err)
	}
	return store.Open(filepath.Join(dir, modelsDir), time.Now)
}

type modelPullCmd struct {
	dataFlag
	Name string `arg:"" help:"Name of the model, for example smollm2-135m."`
}

// Run pulls, with a progress bar on a terminal.
func (c *modelPullCmd) Run(ctx context.Context, e *env) error {
	s, err := c.store(e)
	if err != nil {
		return err
	}
	entry, err := s.Pull(ctx, c.Name, pulling(e))
	if err != nil {
		return err
	}
	fmt.Fprintf(e.stdout, "%s  %s  %s\n", entry.Name, entry.Digest, size(entry.Bytes))
	return nil
}

// pulling shows a pull to a person, and nothing to a script.
func pulling(e *env) store.Pulling {
	if !telemetry.IsTerminal(e.stderr) {
		return store.Pulling{}
	}
	return store.Pulling{Log: e.stderr, Progress: func(total int64) io.Writer {
		return progressbar.NewOptions64(total, progressbar.OptionSetWriter(e.stderr), progressbar.OptionShowBytes(true),
			progressbar.OptionSetDescription("verify and store"), progressbar.OptionClearOnFinish())
	}}
}

type modelAddCmd struct {
	dataFlag
	File string `arg:"" type:"existingfile" help:"The GGUF file."`
	Name string `help:"Name to serve it under; default: the file's name."`
}

// Run checks that the engine can serve the file and stores it.
func (c *modelAddCmd) Run(ctx context.Context, e *env) error {
	s, err := c.store(e)
	if err != nil {
		return err
	}
	entry, err := s.AddFile(ctx, c.File, nameOr(c.Name, c.File), c.File)
	if err != nil {
		return err
	}
	fmt.Fprintf(e.stdout, "%s  %s  %s\n", entry.Name, entry.Digest, size(entry.Bytes))
	return nil
}

// maxModelName is the longest name that the store takes.
const maxModelName = 63

// nameOr returns name, or one made out of a file name.
func nameOr(name, file string) string {
	if name != "" {
		return name
	}
	base := strings.ToLower(strings.TrimSuffix(filepath.Base(file), filepath.Ext(file)))
	name = strings.Trim(strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' || r == '.' || r == '-' || r == '_' {
			return r
		}
		return '-'
	}, base), "-._")
	return name[:min(len(name), maxModelName)]
}

type modelListCmd struct{ dataFlag }

// Run prints a table.
func (c *modelListCmd) Run(_ context.Context, e *env) error {
	s, err := c.store(e)
	if err != nil {
		return err
	}
	list, err := s.List()
	if err != nil {
		return err
	}
	w := tabwriter.NewWriter(e.stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "NAME\tSIZE\tLICENCE\tDIGEST\tSOURCE")
	for _, m := range list {
		licence := m.Licence
		if licence == "" {
			licence = "-"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", m.Name, size(m.Bytes), licence, m.Digest[:19], m.Source)
	}
	return w.Flush()
}

func size(n int64) string { return fmt.Sprintf("%.1f MB", float64(n)/1e6) }

// resolveModel finds the model that up serves: a GGUF file, which is added to
// the store, or a name, which is pulled when it is not there.
func resolveModel(ctx context.Context, s *store.Store, said string, e *env) (store.Entry, error) {
	if strings.HasSuffix(said, ".gguf") || strings.ContainsRune(said, os.PathSeparator) {
		return s.AddFile(ctx, said, nameOr("", said), said)
	}
	entry, err := s.Get(said)
	if !errors.Is(err, store.ErrUnknown) {
		return entry, err
	}
	fmt.Fprintf(e.stderr, "Getting the model %s; this happens once.\n", said)
	return s.Pull(ctx, said, pulling(e))
}
