package tokenizer

import "strings"

// bpe is byte-level BPE: a text is split into words, the bytes of a word are
// merged by a ranked list of pairs. A byte for which the vocabulary has no
// token is left out, as in llama.cpp: such vocabularies lack some control
// characters and bytes that UTF-8 does not use.
type bpe struct {
	split []scanner
	// symbols of single bytes. Ids from size on are not tokens but strings
	// that merges pass through.
	bytes  [256]int32
	merges map[pair]merge
	// words holds the tokens that need no merging, nil if all do.
	words map[string]int32
	size  int32
}

// pair names two neighbouring symbols.
type pair struct{ left, right int32 }

// merge is what a pair becomes.
type merge struct {
	rank int32
	id   int32
}

func (b *bpe) encode(dst []int32, text string) []int32 {
	var m merger
	words(b.split, text, func(word string) {
		dst = b.word(dst, word, &m)
	})
	return dst
}

func (b *bpe) word(dst []int32, word string, m *merger) []int32 {
	if id, ok := b.words[word]; ok {
		return append(dst, id)
	}
	m.reset()
	for i := range len(word) {
		m.add(i, 1, b.bytes[word[i]])
	}
	m.run(func(l, r symbol) (float32, int32, bool) {
		g, ok := b.merges[pair{l.id, r.id}]
		return float32(g.rank), g.id, ok
	})
	for i := int32(0); i != none; i = m.symbols[i].next {
		s := m.symbols[i]
		if s.id < b.size {
			dst = append(dst, s.id)
			continue
		}
		for _, c := range []byte(word[s.start : s.start+s.size]) {
			if id := b.bytes[c]; id < b.size {
				dst = append(dst, id)
			}
		}
	}
	return dst
}

// newBPE builds the merge table. tokens are the texts of the vocabulary in the
// byte alphabet; only ordinary ones can come out of merging.
func newBPE(v *vocab, split []scanner, wholeWords bool) (*bpe, error) {
	b := &bpe{split: split, size: int32(len(v.tokens)), merges: make(map[pair]merge, len(v.merges))}
	ids := make(map[string]int32, len(v.tokens))
	for id, text := range v.tokens {
		if v.ordinary(id) {
			ids[text] = int32(id)
		}
	}
	next := b.size
	intern := func(text string) int32 {
		id, ok := ids[text]
		if !ok {
			id = next
			next++
			ids[text] = id
		}
		return id
	}
	for c := range b.bytes {
		b.bytes[c] = intern(string(byteRune(byte(c))))
	}
	for rank, text := range v.merges {
		// The first half is never empty, but may begin with the separator.
		at := -1
		if len(text) > 1 {
			at = strings.IndexByte(text[1:], ' ') + 1
		}
		if at < 1 || at+1 == len(text) {
			return nil, invalid("merge %d is not a pair", rank)
		}
		left, right := text[:at], text[at+1:]
		p := pair{intern(left), intern(right)}
		if _, dup := b.merges[p]; !dup {
			b.merges[p] = merge{int32(rank), intern(left + right)}
		}
	}
	if wholeWords {
		b.words = make(map[string]int32, len(v.tokens))
		for id := range v.tokens {
			if v.ordinary(id) {
				b.words[string(v.pieces[id])] = int32(id)
			}
		}
	}
	return b, nil
}
