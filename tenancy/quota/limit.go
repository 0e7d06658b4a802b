package quota

import (
	"math/bits"
	"time"

	"bulkhead.dev/infra/id"
)

// Meter is what a limit counts.
type Meter string

// The meters.
const (
	Requests   Meter = "requests"   // requests that were admitted
	Concurrent Meter = "concurrent" // requests that run or wait
	Tokens     Meter = "tokens"     // prompt and answer, weighted
	Money      Meter = "money"      // millionths of the currency, at list prices
)

// Period is the time that a limit is for.
type Period string

// The periods. Days and months are those of UTC.
const (
	None   Period = "none" // concurrent requests
	Minute Period = "minute"
	Day    Period = "day"
	Month  Period = "month"
)

// window reports whether what is taken comes back only when a new period begins.
func (p Period) window() bool { return p == Day || p == Month }

// Limit is one limit of a tenant. A zero Project, Key or Model is all of them.
type Limit struct {
	ID      id.Limit
	Tenant  id.Tenant
	Project id.Project
	Key     id.Key
	Model   string
	Meter   Meter
	Period  Period
	// Amount is the limit: requests, tokens or millionths of the currency.
	Amount int64
	// Soft is where the operator is warned; 0 is nowhere.
	Soft int64
	// InputWeight and OutputWeight are what a token of prompt and answer counts;
	// for tokens only.
	InputWeight, OutputWeight int64
	// Platform limits are the operator's; a tenant cannot change them.
	Platform bool
	Created  time.Time
	Version  int64 // rises with each change
}

// Scope names what the limit is for: "key", "project" or "tenant".
func (l *Limit) Scope() string {
	switch {
	case l.Key != id.Key{}:
		return "key"
	case l.Project != id.Project{}:
		return "project"
	}
	return "tenant"
}

// Ask is what a request may use at most.
type Ask struct {
	Tenant  id.Tenant
	Project id.Project
	Key     id.Key // zero for a principal without one
	Model   string
	Digest  [32]byte // of the model file
	Input   int      // tokens of the prompt
	Output  int      // tokens of the longest answer
}

// amount is what so many tokens count against the limit.
func (l *Limit) amount(p prices, input, output int) int64 {
	switch l.Meter {
	case Requests, Concurrent:
		return 1
	case Tokens:
		return int64(input)*l.InputWeight + int64(output)*l.OutputWeight
	case Money:
		return p.cost(input, output)
	}
	return 0
}

// prices are what a million tokens of a model cost, in millionths of the
// currency.
type prices struct{ input, output int64 }

// cost is rounded up to a millionth once, so that more tokens never cost less.
func (p prices) cost(input, output int) int64 {
	const million = 1_000_000
	hi1, lo1 := bits.Mul64(uint64(input), uint64(p.input))
	hi2, lo2 := bits.Mul64(uint64(output), uint64(p.output))
	lo, carry := bits.Add64(lo1, lo2, 0)
	hi, _ := bits.Add64(hi1, hi2, carry)
	lo, carry = bits.Add64(lo, million-1, 0)
	q, _ := bits.Div64(hi+carry, lo, million) // 2^31 tokens at 10^12 stay below 2^64 after it
	return int64(q)
}

// Charge is what a settled request takes out of a slice for good.
type Charge struct {
	Limit  id.Limit
	Window time.Time // when the window began in which it was reserved
	Amount int64
}

// Hold is what a request that runs holds of a limit.
type Hold struct {
	Limit  id.Limit
	Amount int64
}

// Price is what a million tokens of a meter of a model cost from a moment on.
type Price struct {
	ID     id.Price
	Model  string
	Digest *[32]byte // of one revision; nil: of all
	Meter  string    // "input", "cached_input" or "output"
	From   time.Time
	// Micros are millionths of the currency for a million tokens.
	Micros int64
}

// priceOf finds the prices of a model at a moment: of the revision if it has its
// own, and the latest that is in effect. A model without a price costs nothing.
func priceOf(list []Price, a Ask, now time.Time) prices {
	find := func(meter string) int64 {
		var best *Price
		for i := range list {
			p := &list[i]
			if p.Model != a.Model || p.Meter != meter || p.From.After(now) || (p.Digest != nil && *p.Digest != a.Digest) {
				continue
			}
			if best == nil || better(p, best) {
				best = p
			}
		}
		if best == nil {
			return 0
		}
		return best.Micros
	}
	return prices{input: find("input"), output: find("output")}
}

func better(p, q *Price) bool {
	if (p.Digest != nil) != (q.Digest != nil) {
		return p.Digest != nil
	}
	return p.From.After(q.From)
}
