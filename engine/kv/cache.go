package kv

import (
	"container/list"
	"fmt"

	"bulkhead.dev/infra/id"
)

// CacheScope is everything but the token ids that decides what is in a page.
// Two prompts share pages only if all of it is equal; the geometry and the pool
// are the same by construction.
type CacheScope struct {
	Owner   id.Owner
	Model   [32]byte // SHA-256 of the model file
	Adapter string   // "" for none
}

// cache keeps the pages of finished prompts, for later prompts of the same scope
// that begin with the same ids. It is a tree with a level for each page: what
// leads to a page is the scope and the ids of all positions up to its end, as
// they are, not a hash of them. There is nothing that could collide.
//
// Everything is under Pool.mu.
type cache struct {
	perOwner int
	roots    map[CacheScope]*cacheNode
	owners   map[id.Owner]*list.List // of *cacheNode, the least recently used last
	order    list.List               // of *cacheNode, all owners
	pages    int
	hits     uint64
	evicted  uint64
}

type pageIDs [PageTokens]int32

// cacheNode is a page, or the root of a scope, which has none.
type cacheNode struct {
	owner    id.Owner
	parent   *cacheNode
	ids      pageIDs
	ref      PageRef
	children map[pageIDs]*cacheNode
	scope    CacheScope // of a root
	mine     *list.Element
	all      *list.Element
}

func newCache(perOwner int) cache {
	return cache{perOwner: perOwner, roots: map[CacheScope]*cacheNode{}, owners: map[id.Owner]*list.List{}}
}

// idsOf returns the ids of the i-th page.
func idsOf(tokens []int32, i int) pageIDs { return pageIDs(tokens[i*PageTokens : (i+1)*PageTokens]) }

// Remember keeps the full pages of a prompt for later ones. The caller has proof
// that they are what they should be: the other leg verified them. tokens are
// the ids of all positions. Pages that are kept stay sealed until the owner has
// newer ones beyond its share, or somebody needs the room. ErrStale if the
// handle was released, ErrRange if the ids are not as many as the positions.
func (s *Sealed) Remember(scope CacheScope, tokens []int32) error {
	h, p := s.h, s.h.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := s.live(); err != nil {
		return err
	}
	switch {
	case len(tokens) != h.length:
		return fmt.Errorf("%w: %d ids for %d positions", ErrRange, len(tokens), h.length)
	case scope.Owner != h.owner:
		return fmt.Errorf("%w: the pages belong to another owner than the scope", ErrOwner)
	}
	ev := history{p: p}
	defer ev.flush()
	c := &p.cache
	node := c.root(scope)
	path := []*cacheNode{}
	for i := range min(h.length/PageTokens, c.perOwner) {
		ids := idsOf(tokens, i)
		next := node.children[ids]
		if next == nil {
			if list := c.owners[h.owner]; list != nil && list.Len() >= c.perOwner {
				// Not what this very prompt has just used.
				if last := list.Back().Value.(*cacheNode); contains(path, last) || !p.evict(last, &ev) {
					break
				}
			}
			ref := h.refs[i]
			if _, err := h.check(ref); err != nil {
				return err
			}
			next = &cacheNode{owner: h.owner, parent: node, ids: ids, ref: ref, children: map[pageIDs]*cacheNode{}}
			p.pages[ref.Index].refs++
			c.add(node, next)
		}
		path = append(path, next)
		node = next
	}
	c.use(path)
	c.prune(scope)
	return nil
}

func contains(path []*cacheNode, n *cacheNode) bool {
	for _, x := range path {
		if x == n {
			return true
		}
	}
	return false
}

// Recall returns a handle on pages that were remembered for a prompt that began
// alike, or nil. At least the last position is left to be computed.
func (p *Pool) Recall(scope CacheScope, tokens []int32) (*Sealed, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.corrupt {
		return nil, ErrCorrupt
	}
	c := &p.cache
	node := c.roots[scope]
	if node == nil {
		return nil, nil //nolint:nilnil // nothing is remembered
	}
	out := &holding{pool: p, owner: scope.Owner, phase: 1}
	var path []*cacheNode
	for i := range (len(tokens) - 1) / PageTokens {
		next := node.children[idsOf(tokens, i)]
		if next == nil {
			break
		}
		g, err := out.check(next.ref)
		if err != nil || g.state != StateSealed {
			p.fail("page %d generation %d is cached for an owner who does not have it", next.ref.Index, next.ref.Generation)
		}
		g.refs++
		out.lease = g.lease
		out.append(next.ref, false)
		path = append(path, next)
		node = next
	}
	if len(path) == 0 {
		return nil, nil //nolint:nilnil // nothing is remembered
	}
	c.use(path)
	c.hits += uint64(len(path))
	out.length, out.granted = len(path)*PageTokens, len(path)
	return &Sealed{handle{out, out.phase}}, nil
}

// Forget gives up all pages that are remembered for an owner, or for everybody
// if it is zero. Those in use go when their last user does.
func (p *Pool) Forget(owner id.Owner) {
	p.mu.Lock()
	defer p.mu.Unlock()
	ev := history{p: p}
	for e := p.cache.order.Back(); e != nil; {
		n := e.Value.(*cacheNode)
		e = e.Prev()
		if owner.IsZero() || n.owner == owner {
			p.evict(n, &ev)
		}
	}
	ev.flush()
}

// makeRoom gives up remembered pages until so many can be promised: those of the
// owner who needs them first, then the least recently used of all. Callers hold
// mu.
func (p *Pool) makeRoom(owner id.Owner, pages int) {
	ev := history{p: p}
	defer ev.flush()
	lists := []*list.List{&p.cache.order}
	if mine := p.cache.owners[owner]; mine != nil {
		lists = []*list.List{mine, &p.cache.order}
	}
	for _, l := range lists {
		for e := l.Back(); e != nil && p.promisable() < pages; {
			n := e.Value.(*cacheNode)
			e = e.Prev()
			// One that is in use as well would make no room.
			if p.pages[n.ref.Index].refs == 1 && p.evict(n, &ev) {
				p.cache.evicted++
			}
		}
	}
}

// evict gives up one page. It refuses one that leads to others. Callers hold mu.
func (p *Pool) evict(n *cacheNode, ev *history) bool {
	if len(n.children) > 0 {
		return false
	}
	c := &p.cache
	delete(n.parent.children, n.ids)
	l := c.owners[n.owner]
	l.Remove(n.mine)
	if l.Len() == 0 {
		delete(c.owners, n.owner)
	}
	c.order.Remove(n.all)
	c.pages--
	if n.parent.parent == nil {
		c.prune(n.parent.scope)
	}
	p.drop(n.ref, n.owner, ev)
	return true
}

func (c *cache) root(scope CacheScope) *cacheNode {
	r := c.roots[scope]
	if r == nil {
		r = &cacheNode{owner: scope.Owner, scope: scope, children: map[pageIDs]*cacheNode{}}
		c.roots[scope] = r
	}
	return r
}

// prune drops a root that leads nowhere.
func (c *cache) prune(scope CacheScope) {
	if r := c.roots[scope]; r != nil && len(r.children) == 0 {
		delete(c.roots, scope)
	}
}

func (c *cache) add(parent, n *cacheNode) {
	parent.children[n.ids] = n
	l := c.owners[n.owner]
	if l == nil {
		l = list.New()
		c.owners[n.owner] = l
	}
	n.mine, n.all = l.PushFront(n), c.order.PushFront(n)
	c.pages++
}

// use makes the pages of a path the most recently used, the first page last. So
// a page is always less recently used than those that lead to it, and the least
// recently used page leads to no other.
func (c *cache) use(path []*cacheNode) {
	for i := len(path) - 1; i >= 0; i-- {
		c.owners[path[i].owner].MoveToFront(path[i].mine)
		c.order.MoveToFront(path[i].all)
	}
}
