package kv

import (
	"errors"
	"fmt"

	"bulkhead.dev/infra/id"
)

// Signatures first: bodies follow in the files named by noun.

// ScrubPolicy says when a page that somebody used is wiped at its next grant.
type ScrubPolicy uint8

const (
	OnTenantChange ScrubPolicy = iota // the default: the last owner is another owner
	Always                            // at every grant
)

// Pattern is what scrubbing writes.
type Pattern uint8

const (
	Zero Pattern = iota
	NaN          // for tests
)

// Memory is where the arena lives.
type Memory uint8

const (
	Anonymous Memory = iota
	Memfd
)

// Config describes a pool.
type Config struct {
	Geometry Geometry
	Pages    int
	Scrub    ScrubPolicy
	Pattern  Pattern
	Memory   Memory
	Lock     bool        // try mlock; see Pool.Arena
	OnEvent  func(Event) // page history; called under the pool lock, must be quick and must not call the pool
}

// ArenaInfo tells what the kernel granted; the caller warns about what it did not.
type ArenaInfo struct {
	Bytes                    int
	Locked                   bool
	LockErr, DumpErr, KSMErr error
}

// Errors.
var (
	ErrStale    = errors.New("stale page handle")                // handle or page was released, re-granted, or never yours
	ErrOpen     = errors.New("page handle has a pass in flight") // a Table, Receive, Grant or Commit is still open
	ErrRange    = errors.New("positions outside what is readable or granted")
	ErrNoCredit = errors.New("not enough credits in the lease")
	ErrOwner    = errors.New("owner is not set")
	ErrCoverage = errors.New("coverage is not exact")
	ErrDigest   = errors.New("page digest differs")
	ErrBusy     = errors.New("pool is still in use")
)

// ErrExhausted means that a pool cannot promise as many pages.
type ErrExhausted struct{ Want, Free int }

func (e ErrExhausted) Error() string { return fmt.Sprintf("want %d pages, %d free", e.Want, e.Free) }

type PageRef struct {
	Index      uint32
	Generation uint64
}
type Extent struct {
	First, Count uint32
	Generation   uint64
	Scrubbed     uint32
}
type Event struct{ Seq uint64 }

// Stats counts pages by state.
type Stats struct {
	Pages                                                        int
	Clean, Dirty, Granted, Filling, Reading, Sealed, Quarantined int
	Credits                                                      int // reserved and not yet drawn
	Free                                                         int // what Reserve can still promise
	Grants, GrantedPages, ScrubbedPages, Generation              uint64
}

type Pool struct{}

func New(Config) (*Pool, error)                                     { panic("unfinished") }
func (p *Pool) Geometry() Geometry                                  { panic("unfinished") }
func (p *Pool) Arena() ArenaInfo                                    { panic("unfinished") }
func (p *Pool) Stats() Stats                                        { panic("unfinished") }
func (p *Pool) Reserve(owner id.Owner, pages int) (*Credits, error) { panic("unfinished") }
func (p *Pool) Close() error                                        { panic("unfinished") } // ErrBusy while pages or credits are held

// Credits are a promise of pages. Return is idempotent, and does nothing once Fill or Land took them.
type Credits struct{}

func (c *Credits) Pages() int                            { panic("unfinished") }
func (c *Credits) Return()                               { panic("unfinished") }
func (c *Credits) Fill(lease id.Lease) (*Filler, error)  { panic("unfinished") } // prefill leg
func (c *Credits) Land(lease id.Lease) (*Landing, error) { panic("unfinished") } // decode leg

// Filler: prefill leg.
type Filler struct{}

func (f *Filler) Grant(pages int) error                { panic("unfinished") }
func (f *Filler) Len() int                             { panic("unfinished") } // positions written, as reported through Table.Advance
func (f *Filler) Table(pos, count int) (*Table, error) { panic("unfinished") } // opens a pass that reads [0,pos) and writes [pos,pos+count)
func (f *Filler) Extents() []Extent                    { panic("unfinished") }
func (f *Filler) Seal(tokens int) (*Sealed, error)     { panic("unfinished") }
func (f *Filler) Abort()                               { panic("unfinished") }

// Table implements compute.Pages for one forward pass. Always Close it.
type Table struct{}

func (t *Table) Resolve(dst []uintptr, positions int) ([]uintptr, error) { panic("unfinished") }
func (t *Table) Advance(wrote int) error                                 { panic("unfinished") } // after the pass, with Span.Wrote
func (t *Table) Close()                                                  { panic("unfinished") } // idempotent

// Sealed pages cannot be written any more.
type Sealed struct{}

func (s *Sealed) Tokens() int       { panic("unfinished") }
func (s *Sealed) Owner() id.Owner   { panic("unfinished") }
func (s *Sealed) Lease() id.Lease   { panic("unfinished") }
func (s *Sealed) Extents() []Extent { panic("unfinished") }
func (s *Sealed) Release()          { panic("unfinished") }

// Landing is used by handoff only.
type Landing struct{}

func (l *Landing) Abort() { panic("unfinished") }

// Sequence is committed KV that decoding reads and grows.
type Sequence struct{}

func (s *Sequence) Len() int                                       { panic("unfinished") }
func (s *Sequence) Owner() id.Owner                                { panic("unfinished") }
func (s *Sequence) Extend(positions int) error                     { panic("unfinished") } // grants pages for [0,positions) out of the lease's credits
func (s *Sequence) Table(pos, count int) (*Table, error)           { panic("unfinished") }
func (s *Sequence) TokenBytes(pos int, dst []byte) ([]byte, error) { panic("unfinished") } // appends; refused while a Table is open
func (s *Sequence) Extents() []Extent                              { panic("unfinished") }
func (s *Sequence) Release()                                       { panic("unfinished") }
