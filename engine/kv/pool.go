package kv

import (
	"fmt"
	"math/bits"
	"sync"
	"time"

	"bulkhead.dev/engine/mem"
	"bulkhead.dev/infra/id"
)

// maxPages bounds a pool: page numbers are 32 bits wide everywhere.
const maxPages = 1 << 28

// ScrubPolicy says which pages are wiped when they are granted.
type ScrubPolicy uint8

const (
	// OnTenantChange wipes a page whose last owner is another owner.
	OnTenantChange ScrubPolicy = iota
	// Always wipes every page that anybody used before.
	Always
)

// Pattern is what a wiped page is filled with.
type Pattern uint8

const (
	// Zero is the pattern of production.
	Zero Pattern = iota
	// NaN fills with 0xFF bytes, which are a NaN in every format, so that a
	// read of a slot that nobody wrote spoils the result and shows. For tests;
	// pages that nobody used are filled as well.
	NaN
)

// Config describes a pool.
type Config struct {
	Geometry Geometry
	// Pages is the size of the pool.
	Pages   int
	Scrub   ScrubPolicy
	Pattern Pattern
	Memory  Memory
	// Lock asks for memory that is never swapped out. Arena tells whether it
	// was granted.
	Lock bool
	// OnEvent, if set, is told everything that happens to pages, in order. It
	// is called under the lock of the pool: it must be quick and must not call
	// the pool.
	OnEvent func(Event)
	// MaxQuarantine is how many pages may be in quarantine before Reserve
	// refuses everything; 0 is no limit.
	MaxQuarantine int
	// CachePerOwner is how many pages of finished prompts are kept for each
	// owner, see Remember. 0 keeps none.
	CachePerOwner int
	// Now is the clock for what is told about pages; nil is the system clock.
	Now func() time.Time
}

// Pool is a fixed set of pages. All methods may be called from any goroutine.
type Pool struct {
	geometry      Geometry
	pageBytes     int
	scrub         ScrubPolicy
	pattern       Pattern
	arena         *arena
	onEvent       func(Event)
	now           func() time.Time
	maxQuarantine int
	dirtied       chan struct{} // holds one element when there may be work for Scrub

	mu     sync.Mutex
	pages  []page         // under mu
	free   []uint64       // under mu; bit set: page is Clean or Dirty
	clean  []uint64       // under mu; bit set: page is Clean
	ahead  bool           // under mu; Scrub runs
	cursor uint32         // under mu; where Scrub looks next
	cache  cache          // under mu
	counts [numStates]int // under mu; pages by state
	// promised counts credits that are reserved and not drawn. It never
	// exceeds the free pages. Under mu.
	promised   int
	generation uint64 // under mu
	seq        uint64 // under mu
	grants     uint64 // under mu
	granted    uint64 // under mu
	scrubbed   uint64 // under mu; all, and those of Scrub
	wipedAhead uint64 // under mu
	closed     bool   // under mu
	// corrupt means that the books were found wrong. Nothing is granted, read,
	// written or freed any more. Under mu.
	corrupt bool
}

// page is what the pool knows of a page. Everything is under Pool.mu; the bytes
// are not, they are guarded by the state and the holds.
type page struct {
	state      State
	reason     QuarantineReason
	owner      id.Owner // the last one that the page was granted to; zero: nobody ever
	lease      id.Lease
	generation uint64
	refs       int32 // handles that refer to the page
	readers    int32 // open holds
	writers    int32
	scrubs     uint32
	scrub      ScrubProof
	since      time.Time // of the last change of state
}

// ScrubProof says when a page was last wiped.
type ScrubProof struct {
	// Generation is the grant for which (AtGrant) or after which (Ahead) it was.
	Generation uint64
	At         time.Time
	Method     ScrubMethod
}

// New makes a pool. Close it.
func New(c Config) (*Pool, error) {
	if err := c.Geometry.Validate(); err != nil {
		return nil, err
	}
	if c.Pages < 1 || c.Pages > maxPages {
		return nil, fmt.Errorf("%w: %d pages", ErrConfig, c.Pages)
	}
	if c.Scrub > Always || c.Pattern > NaN {
		return nil, fmt.Errorf("%w: scrub policy %d, pattern %d", ErrConfig, c.Scrub, c.Pattern)
	}
	if c.MaxQuarantine < 0 || c.CachePerOwner < 0 {
		return nil, fmt.Errorf("%w: at most %d pages in quarantine, %d cached", ErrConfig, c.MaxQuarantine, c.CachePerOwner)
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	pageBytes := c.Geometry.PageBytes()
	a, err := newArena(pageBytes*c.Pages, c.Memory, c.Lock)
	if err != nil {
		return nil, err
	}
	p := &Pool{
		geometry: c.Geometry, pageBytes: pageBytes, scrub: c.Scrub, pattern: c.Pattern,
		arena: a, onEvent: c.OnEvent, now: c.Now, maxQuarantine: c.MaxQuarantine, dirtied: make(chan struct{}, 1),
		pages: make([]page, c.Pages), free: make([]uint64, (c.Pages+63)/64), clean: make([]uint64, (c.Pages+63)/64),
		cache: newCache(c.CachePerOwner),
	}
	began := p.now()
	for i := range c.Pages {
		p.free[i/64] |= 1 << (i % 64)
		p.clean[i/64] |= 1 << (i % 64)
		p.pages[i].since = began
	}
	p.counts[StateClean] = c.Pages
	if c.Pattern == NaN {
		mem.Wipe(a.mem, c.Pattern.fill())
	}
	return p, nil
}

// Geometry returns the geometry of the pages.
func (p *Pool) Geometry() Geometry { return p.geometry }

// Arena tells which protections the memory of the pool has.
func (p *Pool) Arena() ArenaInfo { return p.arena.info }

// Close unmaps the pages. It refuses with ErrBusy while a page or a credit is
// held by anybody, because an address into the arena could still be in use.
func (p *Pool) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil
	}
	if free := p.counts[StateClean] + p.counts[StateDirty]; free != len(p.pages) || p.promised != 0 {
		return fmt.Errorf("%w: %d pages and %d credits are held", ErrBusy, len(p.pages)-free, p.promised)
	}
	p.closed = true
	return p.arena.close()
}

// Stats is a snapshot of a pool. The eight states add up to Pages.
type Stats struct {
	Pages                                                                   int
	Clean, Dirty, Scrubbing, Granted, Filling, Reading, Sealed, Quarantined int
	// Credits are promised and not yet drawn; Free is what Reserve can still
	// promise.
	Credits, Free int
	// Counters since the pool was made: calls that granted, pages they granted,
	// pages that were scrubbed and those of them that were so ahead of their
	// grant. Generation is the number of the last grant.
	Grants, GrantedPages, ScrubbedPages, ScrubbedAhead, Generation uint64
	// MaxQuarantine is the limit beyond which nothing is promised, 0 for none.
	MaxQuarantine int
	// CachedPages are kept for later prompts; they count as Sealed. CacheHits
	// counts the pages that were found, CacheEvicted those given up for others.
	CachedPages             int
	CacheHits, CacheEvicted uint64
	// Corrupt means that the pool found its own books wrong. It serves nothing
	// any more; the worker has to be replaced.
	Corrupt bool
}

// Stats returns a consistent snapshot.
func (p *Pool) Stats() Stats {
	p.mu.Lock()
	defer p.mu.Unlock()
	return Stats{
		Pages: len(p.pages),
		Clean: p.counts[StateClean], Dirty: p.counts[StateDirty], Scrubbing: p.counts[StateScrubbing], Granted: p.counts[StateGranted], Filling: p.counts[StateFilling],
		Reading: p.counts[StateReading], Sealed: p.counts[StateSealed], Quarantined: p.counts[StateQuarantined],
		Credits: p.promised, Free: p.promisable(),
		Grants: p.grants, GrantedPages: p.granted, ScrubbedPages: p.scrubbed, ScrubbedAhead: p.wipedAhead, Generation: p.generation,
		MaxQuarantine: p.maxQuarantine,
		CachedPages:   p.cache.pages, CacheHits: p.cache.hits, CacheEvicted: p.cache.evicted,
		Corrupt: p.corrupt,
	}
}

// PageInfo is what the pool knows of one page.
type PageInfo struct {
	State            State
	Reason           QuarantineReason
	Owner            id.Owner // the last owner, also while the page is free
	Lease            id.Lease
	Generation       uint64
	Refs             int
	Readers, Writers int
	Scrubs           int
	Scrub            ScrubProof
	// Since is when the page came into its state.
	Since time.Time
}

// Page tells what the pool knows of the page with this number. It gives no
// access to the page.
func (p *Pool) Page(index uint32) PageInfo {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.pages[index].info()
}

func (g *page) info() PageInfo {
	return PageInfo{
		State: g.state, Reason: g.reason, Owner: g.owner, Lease: g.lease, Generation: g.generation,
		Refs: int(g.refs), Readers: int(g.readers), Writers: int(g.writers), Scrubs: int(g.scrubs), Scrub: g.scrub, Since: g.since,
	}
}

// fail is for what can only happen if the books of the pool are wrong. A panic
// alone would not do: servers recover them. Callers hold mu.
func (p *Pool) fail(format string, args ...any) {
	p.corrupt = true
	panic("kv: " + fmt.Sprintf(format, args...))
}

// promisable returns how many more pages can be reserved. Callers hold mu.
func (p *Pool) promisable() int { return p.counts[StateClean] + p.counts[StateDirty] - p.promised }

// step is the only code that changes the state of a page. Callers hold mu.
func (p *Pool) step(index uint32, op Op) {
	g := &p.pages[index]
	from := g.state
	to := next[from][op]
	if to == noState {
		p.fail("page %d is %v and cannot %v", index, from, op)
	}
	if to.Free() || op == OpScrub || op == OpSeal || op == OpCommit || op == OpAdopt {
		if g.writers != 0 || (to.Free() && (g.readers != 0 || g.refs != 0)) {
			p.fail("page %d cannot %v with %d readers, %d writers, %d references", index, op, g.readers, g.writers, g.refs)
		}
	}
	p.counts[from]--
	p.counts[to]++
	g.state, g.since = to, p.now()
	set(p.free, index, to.Free())
	set(p.clean, index, to == StateClean)
	if to == StateDirty {
		p.wakeScrub()
	}
}

func set(bits []uint64, index uint32, v bool) {
	bits[index/64] &^= 1 << (index % 64)
	if v {
		bits[index/64] |= 1 << (index % 64)
	}
}

// draw picks n free pages, all in one run if there is one, and appends their
// numbers to dst. Callers hold mu and have drawn n credits, so they exist.
func (p *Pool) draw(dst []uint32, n int) []uint32 {
	// Where pages are wiped ahead, a run of those saves the wait for a wipe.
	for _, bits := range [][]uint64{p.clean, p.free} {
		if &bits[0] == &p.clean[0] && !p.ahead {
			continue
		}
		if first, ok := p.findRun(bits, n); ok {
			for i := range n {
				dst = append(dst, first+uint32(i))
			}
			return dst
		}
	}
	for w, word := range p.free {
		for word != 0 && n > 0 {
			b := bits.TrailingZeros64(word)
			word &^= 1 << b
			dst = append(dst, uint32(w*64+b))
			n--
		}
		if n == 0 {
			return dst
		}
	}
	p.fail("%d pages short of what was promised", n)
	return nil
}

// findRun returns the first run of n set bits. Callers hold mu.
func (p *Pool) findRun(free []uint64, n int) (uint32, bool) {
	run := 0
	for i := 0; i < len(p.pages); {
		word := free[i/64] >> (i % 64)
		left := min(64-i%64, len(p.pages)-i)
		if word == 0 {
			run = 0
			i += left
			continue
		}
		if z := bits.TrailingZeros64(word); z > 0 {
			run = 0
			i += z
			continue
		}
		ones := min(bits.TrailingZeros64(^word), left)
		if run += ones; run >= n {
			return uint32(i + ones - run), true
		}
		i += ones
	}
	return 0, false
}

// drop takes one reference from a page of an owner and frees it, or quarantines
// it if somebody has it open. Callers hold mu.
func (p *Pool) drop(ref PageRef, owner id.Owner, h *history) {
	index := ref.Index
	g := &p.pages[index]
	if g.generation != ref.Generation || g.owner != owner {
		p.fail("page %d generation %d is given back by a holder of generation %d", index, g.generation, ref.Generation)
	}
	if g.refs--; g.refs > 0 {
		return
	}
	switch {
	case g.writers > 0:
		g.reason = WriterOpen
	case g.readers > 0:
		g.reason = ReaderOpen
	default:
		p.step(index, OpFree)
		h.add(EventFree, index)
		return
	}
	p.step(index, OpQuarantine)
	h.add(EventQuarantine, index)
}

// settle frees a quarantined page if its last hold has closed. It is called
// after every end of a hold. Callers hold mu.
func (p *Pool) settle(index uint32, h *history) {
	g := &p.pages[index]
	if g.state != StateQuarantined || g.readers > 0 || g.writers > 0 {
		return
	}
	g.reason = NotQuarantined
	p.step(index, OpClear)
	h.add(EventClear, index)
}

// bytes returns the memory of a page, and not one byte more. Only code that
// has a hold on the page may touch it.
func (p *Pool) bytes(index uint32) []byte {
	at := int(index) * p.pageBytes
	return p.arena.mem[at : at+p.pageBytes : at+p.pageBytes]
}
