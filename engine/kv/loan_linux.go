package kv

import (
	"fmt"
	"os"
	"sync"
)

// Loan holds pages open for reading by another process, which has the memory of
// the pool mapped (see Share). It lasts until Close, whatever becomes of the
// handle that the pages were lent from: a page that is released meanwhile is
// quarantined until then.
type Loan struct {
	pool *Pool
	refs []PageRef
	once sync.Once
}

// Lend holds pages of a sealed handle of this pool open for reading, all or
// none. The errors are those of View; ErrRange also if the handle is of another
// pool. Close it only on proof that nobody reads the pages any more.
func (p *Pool) Lend(s *Sealed, refs []PageRef) (*Loan, error) {
	if s.h.pool != p {
		return nil, fmt.Errorf("%w: pages of another pool", ErrRange)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, r := range refs {
		if _, err := s.find(r); err != nil {
			return nil, err
		}
	}
	for _, r := range refs {
		p.pages[r.Index].readers++
	}
	return &Loan{pool: p, refs: refs}, nil
}

// Offsets returns where in the memory of the pool the pages begin.
func (l *Loan) Offsets() []int64 {
	at := make([]int64, len(l.refs))
	for i, r := range l.refs {
		at[i] = int64(r.Index) * int64(l.pool.pageBytes)
	}
	return at
}

// Close ends the hold. It may be called any number of times.
func (l *Loan) Close() {
	l.once.Do(func() {
		p := l.pool
		p.mu.Lock()
		defer p.mu.Unlock()
		ev := history{p: p}
		for _, r := range l.refs {
			p.pages[r.Index].readers--
			p.settle(r.Index, &ev)
		}
		ev.flush()
	})
}

// Share opens the memory of a Memfd pool for reading, to be handed to another
// process: through the descriptor nobody can write the memory, change its size
// or punch holes into it. Whoever has it can read every page, so it is for
// processes that may. ErrConfig if the memory is of another kind. The caller
// closes the file.
func (p *Pool) Share() (*os.File, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || p.arena.fd < 0 {
		return nil, fmt.Errorf("%w: the memory of the pool cannot be shared", ErrConfig)
	}
	// A duplicate would carry the right to write; opening it anew does not.
	f, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", p.arena.fd))
	if err != nil {
		return nil, fmt.Errorf("open the memory of the pool: %w", err)
	}
	return f, nil
}
