// Package id mints and parses the identifiers of the platform.
//
// Every identifier is 16 bytes, made by the platform, and used once. Nothing a
// client sends is ever an identity: names that clients choose are labels.
// Requests, epochs and the administrative ids carry 48 bits of Unix
// milliseconds followed by 80 random bits (the layout of a ULID), so they sort
// by time and big tables can be partitioned by them. Leases, transfers and
// nonces are 128 random bits.
package id

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"github.com/oklog/ulid/v2"
)

// Request identifies one inference request. Its text form is "req_" and 26
// Crockford base-32 characters.
type Request [16]byte

// Receipt identifies the receipt of a request. It has the bytes of the request
// id, so it is known before the answer is. Its text form starts with "rcp_".
type Receipt [16]byte

// Epoch identifies one run of one worker process; it is minted each time the
// process starts. Its text form starts with "wrk_".
type Epoch [16]byte

// Tenant, Project, Key, Limit and Price identify administrative objects. Their
// text forms start with "ten_", "prj_", "key_", "lim_" and "prc_".
type (
	Tenant  [16]byte
	Project [16]byte
	Key     [16]byte
	Limit   [16]byte
	Price   [16]byte
)

// Lease names one grant of pages to one request on one leg; Transfer one
// hand-off between two legs; Nonce freshness inside a hand-off. 128 random bits.
type (
	Lease    [16]byte
	Transfer [16]byte
	Nonce    [16]byte
)

// Owner is the opaque tag under which pages are held. It is derived from the
// tenant and its isolation epoch with the platform key (see tenancy.OwnerTag);
// the engine compares owners and knows nothing else about tenants.
type Owner [16]byte

const (
	prefixRequest = "req_"
	prefixReceipt = "rcp_"
	prefixEpoch   = "wrk_"
	prefixTenant  = "ten_"
	prefixProject = "prj_"
	prefixKey     = "key_"
	prefixLimit   = "lim_"
	prefixPrice   = "prc_"
)

// ErrMalformed means that a text is not an identifier of the wanted kind.
var ErrMalformed = errors.New("malformed identifier")

// NewRequest mints a request id for the given time.
func NewRequest(now time.Time) Request { return Request(timed(now)) }

// NewEpoch mints a worker epoch for the given time.
func NewEpoch(now time.Time) Epoch { return Epoch(timed(now)) }

// NewTenant mints a tenant id for the given time.
func NewTenant(now time.Time) Tenant { return Tenant(timed(now)) }

// NewProject mints a project id for the given time.
func NewProject(now time.Time) Project { return Project(timed(now)) }

// NewKey mints the id of an API key for the given time. It is not the secret.
func NewKey(now time.Time) Key { return Key(timed(now)) }

// NewLimit mints the id of a limit for the given time.
func NewLimit(now time.Time) Limit { return Limit(timed(now)) }

// NewPrice mints the id of a price for the given time.
func NewPrice(now time.Time) Price { return Price(timed(now)) }

// NewLease mints a lease id.
func NewLease() Lease { return Lease(random()) }

// NewTransfer mints a transfer id.
func NewTransfer() Transfer { return Transfer(random()) }

// NewNonce mints a nonce.
func NewNonce() Nonce { return Nonce(random()) }

// Receipt returns the id of the receipt that belongs to the request.
func (r Request) Receipt() Receipt { return Receipt(r) }

// Request returns the id of the request that the receipt belongs to.
func (r Receipt) Request() Request { return Request(r) }

// Time returns the moment at which the request id was minted, in milliseconds.
func (r Request) Time() time.Time { return ulid.Time(ulid.ULID(r).Time()).UTC() }

// Time returns the moment at which the epoch was minted, in milliseconds.
func (e Epoch) Time() time.Time { return ulid.Time(ulid.ULID(e).Time()).UTC() }

func (r Request) String() string  { return prefixRequest + ulid.ULID(r).String() }
func (r Receipt) String() string  { return prefixReceipt + ulid.ULID(r).String() }
func (e Epoch) String() string    { return prefixEpoch + ulid.ULID(e).String() }
func (t Tenant) String() string   { return prefixTenant + ulid.ULID(t).String() }
func (p Project) String() string  { return prefixProject + ulid.ULID(p).String() }
func (k Key) String() string      { return prefixKey + ulid.ULID(k).String() }
func (l Limit) String() string    { return prefixLimit + ulid.ULID(l).String() }
func (p Price) String() string    { return prefixPrice + ulid.ULID(p).String() }
func (l Lease) String() string    { return hex.EncodeToString(l[:]) }
func (t Transfer) String() string { return hex.EncodeToString(t[:]) }

// Short returns eight hexadecimal digits for people; it identifies nothing.
func (o Owner) Short() string { return hex.EncodeToString(o[:4]) }

// IsZero reports whether no owner is set. The zero owner never holds pages.
func (o Owner) IsZero() bool { return o == Owner{} }

// ParseRequest reads the text form of a request id.
func ParseRequest(s string) (Request, error) { return parse[Request](s, prefixRequest) }

// ParseReceipt reads the text form of a receipt id.
func ParseReceipt(s string) (Receipt, error) { return parse[Receipt](s, prefixReceipt) }

// ParseEpoch reads the text form of a worker epoch.
func ParseEpoch(s string) (Epoch, error) { return parse[Epoch](s, prefixEpoch) }

// ParseTenant reads the text form of a tenant id.
func ParseTenant(s string) (Tenant, error) { return parse[Tenant](s, prefixTenant) }

// ParseProject reads the text form of a project id.
func ParseProject(s string) (Project, error) { return parse[Project](s, prefixProject) }

// ParseKey reads the text form of the id of an API key.
func ParseKey(s string) (Key, error) { return parse[Key](s, prefixKey) }

// ParseLimit reads the text form of the id of a limit.
func ParseLimit(s string) (Limit, error) { return parse[Limit](s, prefixLimit) }

// FromBytes makes an identifier of any kind from the 16 bytes of a message or
// a database column.
func FromBytes[T ~[16]byte](b []byte) (T, error) {
	var t T
	if len(b) != len(t) {
		return t, fmt.Errorf("%w: %d bytes instead of 16", ErrMalformed, len(b))
	}
	copy(t[:], b)
	return t, nil
}

func parse[T ~[16]byte](s, prefix string) (T, error) {
	var t T
	if len(s) != len(prefix)+ulid.EncodedSize || s[:len(prefix)] != prefix {
		return t, fmt.Errorf("%w: want %s and %d characters", ErrMalformed, prefix, ulid.EncodedSize)
	}
	u, err := ulid.ParseStrict(s[len(prefix):])
	if err != nil {
		return t, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	// One text per id: lower case and the look-alikes of Crockford's alphabet
	// would otherwise name the same object twice.
	if u.String() != s[len(prefix):] {
		return t, fmt.Errorf("%w: not in canonical form", ErrMalformed)
	}
	return T(u), nil
}

// timed does not use a monotonic source: two ids of one millisecond must not
// let anybody guess a third.
func timed(now time.Time) [16]byte {
	var u ulid.ULID
	if err := u.SetTime(ulid.Timestamp(now)); err != nil {
		panic(fmt.Sprintf("id: the clock is outside the range of an id: %v", err))
	}
	rand.Read(u[6:]) // crypto/rand.Read does not return an error since Go 1.24
	return u
}

func random() (b [16]byte) {
	rand.Read(b[:])
	return b
}
