package model

import (
	"math"

	"bulkhead.dev/engine/model/gguf"
)

// archLlama is the only architecture that LoadLlama reads.
const archLlama = "llama"

// Limits of the hyperparameters: above every published model of the
// architecture, low enough that no product of two of them overflows.
const (
	maxLayers  = 1 << 10
	maxHeads   = 1 << 10
	maxHeadDim = 1 << 10
	maxDim     = 1 << 20 // of the residual stream and the hidden layer
	maxVocab   = 1 << 22
	maxContext = 1 << 24 // positions; float32 still tells them apart
)

// defaultRopeBase holds where the file sets no rotary base.
const defaultRopeBase = 10000

// Config holds the hyperparameters of a llama model.
type Config struct {
	// Arch is the architecture, always "llama".
	Arch string
	// Layers is the number of transformer blocks.
	Layers int
	// Dim is the width of the residual stream.
	Dim int
	// Heads is the number of query heads.
	Heads int
	// KVHeads is the number of key and value heads. It divides Heads; query
	// head h reads key head h/(Heads/KVHeads).
	KVHeads int
	// HeadDim is the width of one head of queries, keys and values. Heads *
	// HeadDim need not be Dim.
	HeadDim int
	// Hidden is the width of the feed-forward layer.
	Hidden int
	// Vocab is the number of tokens: the rows of Embed and Head.
	Vocab int
	// Context is the number of positions that the model was made for.
	Context int
	// RopeDim is how many leading dimensions of a head are rotated, even and
	// at most HeadDim. A pair is two neighbours, 2i and 2i+1, as in all llama
	// GGUF files.
	RopeDim int
	// RopeBase is the rotary base: pair i turns by RopeBase^(-2i/RopeDim) each
	// position.
	RopeBase float64
	// RopeFactors divides the angle of each pair, as in Llama 3. It has
	// RopeDim/2 entries, or is nil where the file has none.
	RopeFactors []float32
	// RopeScale multiplies every position: 1, or the inverse of the factor of
	// linear scaling.
	RopeScale float32
	// NormEps is added to the mean square in every norm.
	NormEps float32
}

// reader gathers hyperparameters and keeps the first error.
type reader struct {
	f   *gguf.File
	err error
}

func (r *reader) fail(err error) {
	if r.err == nil {
		r.err = err
	}
}

// size reads a whole number from 1 to limit. Where the key is absent, it is
// def, and an error if def is 0.
func (r *reader) size(key string, def, limit int) int {
	key = archLlama + "." + key
	if !r.f.Has(key) {
		if def == 0 {
			r.fail(invalid("key %s is missing", key))
		}
		return def
	}
	n, ok := r.f.Uint(key)
	if !ok {
		r.fail(unsupported("key %s is not a single whole number", key))
		return 0
	}
	if n < 1 || n > uint64(limit) {
		r.fail(invalid("key %s is %d, possible are 1 to %d", key, n, limit))
		return 0
	}
	return int(n)
}

// float reads a positive number. Where the key is absent, it is def, and an
// error if def is 0.
func (r *reader) float(key string, def float64) float64 {
	key = archLlama + "." + key
	if !r.f.Has(key) {
		if def == 0 {
			r.fail(invalid("key %s is missing", key))
		}
		return def
	}
	x, ok := r.f.Float(key)
	if !ok || !(x > 0) || math.IsInf(x, 0) {
		r.fail(invalid("key %s is not a positive number", key))
		return 0
	}
	return x
}

// readConfig reads and checks all hyperparameters but Vocab and RopeFactors,
// which follow from tensors.
func readConfig(f *gguf.File) (Config, error) {
	arch, ok := f.Str("general.architecture")
	if !ok {
		return Config{}, invalid("key general.architecture is missing")
	}
	if arch != archLlama {
		return Config{}, unsupported("architecture %.40q; supported: %q", arch, archLlama)
	}
	r := &reader{f: f}
	c := Config{Arch: arch}
	c.Layers = r.size("block_count", 0, maxLayers)
	c.Dim = r.size("embedding_length", 0, maxDim)
	c.Hidden = r.size("feed_forward_length", 0, maxDim)
	c.Context = r.size("context_length", 0, maxContext)
	c.Heads = r.size("attention.head_count", 0, maxHeads)
	c.KVHeads = r.size("attention.head_count_kv", c.Heads, maxHeads)
	c.NormEps = float32(r.float("attention.layer_norm_rms_epsilon", 0))
	c.RopeBase = r.float("rope.freq_base", defaultRopeBase)
	if r.err != nil {
		return Config{}, r.err
	}
	if c.Heads%c.KVHeads != 0 {
		return Config{}, invalid("%d key and value heads do not divide %d heads", c.KVHeads, c.Heads)
	}
	if !f.Has(archLlama+".attention.key_length") && c.Dim%c.Heads != 0 {
		return Config{}, invalid("%d heads do not divide a width of %d", c.Heads, c.Dim)
	}
	c.HeadDim = r.size("attention.key_length", max(1, c.Dim/c.Heads), maxHeadDim)
	value := r.size("attention.value_length", c.HeadDim, maxHeadDim)
	c.RopeDim = r.size("rope.dimension_count", c.HeadDim, maxHeadDim)
	c.RopeScale = r.ropeScale()
	r.refuseExtras(c.Context)
	if r.err != nil {
		return Config{}, r.err
	}
	switch {
	case c.HeadDim > maxHeadDim:
		return Config{}, invalid("heads are %d wide, the limit is %d", c.HeadDim, maxHeadDim)
	case value != c.HeadDim:
		return Config{}, unsupported("values are %d wide, keys %d", value, c.HeadDim)
	case c.RopeDim%2 != 0 || c.RopeDim > c.HeadDim:
		return Config{}, invalid("%d rotated dimensions of %d", c.RopeDim, c.HeadDim)
	case c.NormEps <= 0 || c.NormEps >= 1:
		return Config{}, invalid("the epsilon of the norms is %g", c.NormEps)
	}
	return c, nil
}

// ropeScale returns the factor for positions: linear scaling in its present
// and its older spelling. Other scalings change the angles in other ways.
func (r *reader) ropeScale() float32 {
	kind, _ := r.f.Str(archLlama + ".rope.scaling.type")
	switch kind {
	case "", "none":
	case "linear":
		return float32(1 / r.float("rope.scaling.factor", 0))
	default:
		r.fail(unsupported("rotary scaling %.40q; supported: \"none\", \"linear\", and rope_freqs.weight", kind))
		return 0
	}
	if kind == "" && r.f.Has(archLlama+".rope.scaling.factor") {
		// Files from before scaling had a type: a factor meant linear.
		return float32(1 / r.float("rope.scaling.factor", 0))
	}
	return float32(1 / r.float("rope.scale_linear", 1))
}

// refuseExtras refuses keys that change the result of the forward pass in ways
// that Bulkhead does not compute.
func (r *reader) refuseExtras(context int) {
	for _, key := range []string{"expert_count", "attention.sliding_window"} {
		n, _ := r.f.Uint(archLlama + "." + key)
		if n != 0 && (key == "expert_count" || n < uint64(context)) {
			r.fail(unsupported("key %s.%s is %d", archLlama, key, n))
		}
	}
	for _, key := range []string{"attention.scale", "logit_scale", "residual_scale", "embedding_scale", "attention.clamp_kqv"} {
		if x, _ := r.f.Float(archLlama + "." + key); x != 0 {
			r.fail(unsupported("key %s.%s is %g", archLlama, key, x))
		}
	}
	if causal, ok := r.f.Bool(archLlama + ".attention.causal"); ok && !causal {
		r.fail(unsupported("attention is not causal"))
	}
}
