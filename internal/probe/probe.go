// Package probe looks for bytes in the whole memory of another process: page
// arenas, scratch, stacks, heaps of Go and C, buffers of sockets and TLS. Tests
// use it to show what is left of a tenant, and that nothing is.
package probe

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
)

// Window is how many bytes in a row make a hit. Shorter ones could be a
// coincidence.
const Window = 32

// Patterns is a set of byte strings to look for.
type Patterns struct {
	names map[[Window]byte]string
	// filter has a bit for a hash of the first bytes of every pattern, so that
	// almost every place in memory is done with after one load.
	filter []uint64
}

const filterBits = 1 << 22

func slot(b []byte) uint64 {
	return binary.LittleEndian.Uint64(b) * 0x9E3779B97F4A7C15 >> (64 - 22)
}

// Add adds the first Window bytes of b under a name. It leaves out what has too
// few different bytes to be telling, and reports whether it did not.
func (p *Patterns) Add(name string, b []byte) bool {
	if p.names == nil {
		p.names, p.filter = map[[Window]byte]string{}, make([]uint64, filterBits/64)
	}
	var seen [256]bool
	different := 0
	for _, x := range b[:Window] {
		if !seen[x] {
			seen[x] = true
			different++
		}
	}
	if different < 12 {
		return false
	}
	p.names[[Window]byte(b[:Window])] = name
	s := slot(b)
	p.filter[s/64] |= 1 << (s % 64)
	return true
}

// Len returns the number of patterns.
func (p *Patterns) Len() int { return len(p.names) }

func (p *Patterns) find(b []byte, hit func(at int, name string)) {
	for i := 0; i+Window <= len(b); i++ {
		s := slot(b[i:])
		if p.filter[s/64]&(1<<(s%64)) == 0 {
			continue
		}
		if name, ok := p.names[[Window]byte(b[i:i+Window])]; ok {
			hit(i, name)
		}
	}
}

// Hit is a pattern that was found.
type Hit struct {
	Mapping string // address range, rights and name of the mapping
	Offset  uint64 // in the mapping
	Pattern string
}

func (h Hit) String() string { return fmt.Sprintf("%s in %s at %#x", h.Pattern, h.Mapping, h.Offset) }

// Scan reads all memory of a process that can be read and returns the hits, and
// the number of bytes that it looked at. The process should stand still.
func (p *Patterns) Scan(pid int) (hits []Hit, looked uint64, err error) {
	mem, err := os.Open(fmt.Sprintf("/proc/%d/mem", pid))
	if err != nil {
		return nil, 0, fmt.Errorf("open the memory of a process: %w", err)
	}
	defer func() { err = errors.Join(err, mem.Close()) }()
	maps, err := os.Open(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return nil, 0, fmt.Errorf("list the memory of a process: %w", err)
	}
	defer func() { err = errors.Join(err, maps.Close()) }()
	buf := make([]byte, 1<<20)
	lines := bufio.NewScanner(maps)
	for lines.Scan() {
		line := lines.Text()
		var from, to uint64
		var rights string
		if _, err := fmt.Sscanf(line, "%x-%x %s", &from, &to, &rights); err != nil {
			return nil, 0, fmt.Errorf("read %q: %w", line, err)
		}
		if rights[0] != 'r' || strings.HasSuffix(line, "[vvar]") || strings.HasSuffix(line, "[vsyscall]") || strings.HasSuffix(line, "[vvar_vclock]") {
			continue
		}
		for at := from; at < to; {
			n, err := mem.ReadAt(buf[:min(uint64(len(buf)), to-at)], int64(at))
			if n < Window {
				if err == nil || errors.Is(err, io.EOF) || n == 0 {
					break // the rest of the mapping cannot be read
				}
				return nil, 0, fmt.Errorf("read memory of %s: %w", line, err)
			}
			p.find(buf[:n], func(i int, name string) {
				hits = append(hits, Hit{strings.Join(strings.Fields(line), " "), at - from + uint64(i), name})
			})
			looked += uint64(n)
			if at+uint64(n) >= to {
				break
			}
			at += uint64(n) - Window + 1
		}
	}
	return hits, looked, lines.Err()
}
