package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"
)

// tick is a clock tick of /proc, which is 10 ms on every Linux that Go runs on.
const tick = 10 * time.Millisecond

// process is a process to watch, alone or with all that it started.
type process struct {
	name string
	pid  int
	tree bool
}

// used is what a process has used so far, and holds.
type used struct {
	cpu time.Duration
	rss int64 // bytes
}

// usage looks at processes. It fails if one of them is gone.
func usage(procs []process) (map[string]used, error) {
	out := map[string]used{}
	var all map[int]stat
	for _, p := range procs {
		one, err := readStat(p.pid)
		if err != nil {
			return nil, fmt.Errorf("process %s is gone: %w", p.name, err)
		}
		u := out[p.name]
		u.add(one, p.tree)
		if p.tree {
			if all == nil {
				all = allStats()
			}
			for pid := range all {
				if pid != p.pid && below(all, pid, p.pid) {
					u.add(all[pid], true)
				}
			}
		}
		out[p.name] = u
	}
	return out, nil
}

// add counts a process and, with ended, those of its children that have ended.
func (u *used) add(s stat, ended bool) {
	u.cpu += s.self
	if ended {
		u.cpu += s.children
	}
	u.rss += s.rss
}

// below reports whether a process descends from another.
func below(all map[int]stat, pid, ancestor int) bool {
	for range len(all) { // pids are reused, so the chain could be a ring
		pid = all[pid].parent
		if pid == ancestor || pid == 0 {
			return pid == ancestor
		}
	}
	return false
}

// stat is what /proc says of a process.
type stat struct {
	parent         int
	self, children time.Duration
	rss            int64
}

func allStats() map[int]stat {
	files, _ := filepath.Glob("/proc/[0-9]*") // the pattern is well formed
	out := map[int]stat{}
	for _, f := range files {
		pid, err := strconv.Atoi(filepath.Base(f))
		if err != nil {
			continue
		}
		if s, err := readStat(pid); err == nil { // others may end meanwhile
			out[pid] = s
		}
	}
	return out
}

// Places in /proc/PID/stat, counted from behind the name of the program.
const (
	statParent   = 1
	statUser     = 11 // and behind it: system, and both of children that ended
	statResident = 21
)

func readStat(pid int) (s stat, err error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return s, err
	}
	fields := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
	if len(fields) <= statResident {
		return s, fmt.Errorf("/proc/%d/stat is short", pid)
	}
	number := func(i int) int64 {
		n, e := strconv.ParseInt(string(fields[i]), 10, 64)
		if e != nil && err == nil {
			err = e
		}
		return n
	}
	s.parent = int(number(statParent))
	s.self = time.Duration(number(statUser)+number(statUser+1)) * tick
	s.children = time.Duration(number(statUser+2)+number(statUser+3)) * tick
	s.rss = number(statResident) * int64(os.Getpagesize())
	return s, err
}
