package compute

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"

	"bulkhead.dev/engine/kv"
)

// benchThreads is the number of threads of a benchmark: BENCH_THREADS, or 2.
func benchThreads() int {
	if n, err := strconv.Atoi(os.Getenv("BENCH_THREADS")); err == nil {
		return n
	}
	return 2
}

// BenchmarkPrefill computes prompts of 512 tokens, as `llama-bench -p 512`.
func BenchmarkPrefill(b *testing.B) {
	_, l := smollm(b)
	for _, level := range fast() {
		b.Run(level, func(b *testing.B) {
			m := load(b, l, Options{Level: level, DType: kv.F16, Threads: benchThreads()})
			rng := rand.New(rand.NewPCG(1, 2))
			ids, p := tokens(rng, 512, m.Vocab()), newPages(b, m.Geometry(), 512, rng)
			for b.Loop() {
				if err := m.Forward([]Span{{Tokens: ids, Pages: p}}); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.N)*512/b.Elapsed().Seconds(), "tok/s")
		})
	}
}

// BenchmarkDecode generates 64 tokens from nothing, as `llama-bench -n 64`, for
// one sequence and for eight.
func BenchmarkDecode(b *testing.B) {
	_, l := smollm(b)
	for _, level := range fast() {
		for _, n := range []int{1, 8} {
			b.Run(fmt.Sprintf("%s/batch%d", level, n), func(b *testing.B) {
				m := load(b, l, Options{Level: level, DType: kv.F16, Threads: benchThreads()})
				rng := rand.New(rand.NewPCG(1, 2))
				spans := make([]Span, n)
				for i := range spans {
					spans[i] = Span{Tokens: []int32{1}, Pages: newPages(b, m.Geometry(), 64, rng), Logits: make([]float32, m.Vocab())}
				}
				steps := 0
				for b.Loop() {
					for pos := range 64 {
						for i := range spans {
							spans[i].Pos = pos
						}
						if err := m.Forward(spans); err != nil {
							b.Fatal(err)
						}
						steps++
					}
				}
				b.ReportMetric(float64(steps*n)/b.Elapsed().Seconds(), "tok/s")
			})
		}
	}
}

// fast are the levels that anybody would run this model on.
func fast() []string {
	var out []string
	for _, l := range Levels() {
		if l != levelGo && l != levelScalar {
			out = append(out, l)
		}
	}
	return out
}
