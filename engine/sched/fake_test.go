package sched

import (
	"math"
	"sync"
	"unsafe"

	"bulkhead.dev/engine/compute"
	"bulkhead.dev/engine/kv"
)

const fakeVocab = 61 // prime, so that answers do not settle soon

// fakeModel writes and reads real pages. The key of a position is its id; the
// value is the sum of the keys up to it, so that it depends on every page. The
// most likely next id is that sum modulo the vocabulary. A NaN in a page that
// is read spoils value and logits, as it would in a real model.
type fakeModel struct {
	mu sync.Mutex
	// before, if set, is called with the spans of each pass. An error fails it.
	before func(spans []compute.Span) error
	// spoil, if set, may change the key sum of a position.
	spoil  func(pos int, sum float32) float32
	short  bool // report one position less than was written
	passes int
}

func (m *fakeModel) Vocab() int { return fakeVocab }

func (m *fakeModel) Forward(spans []compute.Span) error {
	m.mu.Lock()
	before, spoil, short := m.before, m.spoil, m.short
	m.passes++
	m.mu.Unlock()
	if before != nil {
		if err := before(spans); err != nil {
			return err
		}
	}
	for i := range spans {
		s := &spans[i]
		addrs, err := s.Pages.Resolve(nil, s.Pos+len(s.Tokens))
		if err != nil {
			return err
		}
		var sum float32
		for pos := range s.Pos + len(s.Tokens) {
			page := floats(addrs[pos/kv.PageTokens])
			k := geometry.KIndex(0, 0, 0, pos%kv.PageTokens)
			v := geometry.VIndex(0, 0, pos%kv.PageTokens, 0)
			if pos >= s.Pos {
				page[k] = float32(s.Tokens[pos-s.Pos] + 1)
			}
			sum += page[k]
			if spoil != nil {
				sum = spoil(pos, sum)
			}
			if pos >= s.Pos {
				page[v] = sum
				// The rest of the position: a page has no slot that is not written.
				page[geometry.KIndex(0, 0, 1, pos%kv.PageTokens)] = 1
				page[geometry.VIndex(0, 0, pos%kv.PageTokens, 1)] = 1
			}
		}
		s.Wrote = len(s.Tokens)
		if short {
			s.Wrote--
		}
		if s.Logits == nil {
			continue
		}
		clear(s.Logits)
		if math.IsNaN(float64(sum)) {
			s.Logits[0] = sum
			continue
		}
		s.Logits[int(sum)%fakeVocab] = 10
	}
	return nil
}

func floats(addr uintptr) []float32 {
	return unsafe.Slice((*float32)(*(*unsafe.Pointer)(unsafe.Pointer(&addr))), geometry.PageBytes()/4)
}

// fakeNext is what the model answers greedily to the ids.
func fakeNext(ids []int32) int32 {
	sum := 0
	for _, id := range ids {
		sum += int(id) + 1
	}
	return int32(sum % fakeVocab)
}

// fakeAnswer is the greedy continuation of a prompt.
func fakeAnswer(prompt []int32, n int) []int32 {
	ids := append([]int32(nil), prompt...)
	for range n {
		ids = append(ids, fakeNext(ids))
	}
	return ids[len(prompt):]
}

// fakeText spells an id as one letter, or as half of a two-byte character.
type fakeText struct{ half string }

func (f *fakeText) Push(id int32) string {
	switch {
	case id == fakeVocab-1: // a character whose second half comes with the next id
		f.half = "\xc3"
		return ""
	case f.half != "":
		f.half = ""
		return "é"
	}
	return letter(id)
}

func (f *fakeText) Flush() string {
	if f.half != "" {
		f.half = ""
		return "\uFFFD"
	}
	return ""
}

func letter(id int32) string { return string('A' + id) }

func prompt(n, seed int) []int32 {
	p := make([]int32, n)
	for i := range p {
		p[i] = int32((i*7 + seed*13) % 50)
	}
	return p
}
