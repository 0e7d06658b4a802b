package receipt

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"time"
	"unicode/utf8"

	"github.com/fxamacker/cbor/v2"

	"bulkhead.dev/infra/id"
)

// Version is the version of the format that this package writes and reads.
const Version = 1

// MaxBytes bounds an encoded receipt. 1,024 extents of each leg fit.
const MaxBytes = 64 << 10

// maxExtents bounds the extents of a leg. Allocation is contiguous first, so a
// receipt has a handful; a pool in which more are needed is fragmented beyond use.
const maxExtents = 1024

// maxText bounds every text: names, builds, reasons. Bytes.
const maxText = 256

// Outcome says how a request ended.
type Outcome string

// The outcomes.
const (
	Completed Outcome = "completed" // the whole answer was computed and sent
	Refused   Outcome = "refused"   // admitted, and then a leg refused; see Refusal
	Canceled  Outcome = "canceled"  // the client went away
	Failed    Outcome = "failed"    // something broke; see Refusal
	Withheld  Outcome = "withheld"  // computed, but its end was withheld for want of evidence
	Lost      Outcome = "lost"      // the replica died; only the intent is known
)

// Isolation is the isolation class that was delivered.
type Isolation string

// Shared means: pages out of a pool that tenants share, scrubbed between them.
const Shared Isolation = "shared"

// Micros is a moment in microseconds since the Unix epoch; 0 is "never".
type Micros int64

// At converts a time. The zero time is 0.
func At(t time.Time) Micros {
	if t.IsZero() {
		return 0
	}
	return Micros(t.UnixMicro())
}

// Time returns the moment in UTC, or the zero time.
func (m Micros) Time() time.Time {
	if m == 0 {
		return time.Time{}
	}
	return time.UnixMicro(int64(m)).UTC()
}

// Receipt is what is known about a request when it is settled. It does not
// change after that. The fields are described in the package comment.
type Receipt struct {
	Version     uint8      `cbor:"1,keyasint"`
	Request     id.Request `cbor:"2,keyasint"`
	Tenant      id.Tenant  `cbor:"3,keyasint"`
	Project     id.Project `cbor:"4,keyasint"`
	Key         id.Key     `cbor:"5,keyasint"`
	Model       string     `cbor:"6,keyasint,omitempty"`
	ModelDigest Digest     `cbor:"7,keyasint,omitzero"`
	Surface     string     `cbor:"8,keyasint,omitempty"`
	Streamed    bool       `cbor:"9,keyasint,omitempty"`
	Received    Micros     `cbor:"10,keyasint,omitempty"`
	Admitted    Micros     `cbor:"11,keyasint,omitempty"`
	Committed   Micros     `cbor:"12,keyasint,omitempty"`
	FirstByte   Micros     `cbor:"13,keyasint,omitempty"`
	Finished    Micros     `cbor:"14,keyasint,omitempty"`
	EdgeTokens  *uint32    `cbor:"15,keyasint,omitempty"`
	Prefill     *Leg       `cbor:"16,keyasint,omitempty"`
	Decode      *Leg       `cbor:"17,keyasint,omitempty"`
	Transport   string     `cbor:"18,keyasint,omitempty"`
	Output      uint32     `cbor:"19,keyasint,omitempty"`
	MaxOutput   uint32     `cbor:"20,keyasint,omitempty"`
	Outcome     Outcome    `cbor:"21,keyasint"`
	Refusal     *Refusal   `cbor:"22,keyasint,omitempty"`
	Finish      string     `cbor:"23,keyasint,omitempty"`
	Response    *Response  `cbor:"24,keyasint,omitempty"`
	Isolation   Isolation  `cbor:"25,keyasint,omitempty"`
	Withheld    bool       `cbor:"26,keyasint,omitempty"`
	Replica     id.Epoch   `cbor:"27,keyasint,omitzero"`
}

// Leg is what one leg measured itself. Tokens is nil if it measured nothing.
type Leg struct {
	Worker       id.Epoch `cbor:"1,keyasint"`
	Build        string   `cbor:"2,keyasint,omitempty"`
	Tokens       *uint32  `cbor:"3,keyasint,omitempty"`
	Extents      []Extent `cbor:"4,keyasint,omitempty"`
	ManifestRoot Digest   `cbor:"5,keyasint,omitzero"`
	HandoffBytes uint64   `cbor:"6,keyasint,omitempty"`
	ComputeUS    uint64   `cbor:"7,keyasint,omitempty"`
	HandoffUS    uint64   `cbor:"8,keyasint,omitempty"`
	QueueUS      uint64   `cbor:"9,keyasint,omitempty"`
	// Cached is how many of Tokens were in pages that the worker remembered of an
	// earlier prompt of the same tenant.
	Cached uint32 `cbor:"10,keyasint,omitempty"`
	// Unacknowledged means that a request was given up and the leg did not say in
	// time that it had let go of its pages: it died, or stood still.
	Unacknowledged bool `cbor:"11,keyasint,omitempty"`
	// Quarantined is how many pages of the request were in quarantine when the leg
	// had let go of them.
	Quarantined uint32 `cbor:"12,keyasint,omitempty"`
}

// Extent is a run of pages that were granted together.
type Extent struct {
	_          struct{} `cbor:",toarray"`
	First      uint32   // page
	Count      uint32   // pages
	Generation uint64   // of the grant; it grows with every grant of the pool
	Scrubbed   uint32   // how many of the pages were scrubbed for this grant
}

// Refusal says which leg stopped a request and why. Reason is stable and has no
// content of a client.
type Refusal struct {
	Leg    string `cbor:"1,keyasint"` // "edge", "gateway", "prefill" or "decode"
	Reason string `cbor:"2,keyasint"`
}

// Response has digests of the answer that was emitted, under a key of the
// tenant, so that a tenant who holds the key can prove what it received and
// nobody else can guess a short answer. See [NewHasher].
type Response struct {
	KeyID string `cbor:"1,keyasint"`
	IDs   Digest `cbor:"2,keyasint"`
	Text  Digest `cbor:"3,keyasint"`
}

// Digest is 32 bytes of SHA-256 or of an HMAC of it.
type Digest [sha256.Size]byte

// IsZero reports whether the digest is absent.
func (d Digest) IsZero() bool { return d == Digest{} }

// ErrMalformed means that bytes are not a receipt in its one encoding.
var ErrMalformed = errors.New("malformed receipt")

// ErrInvalid means that a receipt says something that cannot be.
var ErrInvalid = errors.New("invalid receipt")

var (
	encMode = must(cbor.CoreDetEncOptions().EncMode())
	decMode = must(cbor.DecOptions{
		DupMapKey:         cbor.DupMapKeyEnforcedAPF,
		IndefLength:       cbor.IndefLengthForbidden,
		TagsMd:            cbor.TagsForbidden,
		ExtraReturnErrors: cbor.ExtraDecErrorUnknownField,
		UTF8:              cbor.UTF8RejectInvalid,
		MaxArrayElements:  maxExtents,
		MaxMapPairs:       64, // more than twice the keys of version 1
		MaxNestedLevels:   5,  // receipt, leg, extents, extent
	}.DecMode())
)

// must is for options that are constants of this package.
func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// Encode returns the bytes of a receipt that [Receipt.Validate] accepts.
func (r Receipt) Encode() ([]byte, error) {
	r.Version = Version
	if err := r.Validate(); err != nil {
		return nil, err
	}
	b, err := encMode.Marshal(r)
	if err != nil {
		return nil, fmt.Errorf("encode receipt: %w", err)
	}
	if len(b) > MaxBytes {
		return nil, fmt.Errorf("%w: %d bytes, more than %d", ErrInvalid, len(b), MaxBytes)
	}
	return b, nil
}

// Decode reads the bytes of a receipt. It accepts exactly what Encode makes.
func Decode(body []byte) (Receipt, error) {
	if len(body) > MaxBytes {
		return Receipt{}, fmt.Errorf("%w: %d bytes, more than %d", ErrMalformed, len(body), MaxBytes)
	}
	var r Receipt
	if err := decMode.Unmarshal(body, &r); err != nil {
		// The decoder may quote what it read.
		return Receipt{}, fmt.Errorf("%w: not the CBOR of this version", ErrMalformed)
	}
	if r.Version != Version {
		return Receipt{}, fmt.Errorf("%w: version %d, want %d", ErrMalformed, r.Version, Version)
	}
	again, err := r.Encode()
	if err != nil {
		return Receipt{}, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	if string(again) != string(body) {
		return Receipt{}, fmt.Errorf("%w: not in the deterministic encoding", ErrMalformed)
	}
	return r, nil
}

// DigestOf returns the digest of an encoded receipt.
func DigestOf(body []byte) Digest { return sha256.Sum256(body) }

// Digest returns the digest of the receipt's encoding.
func (r Receipt) Digest() (Digest, error) {
	b, err := r.Encode()
	if err != nil {
		return Digest{}, err
	}
	return DigestOf(b), nil
}

// Withhold returns the receipt of the same request for the case that it could
// not be written in time: the client did not get the end of its answer.
func (r Receipt) Withhold() Receipt {
	r.Withheld = true
	if r.Outcome == Completed {
		r.Outcome = Withheld
	}
	return r
}

// Validate refuses what contradicts itself. The error wraps ErrInvalid.
func (r Receipt) Validate() error {
	switch {
	case r.Request == id.Request{}, r.Tenant == id.Tenant{}, r.Project == id.Project{}, r.Key == id.Key{}:
		return fmt.Errorf("%w: an id is missing", ErrInvalid)
	case r.Outcome == Withheld && !r.Withheld:
		return fmt.Errorf("%w: outcome withheld without the mark", ErrInvalid)
	case r.Outcome == Completed && r.Withheld:
		return fmt.Errorf("%w: completed and withheld", ErrInvalid)
	case r.Outcome == Refused && r.Refusal == nil:
		return fmt.Errorf("%w: refused without a reason", ErrInvalid)
	case r.Outcome == Completed && r.Refusal != nil:
		return fmt.Errorf("%w: completed with a refusal", ErrInvalid)
	}
	switch r.Outcome {
	case Completed, Refused, Canceled, Failed, Withheld, Lost:
	default:
		return fmt.Errorf("%w: unknown outcome", ErrInvalid)
	}
	if r.Outcome == Completed || r.Outcome == Withheld {
		if err := r.proven(); err != nil {
			return err
		}
	}
	for _, m := range []Micros{r.Received, r.Admitted, r.Committed, r.FirstByte, r.Finished} {
		if m < 0 {
			return fmt.Errorf("%w: a time before 1970", ErrInvalid)
		}
	}
	texts := []string{r.Model, r.Surface, r.Transport, string(r.Outcome), r.Finish, string(r.Isolation)}
	if r.Refusal != nil {
		texts = append(texts, r.Refusal.Leg, r.Refusal.Reason)
	}
	if r.Response != nil {
		texts = append(texts, r.Response.KeyID)
	}
	for _, leg := range []*Leg{r.Prefill, r.Decode} {
		if leg == nil {
			continue
		}
		texts = append(texts, leg.Build)
		if len(leg.Extents) > maxExtents {
			return fmt.Errorf("%w: %d extents, more than %d", ErrInvalid, len(leg.Extents), maxExtents)
		}
		for _, e := range leg.Extents {
			if e.Count == 0 || e.Scrubbed > e.Count {
				return fmt.Errorf("%w: an extent of %d pages of which %d were scrubbed", ErrInvalid, e.Count, e.Scrubbed)
			}
		}
	}
	for _, s := range texts {
		if len(s) > maxText || !utf8.ValidString(s) {
			return fmt.Errorf("%w: a text is not UTF-8 or has over %d bytes", ErrInvalid, maxText)
		}
	}
	return nil
}

// proven checks that an answer whose text may have left has three measurements
// that agree: there is no receipt of a completed request without the proof.
func (r Receipt) proven() error {
	if r.EdgeTokens == nil || r.Prefill == nil || r.Prefill.Tokens == nil || r.Decode == nil || r.Decode.Tokens == nil {
		return fmt.Errorf("%w: %s without a measurement of every leg", ErrInvalid, r.Outcome)
	}
	if n := *r.EdgeTokens; *r.Prefill.Tokens != n || *r.Decode.Tokens != n {
		return fmt.Errorf("%w: %s although the legs measured %d, %d and %d tokens", ErrInvalid, r.Outcome,
			n, *r.Prefill.Tokens, *r.Decode.Tokens)
	}
	if r.Prefill.ManifestRoot.IsZero() || r.Prefill.ManifestRoot != r.Decode.ManifestRoot {
		return fmt.Errorf("%w: %s although the legs do not name the same manifest", ErrInvalid, r.Outcome)
	}
	return nil
}
