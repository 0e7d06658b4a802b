package tenancy

import "container/list"

// lru is a map of bounded size that forgets what was used longest ago. It is
// not safe for concurrent use.
type lru[K comparable, V any] struct {
	max   int
	order *list.List // of *lruEntry; front is the latest
	byKey map[K]*list.Element
}

type lruEntry[K comparable, V any] struct {
	key   K
	value V
}

func newLRU[K comparable, V any](max int) *lru[K, V] {
	return &lru[K, V]{max: max, order: list.New(), byKey: make(map[K]*list.Element)}
}

func (l *lru[K, V]) get(k K) (v V, ok bool) {
	e, ok := l.byKey[k]
	if !ok {
		return v, false
	}
	l.order.MoveToFront(e)
	return e.Value.(*lruEntry[K, V]).value, true
}

func (l *lru[K, V]) put(k K, v V) {
	if e, ok := l.byKey[k]; ok {
		e.Value.(*lruEntry[K, V]).value = v
		l.order.MoveToFront(e)
		return
	}
	l.byKey[k] = l.order.PushFront(&lruEntry[K, V]{k, v})
	if l.order.Len() > l.max {
		last := l.order.Back()
		delete(l.byKey, l.order.Remove(last).(*lruEntry[K, V]).key)
	}
}

func (l *lru[K, V]) remove(k K) {
	if e, ok := l.byKey[k]; ok {
		l.order.Remove(e)
		delete(l.byKey, k)
	}
}
