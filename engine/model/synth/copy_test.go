package synth_test

import (
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"bulkhead.dev/engine/model"
	"bulkhead.dev/engine/model/synth"
	"bulkhead.dev/engine/model/tokenizer"
	"bulkhead.dev/infra/assert"
)

// copier returns the copy model with its tokenizer.
func copier(t testing.TB) (*model.Llama, *tokenizer.Tokenizer) {
	t.Helper()
	return read(t, synth.CopyModel(4096))
}

func read(t testing.TB, file []byte) (*model.Llama, *tokenizer.Tokenizer) {
	t.Helper()
	m, f := load(t, file)
	tok, err := tokenizer.FromGGUF(f)
	assert.NoError(t, err)
	return m, tok
}

// prompt encodes a text as the platform does.
func prompt(tok *tokenizer.Tokenizer, text string) []int32 {
	return tok.Encode([]int32{synth.BOS}, text, tokenizer.Plain)
}

// run feeds the prompt and then generates n tokens; it fails where the choice
// is close.
func run(t testing.TB, r *reference, ids []int32, n int) []int32 {
	t.Helper()
	for _, id := range ids[:len(ids)-1] {
		r.step(int(id))
	}
	return generate(t, r, ids[len(ids)-1], n)
}

// generate goes on from the last token of a prompt.
func generate(t testing.TB, r *reference, last int32, n int) []int32 {
	t.Helper()
	var out []int32
	for range n {
		id, lead := best(r.step(int(last)))
		if lead < 19 {
			t.Fatalf("token %d leads by only %g", id, lead)
		}
		last = int32(id)
		out = append(out, last)
	}
	return out
}

func text(tok *tokenizer.Tokenizer, ids []int32) string {
	d, s := tok.NewDecoder(), ""
	for _, id := range ids {
		s += d.Push(id)
	}
	return s + d.Flush()
}

// coarse rounds to 8 bits and adds noise: worse than half precision, which has
// 11 bits.
func coarse() func(float64) float64 {
	r := rand.New(rand.NewPCG(1, 2))
	return func(x float64) float64 {
		f, e := math.Frexp(x)
		return math.Ldexp(math.Round(f*256)/256, e) * (1 + 0.002*(r.Float64()-0.5))
	}
}

func TestCopyModelCopies(t *testing.T) {
	t.Parallel()
	const answer = 160
	for depth, file := range map[string][]byte{"": synth.CopyModel(4096), "deep ": synth.DeepCopyModel(4096)} {
		m, tok := read(t, file)
		for name, words := range map[string]string{
			"shortest": "exactly thirty-two characters: x",
			"same":     strings.Repeat("y", 40),
			"text":     "The quick brown fox jumps over the lazy dog, and then it sleeps. Na\u00efve \U0001F98A",
			"long":     strings.Repeat("all work and no play makes 7 dull numbers; ", 12),
		} {
			t.Run(depth+name, func(t *testing.T) {
				t.Parallel()
				for _, store := range []func(float64) float64{func(x float64) float64 { return x }, coarse()} {
					r := newReference(m)
					r.store = store
					ids := prompt(tok, words)
					assert.True(t, len(ids) > synth.CopyDistance)
					got := run(t, r, ids, answer)
					want := append([]int32(nil), ids...)
					for range answer {
						want = append(want, want[len(want)-synth.CopyDistance])
					}
					assert.Equal(t, got, want[len(ids):])
				}
			})
		}
	}
}

// The second layer of the deep model tells whether anything in front of the
// last position was not the prompt, even if the token there is the same.
func TestDeepCopyModelTellsStalePages(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		file []byte
		same bool
	}{{synth.CopyModel(4096), true}, {synth.DeepCopyModel(4096), false}} {
		m, tok := read(t, tc.file)
		text := strings.Repeat("What is the weather like? ", 12)
		r, other := newReference(m), newReference(m)
		for _, id := range prompt(tok, text) {
			r.step(int(id))
		}
		for _, id := range prompt(tok, "how"+text[3:]) {
			other.step(int(id))
		}
		last := m.Config.Layers - 1
		near := func(a, b [][]float64) bool {
			for i, v := range a[len(a)-1] {
				if math.Abs(v-b[len(b)-1][i]) > 1e-3 {
					return false
				}
			}
			return true
		}
		assert.Equal(t, near(r.keys[last], other.keys[last]) && near(r.values[last], other.values[last]), tc.same)
	}
}

func TestCopyModelTellsStalePages(t *testing.T) {
	t.Parallel()
	m, tok := copier(t)
	victim, asker := newReference(m), newReference(m)
	secret := prompt(tok, strings.Repeat("canary-7f3a9c1e; ", 20))
	question := prompt(tok, strings.Repeat("What is the weather like? ", 12))
	for _, id := range secret {
		victim.step(int(id))
	}
	n := len(question)
	for _, id := range question[:n-1] {
		asker.step(int(id))
	}
	// Only the first position arrived; the pages behind it are the victim's.
	for p := 1; p < n-1; p++ {
		asker.keys[0][p], asker.values[0][p] = victim.keys[0][p], victim.values[0][p]
	}
	got := text(tok, generate(t, asker, question[n-1], synth.CopyDistance-1))
	assert.Equal(t, got, text(tok, secret[n-synth.CopyDistance:n-1]))
	assert.True(t, strings.Contains(got, "canary-7f3a9c1e"))
}

func TestCopyModelEnd(t *testing.T) {
	t.Parallel()
	m, tok := copier(t)
	eos, _ := tok.EOS()
	for _, end := range []int32{eos, synth.TurnEnd} {
		assert.True(t, tok.IsEOG(end))
		ids := prompt(tok, strings.Repeat("y", 40))
		ids[len(ids)-10] = end
		got := run(t, newReference(m), ids, synth.CopyDistance)
		for i, id := range got {
			assert.Equal(t, tok.IsEOG(id), i == synth.CopyDistance-10)
		}
	}
	// BOS is never emitted, not even from the position where it stands, nor is
	// anything but text.
	ids := prompt(tok, "short")
	r := newReference(m)
	for _, id := range ids[:len(ids)-1] {
		r.step(int(id))
	}
	last := ids[len(ids)-1]
	for range 3 * synth.CopyDistance {
		id, _ := best(r.step(int(last)))
		last = int32(id)
		assert.False(t, tok.IsControl(last) || last == synth.UNK)
	}
}

// TestCopyModelPeak checks the sum of cosines over all distances that a
// context can have.
func TestCopyModelPeak(t *testing.T) {
	t.Parallel()
	m, _ := copier(t)
	c := m.Config
	for distance := 1; distance < 1<<17; distance++ {
		loss := 0.0
		for i := range c.HeadDim / 2 {
			loss += 1 - math.Cos(float64(distance)*math.Pow(c.RopeBase, -2*float64(i)/float64(c.HeadDim)))
		}
		if loss*24 < 20 {
			t.Fatalf("at %d tokens from the peak a score is only %g lower", distance, loss*24)
		}
	}
}
