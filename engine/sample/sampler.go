package sample

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
)

// ErrNotFinite means that the logits hold a NaN or +Inf, or nothing above -Inf.
// No id can be drawn from them, and none was.
var ErrNotFinite = errors.New("logits are not finite")

// ErrSize means that the logits do not have one entry per token of the
// vocabulary.
var ErrSize = errors.New("logits do not match the vocabulary")

// ErrClosed means that the sampler was used after Close.
var ErrClosed = errors.New("sampler is closed")

// seedLabel keeps the random stream apart from any other use of the same seed.
const seedLabel = "bulkhead sample 1\x00\x00\x00\x00\x00\x00\x00"

// Sampler draws the tokens of one sequence. It is not safe for concurrent use.
type Sampler struct {
	p     Params
	vocab int
	rng   *rand.ChaCha8 // nil when greedy

	// Penalty history: distinct ids returned so far and how often. Empty when
	// both penalties are 0.
	ids    []int32
	counts []uint32

	adjusted []float32   // penalised logits; nil without penalties
	cands    []candidate // room for the whole vocabulary; nil when greedy
	hist     *histogram  // for top-k and top-p; nil when neither is used
	closed   bool
}

// candidate is a token that may still be drawn, with its logit divided by the
// temperature relative to the largest, and later its weight.
type candidate struct {
	id int32
	w  float32
}

// New makes a sampler for logits of length vocab. The parameters must have
// passed Validate; the memory it needs follows from them.
func New(p Params, vocab int) *Sampler {
	s := &Sampler{p: p, vocab: vocab}
	if p.FrequencyPenalty != 0 || p.PresencePenalty != 0 {
		s.adjusted = make([]float32, vocab)
	}
	if p.Temperature > 0 {
		var key [32]byte
		copy(key[:], seedLabel)
		binary.LittleEndian.PutUint64(key[24:], p.Seed)
		s.rng = rand.NewChaCha8(key)
		s.cands = make([]candidate, 0, vocab)
		if s.usesTopK() || p.TopP < 1 {
			s.hist = new(histogram)
		}
	}
	return s
}

func (s *Sampler) usesTopK() bool { return s.p.TopK > 0 && s.p.TopK < s.vocab }

// Next returns the next token id. It reads logits and does not change them or
// keep them. After an error the sampler is as it was before the call.
func (s *Sampler) Next(logits []float32) (int32, error) {
	if s.closed {
		return 0, ErrClosed
	}
	if len(logits) != s.vocab {
		return 0, fmt.Errorf("%w: %d instead of %d", ErrSize, len(logits), s.vocab)
	}
	l := s.penalise(logits)
	// A penalty is finite: it neither hides a NaN nor makes one.
	top, at, err := largest(l)
	if err != nil {
		return 0, err
	}
	id := at
	if s.rng != nil {
		id = s.draw(l, top)
	}
	s.remember(id)
	return id, nil
}

// largest returns the largest logit and the lowest id that has it.
func largest(l []float32) (float32, int32, error) {
	top, at := float32(math.Inf(-1)), int32(-1)
	for i, v := range l {
		// One comparison that is false for NaN and +Inf alike.
		if !(v <= math.MaxFloat32) {
			return 0, 0, ErrNotFinite
		}
		if v > top {
			top, at = v, int32(i)
		}
	}
	if at < 0 {
		return 0, 0, ErrNotFinite
	}
	return top, at, nil
}

// penalise returns logits, or a penalised copy that the sampler owns.
func (s *Sampler) penalise(logits []float32) []float32 {
	if s.adjusted == nil || len(s.ids) == 0 {
		return logits
	}
	copy(s.adjusted, logits)
	for i, id := range s.ids {
		s.adjusted[id] -= float32(s.counts[i])*s.p.FrequencyPenalty + s.p.PresencePenalty
	}
	return s.adjusted
}

func (s *Sampler) remember(id int32) {
	if s.adjusted == nil {
		return
	}
	for i, have := range s.ids {
		if have == id {
			s.counts[i]++
			return
		}
	}
	s.ids = grow(s.ids, id)
	s.counts = grow(s.counts, 1)
}

// grow appends like append, and overwrites the array it leaves behind.
func grow[T int32 | uint32](s []T, v T) []T {
	if len(s) < cap(s) {
		return append(s, v)
	}
	const first = 16 // a short answer then grows a few times only
	n := make([]T, len(s), max(first, 2*cap(s)))
	copy(n, s)
	clear(s)
	return append(n, v)
}

// draw picks one id out of the distribution that the parameters leave of l.
// It consumes exactly one number of the stream.
func (s *Sampler) draw(l []float32, top float32) int32 {
	u := float64(s.rng.Uint64()>>11) / (1 << 53)
	c := s.cands[:0]
	inv := 1 / float64(s.p.Temperature)
	if s.usesTopK() {
		for i, v := range l {
			c = append(c, candidate{int32(i), v})
		}
		c = s.hist.topK(c, s.p.TopK)
		for i := range c {
			c[i].w = weight(c[i].w, top, inv)
		}
	} else {
		for i, v := range l {
			c = append(c, candidate{int32(i), weight(v, top, inv)})
		}
	}
	if s.p.MinP > 0 {
		c = atLeast(c, s.p.MinP)
	}
	var sum float64
	for _, x := range c {
		sum += float64(x.w)
	}
	if s.p.TopP < 1 {
		// Weights below this add up to less than top-p leaves out, so none of
		// them can be needed.
		c = atLeast(c, float32((1-float64(s.p.TopP))*sum/float64(2*s.vocab)))
		c = s.hist.topMass(c, float64(s.p.TopP)*sum)
		sum = 0
		for _, x := range c {
			sum += float64(x.w)
		}
	}
	goal, id := u*sum, c[0].id
	for _, x := range c {
		if x.w == 0 {
			continue
		}
		id = x.id
		if goal -= float64(x.w); goal < 0 {
			break
		}
	}
	return id
}

// atLeast keeps the candidates whose weight is w or more, in their order.
func atLeast(c []candidate, w float32) []candidate {
	kept := c[:0]
	for _, x := range c {
		if x.w >= w {
			kept = append(kept, x)
		}
	}
	return kept
}

// weight returns exp((v-top)/temperature): 1 for the most likely token, so that
// it is never lost to rounding, and the share that min-p compares for others.
func weight(v, top float32, inv float64) float32 {
	d := float64(v) - float64(top)
	if d == 0 {
		return 1 // also where inv is so large that 0 * inv would be NaN
	}
	return float32(exp(d * inv))
}

// Close overwrites everything that was derived from the sequence. The sampler
// refuses further use. It may be called more than once.
func (s *Sampler) Close() {
	clear(s.adjusted)
	clear(s.cands[:cap(s.cands)])
	clear(s.ids[:cap(s.ids)])
	clear(s.counts[:cap(s.counts)])
	if s.hist != nil {
		*s.hist = histogram{}
	}
	*s = Sampler{closed: true}
}
