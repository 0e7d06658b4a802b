package sample

import (
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"bulkhead.dev/infra/assert"
	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

var (
	inf = float32(math.Inf(1))
	nan = float32(math.NaN())
)

func randomLogits(seed uint64, n int) []float32 {
	r := rand.New(rand.NewPCG(seed, 1))
	l := make([]float32, n)
	for i := range l {
		l[i] = float32(r.NormFloat64() * 4)
	}
	return l
}

func TestValidate(t *testing.T) {
	t.Parallel()
	assert.NoError(t, Params{}.Validate())
	assert.NoError(t, Params{Temperature: 2, TopP: 1, MinP: 1, FrequencyPenalty: -2, PresencePenalty: 2, TopK: math.MaxInt32}.Validate())
	for _, c := range []struct {
		param string
		p     Params
	}{
		{"temperature", Params{Temperature: -0.1}},
		{"temperature", Params{Temperature: 2.1}},
		{"temperature", Params{Temperature: nan}},
		{"temperature", Params{Temperature: inf}},
		{"top_p", Params{TopP: 1.01}},
		{"top_p", Params{TopP: nan}},
		{"min_p", Params{MinP: -1}},
		{"frequency_penalty", Params{FrequencyPenalty: 2.5}},
		{"presence_penalty", Params{PresencePenalty: -2.5}},
		{"presence_penalty", Params{PresencePenalty: nan}},
		{"top_k", Params{TopK: -1}},
	} {
		e := assert.ErrorAs[*ParamError](t, c.p.Validate())
		assert.Equal(t, e.Param, c.param)
	}
}

func TestGreedyTakesTheLowestOfEquals(t *testing.T) {
	t.Parallel()
	s := New(Params{}, 5)
	id, err := s.Next([]float32{-1, 3, 0, 3, -inf})
	assert.NoError(t, err)
	assert.Equal(t, id, 1)
}

func TestNotFinite(t *testing.T) {
	t.Parallel()
	for name, l := range map[string][]float32{
		"nan first": {nan, 1, 2},
		"nan last":  {1, 2, nan},
		"+inf":      {1, inf, 2},
		"all -inf":  {-inf, -inf, -inf},
		"empty":     {},
	} {
		for _, p := range []Params{{}, {Temperature: 1, TopP: 1}, {PresencePenalty: 1}, {Temperature: 1, TopP: 0.5, TopK: 2}} {
			s := New(p, len(l))
			_, err := s.Next(l)
			assert.True(t, errors.Is(err, ErrNotFinite))
			if len(l) == 0 {
				continue
			}
			// Nothing was drawn: the next step is as if the bad one had not been.
			good := []float32{1, 2, 3}
			id, err := s.Next(good)
			assert.NoError(t, err)
			want, err := New(p, 3).Next(good)
			assert.NoError(t, err)
			if id != want {
				t.Fatalf("%s: a refused step changed the sampler", name)
			}
		}
	}
	_, err := New(Params{}, 3).Next([]float32{1})
	assert.ErrorIs(t, err, ErrSize)
}

func TestSameSeedSameOutput(t *testing.T) {
	t.Parallel()
	run := func(seed uint64) (out []int32) {
		s := New(Params{Temperature: 1.2, TopP: 0.95, TopK: 50, MinP: 0.01, FrequencyPenalty: 0.5, Seed: seed}, 1000)
		for i := range 64 {
			id, err := s.Next(randomLogits(uint64(i), 1000))
			assert.NoError(t, err)
			out = append(out, id)
		}
		return out
	}
	assert.Equal(t, run(7), run(7))
	assert.False(t, slices.Equal(run(7), run(8)))
	// A pinned prefix: a change of the stream breaks clients that pass a seed.
	assert.Equal(t, run(7)[:8], []int32{302, 449, 379, 732, 327, 564, 717, 994})
}

// The step number, not the history of candidates, decides which number of the
// stream is used.
func TestOneNumberPerStep(t *testing.T) {
	t.Parallel()
	flat := make([]float32, 100)
	peak := randomLogits(1, 100)
	peak[3] = 200
	a, b := New(Params{Temperature: 1, TopP: 1, Seed: 9}, 100), New(Params{Temperature: 1, TopP: 1, Seed: 9}, 100)
	_, err := a.Next(flat)
	assert.NoError(t, err)
	_, err = b.Next(peak)
	assert.NoError(t, err)
	x, err := a.Next(flat)
	assert.NoError(t, err)
	y, err := b.Next(flat)
	assert.NoError(t, err)
	assert.Equal(t, x, y)
}

func TestLogitsAreNotChanged(t *testing.T) {
	t.Parallel()
	for _, p := range []Params{{}, {FrequencyPenalty: 1}, {Temperature: 1, TopP: 0.9, TopK: 10, PresencePenalty: 2}} {
		s := New(p, 200)
		l := randomLogits(3, 200)
		want := slices.Clone(l)
		for range 5 {
			_, err := s.Next(l)
			assert.NoError(t, err)
		}
		assert.Equal(t, l, want)
	}
}

func TestPenalties(t *testing.T) {
	t.Parallel()
	l := []float32{1, 0.9, 0.75, 0}
	for _, c := range []struct {
		p    Params
		want []int32
	}{
		{Params{}, []int32{0, 0, 0, 0}},
		{Params{PresencePenalty: 0.2}, []int32{0, 1, 0, 0}},
		{Params{FrequencyPenalty: 0.2}, []int32{0, 1, 0, 2}},
		{Params{PresencePenalty: -1}, []int32{0, 0, 0, 0}},
	} {
		s := New(c.p, len(l))
		var got []int32
		for range c.want {
			id, err := s.Next(l)
			assert.NoError(t, err)
			got = append(got, id)
		}
		assert.Equal(t, got, c.want)
	}
}

// Frequencies of draws follow the distribution that the filters leave.
func TestDistribution(t *testing.T) {
	t.Parallel()
	// Probabilities 0.4, 0.3, 0.2, 0.1 in ids 2, 0, 3, 1.
	l := []float32{float32(math.Log(0.3)), float32(math.Log(0.1)), float32(math.Log(0.4)), float32(math.Log(0.2)), -inf}
	for name, c := range map[string]struct {
		p    Params
		want [5]float64
	}{
		"plain":       {Params{TopP: 1}, [5]float64{0.3, 0.1, 0.4, 0.2, 0}},
		"top-k":       {Params{TopP: 1, TopK: 2}, [5]float64{0.3 / 0.7, 0, 0.4 / 0.7, 0, 0}},
		"top-p":       {Params{TopP: 0.69}, [5]float64{0.3 / 0.7, 0, 0.4 / 0.7, 0, 0}},
		"top-p over":  {Params{TopP: 0.71}, [5]float64{0.3 / 0.9, 0, 0.4 / 0.9, 0.2 / 0.9, 0}},
		"top-p 0":     {Params{TopP: 0}, [5]float64{0, 0, 1, 0, 0}},
		"min-p":       {Params{TopP: 1, MinP: 0.49}, [5]float64{0.3 / 0.9, 0, 0.4 / 0.9, 0.2 / 0.9, 0}},
		"k then p":    {Params{TopP: 0.5, TopK: 3}, [5]float64{0.3 / 0.7, 0, 0.4 / 0.7, 0, 0}},
		"k is larger": {Params{TopP: 1, TopK: 50}, [5]float64{0.3, 0.1, 0.4, 0.2, 0}},
	} {
		c.p.Temperature, c.p.Seed = 1, 42
		s := New(c.p, len(l))
		const n = 10_000
		var got [5]float64
		for range n {
			id, err := s.Next(l)
			assert.NoError(t, err)
			got[id]++
		}
		for i := range got {
			// Five standard deviations.
			if math.Abs(got[i]/n-c.want[i]) > 5*math.Sqrt(c.want[i]*(1-c.want[i])/n) {
				t.Errorf("%s: id %d was drawn with frequency %g, want %g", name, i, got[i]/n, c.want[i])
			}
		}
	}
}

func TestTemperatureSharpens(t *testing.T) {
	t.Parallel()
	l := []float32{0, 1}
	share := func(temp float32) float64 {
		s := New(Params{Temperature: temp, TopP: 1, Seed: 5}, 2)
		n := 0
		for range 8_000 {
			id, err := s.Next(l)
			assert.NoError(t, err)
			n += int(id)
		}
		return float64(n) / 8_000
	}
	for _, temp := range []float32{0.5, 1, 2} {
		want := 1 / (1 + math.Exp(-1/float64(temp)))
		assert.True(t, math.Abs(share(temp)-want) < 0.03)
	}
	assert.Equal(t, share(math.SmallestNonzeroFloat32), 1.0)
}

// The radix selection keeps what sorting would keep.
func TestSelectionEqualsSorting(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		// Few distinct values make many ties; wide ones use all three digits.
		ws := rapid.SliceOfN(rapid.OneOf(
			rapid.SampledFrom([]float32{0, 1, 0.5, 0.25, 1e-30}),
			rapid.Float32Range(0, 1),
		), 1, 200).Draw(t, "weights")
		c := make([]candidate, len(ws))
		var sum float64
		for i, w := range ws {
			c[i] = candidate{int32(i), w}
			sum += float64(w)
		}
		sorted := slices.Clone(c)
		slices.SortStableFunc(sorted, func(a, b candidate) int {
			switch {
			case a.w > b.w:
				return -1
			case a.w < b.w:
				return 1
			}
			return 0
		})
		byID := func(s []candidate) []candidate {
			s = slices.Clone(s)
			slices.SortFunc(s, func(a, b candidate) int { return int(a.id - b.id) })
			return s
		}
		k := rapid.IntRange(1, len(ws)).Draw(t, "k")
		var h histogram
		if d := cmp.Diff(byID(sorted[:k]), h.topK(slices.Clone(c), k), allow); d != "" {
			t.Fatalf("top-k keeps other candidates (-want +got):\n%s", d)
		}
		goal := rapid.Float64Range(0, 1).Draw(t, "p") * sum
		checkMass(t, c, h.topMass(slices.Clone(c), goal), goal)
	})
}

func checkMass(t *rapid.T, all, got []candidate, goal float64) {
	if len(got) == 0 {
		t.Fatal("nothing was kept")
	}
	kept := map[int32]bool{}
	least, mass := got[0].w, 0.0
	for _, x := range got {
		kept[x.id] = true
		least = min(least, x.w)
		mass += float64(x.w)
	}
	var total float64
	for _, x := range all {
		total += float64(x.w)
		if !kept[x.id] && x.w > least {
			t.Fatalf("candidate %d is larger than one that was kept", x.id)
		}
	}
	const eps = 1e-9
	if mass < goal-eps && len(got) < len(all) && mass < total-eps {
		t.Fatalf("kept mass %g of a goal of %g", mass, goal)
	}
	if mass-float64(least) > goal+eps {
		t.Fatalf("kept mass %g, although %g were enough", mass, goal)
	}
}

// Any parameters on any finite logits give an id with a finite logit.
func TestAlwaysDraws(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		p := Params{
			Temperature:      rapid.Float32Range(0, 2).Draw(t, "temperature"),
			TopP:             rapid.Float32Range(0, 1).Draw(t, "top_p"),
			MinP:             rapid.Float32Range(0, 1).Draw(t, "min_p"),
			FrequencyPenalty: rapid.Float32Range(-2, 2).Draw(t, "frequency"),
			PresencePenalty:  rapid.Float32Range(-2, 2).Draw(t, "presence"),
			TopK:             rapid.IntRange(0, 40).Draw(t, "top_k"),
			Seed:             rapid.Uint64().Draw(t, "seed"),
		}
		l := rapid.SliceOfN(rapid.OneOf(rapid.Float32Range(-1e30, 1e30), rapid.Float32Range(-20, 20), rapid.Just(-inf)), 1, 60).Draw(t, "logits")
		l[rapid.IntRange(0, len(l)-1).Draw(t, "finite")] = 0
		s := New(p, len(l))
		for range 3 {
			id, err := s.Next(l)
			if err != nil || l[id] == -inf {
				t.Fatalf("an impossible token was drawn: %v", err)
			}
		}
	})
}

func TestCloseOverwrites(t *testing.T) {
	t.Parallel()
	s := New(Params{Temperature: 1, TopP: 0.9, TopK: 20, FrequencyPenalty: 1}, 100)
	for i := range 40 {
		_, err := s.Next(randomLogits(uint64(i), 100))
		assert.NoError(t, err)
	}
	adjusted, cands, ids, counts, hist := s.adjusted, s.cands[:cap(s.cands)], s.ids[:cap(s.ids)], s.counts[:cap(s.counts)], s.hist
	assert.False(t, allZero(ids))
	s.Close()
	s.Close()
	assert.True(t, allZero(adjusted) && allZero(ids) && allZero(counts) && allZero(cands))
	assert.True(t, *hist == histogram{})
	_, err := s.Next(randomLogits(1, 100))
	assert.ErrorIs(t, err, ErrClosed)
}

func allZero[T comparable](s []T) bool {
	var zero T
	return !slices.ContainsFunc(s, func(v T) bool { return v != zero })
}

func BenchmarkNext(b *testing.B) {
	const vocab = 49_152
	l := randomLogits(1, vocab)
	for name, p := range map[string]Params{
		"greedy":    {},
		"penalties": {FrequencyPenalty: 1},
		"plain":     {Temperature: 0.8, TopP: 1},
		"top-p":     {Temperature: 0.8, TopP: 0.95},
		"top-k":     {Temperature: 0.8, TopP: 0.95, TopK: 40},
	} {
		b.Run(name, func(b *testing.B) {
			s := New(p, vocab)
			for b.Loop() {
				if _, err := s.Next(l); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func TestExp(t *testing.T) {
	t.Parallel()
	for x := 0.0; x > -110; x -= 0.001 {
		got, want := exp(x), math.Exp(x)
		if x >= expUnderflow && math.Abs(got-want) > 1e-8*want || x < expUnderflow && got != 0 {
			t.Fatalf("exp(%g) is %g, want %g", x, got, want)
		}
	}
	assert.Equal(t, exp(math.Inf(-1)), 0.0)
}
