package sample

import (
	"fmt"
	"math"
)

// Params are the sampling parameters of one sequence. The zero value is greedy.
type Params struct {
	// Temperature divides the logits; 0 is greedy. 0 to MaxTemperature.
	Temperature float32
	// TopP keeps the most likely tokens that together reach this probability,
	// at least one; 1 is off. 0 to 1. Ignored when greedy.
	TopP float32
	// MinP drops tokens less likely than this share of the most likely one; 0
	// is off. 0 to 1. Ignored when greedy.
	MinP float32
	// FrequencyPenalty is subtracted from a logit once for each time its id was
	// returned. -MaxPenalty to MaxPenalty.
	FrequencyPenalty float32
	// PresencePenalty is subtracted once from the logit of each id that was
	// returned. -MaxPenalty to MaxPenalty.
	PresencePenalty float32
	// TopK keeps this many of the largest logits; 0 is off. Ignored when greedy.
	TopK int
	// Seed keys the random stream. Ignored when greedy.
	Seed uint64
}

// The bounds of the public API for chat completions, which the internal API
// shares.
const (
	MaxTemperature = 2
	MaxPenalty     = 2
)

// ParamError says which parameter is out of its range. It holds the name and
// the range, never the value.
type ParamError struct {
	Param string // the name in the public API: "top_p"
	Want  string // the range: "from 0 to 1"
}

func (e *ParamError) Error() string { return fmt.Sprintf("%s must be %s", e.Param, e.Want) }

// Validate checks each parameter against its range and returns a *ParamError
// for the first that is outside. NaN is outside every range.
func (p Params) Validate() error {
	for _, f := range []struct {
		name   string
		v      float32
		lo, hi float32
	}{
		{"temperature", p.Temperature, 0, MaxTemperature},
		{"top_p", p.TopP, 0, 1},
		{"min_p", p.MinP, 0, 1},
		{"frequency_penalty", p.FrequencyPenalty, -MaxPenalty, MaxPenalty},
		{"presence_penalty", p.PresencePenalty, -MaxPenalty, MaxPenalty},
	} {
		// The negated comparison also catches NaN.
		if !(f.v >= f.lo && f.v <= f.hi) {
			return &ParamError{Param: f.name, Want: fmt.Sprintf("from %g to %g", f.lo, f.hi)}
		}
	}
	if p.TopK < 0 || int64(p.TopK) > math.MaxInt32 {
		return &ParamError{Param: "top_k", Want: "0 or a positive number of 32 bits"}
	}
	return nil
}
