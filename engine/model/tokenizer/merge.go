package tokenizer

// symbol is a piece of the text that merging has made so far. Symbols form a
// list; a symbol that was merged into its left neighbour has size 0.
type symbol struct {
	prev, next int32 // indexes, none at the ends
	start      int32 // in the text, in bytes
	size       int32 // in bytes
	id         int32 // meaning is the model's
}

// candidate is a pair of neighbours that could become one symbol.
type candidate struct {
	rank        float32 // the lower, the earlier; exact for 2^24 ranks
	left, right int32   // symbols
	size        int32   // of the pair when it was found, in bytes
	id          int32   // of the merged symbol
}

func (c candidate) before(d candidate) bool {
	if c.rank != d.rank {
		return c.rank < d.rank
	}
	return c.left < d.left
}

// merger merges neighbours in the order of their rank, leftmost first among
// equals. Each merge adds at most two candidates to a heap, so that n symbols
// take O(n log n) whatever they are. It lives for one call of Encode.
type merger struct {
	symbols []symbol
	heap    []candidate
}

// reset starts a new text.
func (m *merger) reset() { m.symbols, m.heap = m.symbols[:0], m.heap[:0] }

// add appends a symbol to the text.
func (m *merger) add(start, size int, id int32) {
	n := int32(len(m.symbols))
	if n > 0 {
		m.symbols[n-1].next = n
	}
	m.symbols = append(m.symbols, symbol{prev: n - 1, next: none, start: int32(start), size: int32(size), id: id})
}

// run merges until no pair is left. pair says whether two neighbours can be
// merged, with what rank and into what.
func (m *merger) run(pair func(left, right symbol) (rank float32, id int32, ok bool)) {
	try := func(left, right int32) {
		if left == none || right == none {
			return
		}
		l, r := m.symbols[left], m.symbols[right]
		if rank, id, ok := pair(l, r); ok {
			m.push(candidate{rank, left, right, l.size + r.size, id})
		}
	}
	for i := 1; i < len(m.symbols); i++ {
		try(int32(i-1), int32(i))
	}
	for len(m.heap) > 0 {
		c := m.pop()
		l, r := &m.symbols[c.left], &m.symbols[c.right]
		// Symbols only grow, and one that has gone has size 0: the sizes tell
		// whether the pair is still what it was.
		if l.size == 0 || r.size == 0 || l.size+r.size != c.size {
			continue
		}
		l.size, l.id, l.next = c.size, c.id, r.next
		r.size = 0
		if r.next != none {
			m.symbols[r.next].prev = c.left
		}
		try(l.prev, c.left)
		try(c.left, l.next)
	}
}

func (m *merger) push(c candidate) {
	m.heap = append(m.heap, c)
	i := len(m.heap) - 1
	for i > 0 {
		up := (i - 1) / 2
		if !c.before(m.heap[up]) {
			break
		}
		m.heap[i] = m.heap[up]
		i = up
	}
	m.heap[i] = c
}

func (m *merger) pop() candidate {
	top, n := m.heap[0], len(m.heap)-1
	c := m.heap[n]
	m.heap = m.heap[:n]
	if n == 0 {
		return top
	}
	i := 0
	for {
		down := 2*i + 1
		if down >= n {
			break
		}
		if down+1 < n && m.heap[down+1].before(m.heap[down]) {
			down++
		}
		if !m.heap[down].before(c) {
			break
		}
		m.heap[i] = m.heap[down]
		i = down
	}
	m.heap[i] = c
	return top
}
