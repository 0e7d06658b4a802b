package mem

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"bulkhead.dev/infra/assert"
)

// BenchmarkPages moves, digests and wipes 64 MiB of pages in every way, one way
// after the other in each round, so that what else runs here disturbs all of
// them alike. It reports medians, and their ratio to copy().
func BenchmarkPages(b *testing.B) {
	for _, page := range []int{368640, 11 << 20} {
		b.Run(fmt.Sprintf("%dKiB", page>>10), func(b *testing.B) { benchPages(b, page) })
	}
}

func benchPages(b *testing.B, page int) {
	n := 64 << 20 / page * page
	src, dst := mapped(b, n), mapped(b, n)
	copy(src, random(1, n))
	type way struct {
		name string
		f    func(dst, src []byte)
	}
	ways := []way{{"copy", func(dst, src []byte) { copy(dst, src) }}, {"clear", func(dst, _ []byte) { clear(dst) }}}
	for i := range levels {
		run, k := &levels[i], newKey(secret, &levels[i])
		ways = append(ways,
			way{run.name + "/Sum", func(_, src []byte) { k.Sum(0, 0, src) }},
			way{run.name + "/CopySum", func(dst, src []byte) { k.CopySum(dst, src, 0, 0) }},
			way{run.name + "/Copy", run.copy},
			way{run.name + "/Wipe", func(dst, _ []byte) { run.fill(dst, 0) }})
	}
	took := make([][]time.Duration, len(ways))
	for b.Loop() {
		for i, w := range ways {
			began := time.Now()
			for at := 0; at < n; at += page {
				w.f(dst[at:at+page], src[at:at+page])
			}
			took[i] = append(took[i], time.Since(began))
		}
	}
	median := func(i int) float64 {
		slices.Sort(took[i])
		return took[i][len(took[i])/2].Seconds()
	}
	for i, w := range ways {
		b.ReportMetric(float64(n)/median(i)/1e9, w.name+":GB/s")
		b.ReportMetric(median(0)/median(i)*100, w.name+":%copy")
	}
}

// mapped returns memory as an arena has it.
func mapped(tb testing.TB, n int) []byte {
	tb.Helper()
	m, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	assert.NoError(tb, err)
	tb.Cleanup(func() { _ = unix.Munmap(m) })
	clear(m) // so that the kernel has given it
	return m
}
