package kv

import "fmt"

// Step does one step of the state machine on a page, bypassing the handles.
func (p *Pool) Step(index uint32, op Op) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.step(index, op)
}

// ScrubOne does one turn of Scrub.
func (p *Pool) ScrubOne() (bool, error) { return p.scrubOne() }

// SetState forces a state, to try steps out of it.
func (p *Pool) SetState(index uint32, s State) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.counts[p.pages[index].state]--
	p.counts[s]++
	p.pages[index].state = s
}

// Audit checks everything that must hold between any two calls.
func (p *Pool) Audit() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	var counts [numStates]int
	for i := range p.pages {
		g := &p.pages[i]
		counts[g.state]++
		if bit := p.free[i/64]&(1<<(i%64)) != 0; bit != g.state.Free() {
			return fmt.Errorf("page %d is %v, but its free bit is %v", i, g.state, bit)
		}
		if g.state.Free() && (g.readers != 0 || g.writers != 0 || g.refs != 0) {
			return fmt.Errorf("page %d is free with %d readers, %d writers, %d refs", i, g.readers, g.writers, g.refs)
		}
		if g.readers < 0 || g.writers < 0 || g.refs < 0 {
			return fmt.Errorf("page %d has %d readers, %d writers, %d refs", i, g.readers, g.writers, g.refs)
		}
		// Clean is what nobody had, or what was wiped after its last grant.
		if want := g.owner.IsZero() || g.scrub.Generation == g.generation && g.scrub.Method == Ahead; g.state == StateClean && !want || g.state == StateDirty && g.owner.IsZero() {
			return fmt.Errorf("page %d is %v with owner %v and %v", i, g.state, g.owner.Short(), g.scrub)
		}
		if bit := p.clean[i/64]&(1<<(i%64)) != 0; bit != (g.state == StateClean) {
			return fmt.Errorf("page %d is %v, but its clean bit is %v", i, g.state, bit)
		}
		if g.state == StateClean {
			for _, b := range p.bytes(uint32(i)) {
				if b != map[Pattern]byte{Zero: 0, NaN: 0xFF}[p.pattern] {
					return fmt.Errorf("page %d is clean and holds %x", i, b)
				}
			}
		}
		if (g.state == StateQuarantined) != (g.reason != NotQuarantined) {
			return fmt.Errorf("page %d is %v with reason %v", i, g.state, g.reason)
		}
		if g.state == StateSealed && g.writers != 0 {
			return fmt.Errorf("page %d is sealed with %d writers", i, g.writers)
		}
		if (g.state == StateScrubbing) && (g.writers != 1 || g.readers != 0 || g.refs != 0) {
			return fmt.Errorf("page %d is %v with %d writers, %d readers, %d refs", i, g.state, g.writers, g.readers, g.refs)
		}
		if g.generation > p.generation {
			return fmt.Errorf("page %d has generation %d of %d", i, g.generation, p.generation)
		}
	}
	if counts != p.counts {
		return fmt.Errorf("counts are %v, pages say %v", p.counts, counts)
	}
	if free := counts[StateClean] + counts[StateDirty]; p.promised < 0 || p.promised > free {
		return fmt.Errorf("%d credits for %d free pages", p.promised, free)
	}
	return nil
}

// Steal makes a page look granted to somebody else, behind the back of those
// who hold it, as a bug in the pool would.
func (p *Pool) Steal(index uint32, change func(g *PageInfo)) (undo func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	g := &p.pages[index]
	was := *g
	info := PageInfo{Owner: g.owner, Generation: g.generation}
	change(&info)
	g.owner, g.generation = info.Owner, info.Generation
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		g.owner, g.generation = was.owner, was.generation
	}
}

// SumOf digests any bytes as a page.
func SumOf(k DigestKey, i int, generation uint64, page []byte) Sum {
	d, err := newDigester(k)
	if err != nil {
		panic(err)
	}
	return d.sum(i, generation, page)
}
