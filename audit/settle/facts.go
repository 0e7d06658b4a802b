package settle

import (
	"fmt"
	"time"

	"bulkhead.dev/audit/receipt"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/tenancy/quota"
)

// Facts are everything that is known about a request when it ends.
type Facts struct {
	Receipt receipt.Receipt
	Usage   Usage
	// Charges are written with the usage.
	Charges []quota.Charge
}

// Usage is what is metered beyond the receipt. Input and output tokens and what
// prefill computed come out of the receipt.
type Usage struct {
	// CachedTokens of the prompt were not computed for this request.
	CachedTokens int64
	// DecodeTokens were computed by the decode leg, sent or not.
	DecodeTokens int64
}

// Intent says that a replica is about to serve a request.
type Intent struct {
	Request  id.Request
	Tenant   id.Tenant
	Project  id.Project
	Key      id.Key
	Reserved int64 // tokens: prompt and maximum output
	Created  time.Time
	// Holds are what the request holds of limits until it is settled.
	Holds []quota.Hold
	// Transfer, Prefill and Decode say whom to ask whether it still runs.
	Transfer        id.Transfer
	Prefill, Decode id.Epoch
}

// rows is a receipt in the form of the two tables.
type rows struct {
	facts  Facts
	body   []byte
	digest receipt.Digest
}

func encode(f Facts) (rows, error) {
	if f.Receipt.Finished == 0 || f.Receipt.Received == 0 {
		return rows{}, fmt.Errorf("%w: no time of receipt or end", receipt.ErrInvalid)
	}
	if f.Usage.CachedTokens < 0 || f.Usage.DecodeTokens < 0 || f.Usage.CachedTokens > input(f.Receipt) {
		return rows{}, fmt.Errorf("%w: negative counts, or more cached than input tokens", receipt.ErrInvalid)
	}
	body, err := f.Receipt.Encode()
	if err != nil {
		return rows{}, err
	}
	return rows{facts: f, body: body, digest: receipt.DigestOf(body)}, nil
}

// input is the length of the prompt as the edge measured it.
func input(r receipt.Receipt) int64 {
	if r.EdgeTokens == nil {
		return 0
	}
	return int64(*r.EdgeTokens)
}

// measured is the count of a leg, nil if it has none.
func measured(l *receipt.Leg) *int64 {
	if l == nil || l.Tokens == nil {
		return nil
	}
	return new(int64(*l.Tokens))
}

// worker is the epoch of a leg, nil if there was none.
func worker(l *receipt.Leg) *[16]byte {
	if l == nil {
		return nil
	}
	return new([16]byte(l.Worker))
}

// orZero is for counts of what was computed, where nothing measured is nothing
// computed that anybody could be charged for.
func orZero(v *int64) int64 {
	if v == nil {
		return 0
	}
	return *v
}
