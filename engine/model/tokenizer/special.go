package tokenizer

// specials finds the longest special token at the start of a text. It is a
// tree of bytes; the zero value holds no token.
type specials struct {
	roots [256]*node
}

type node struct {
	next map[byte]*node
	id   int32 // none if no token ends here
}

func (s *specials) add(text string, id int32) {
	if text == "" {
		return
	}
	n := s.roots[text[0]]
	if n == nil {
		n = &node{id: none}
		s.roots[text[0]] = n
	}
	for _, b := range []byte(text[1:]) {
		m := n.next[b]
		if m == nil {
			if n.next == nil {
				n.next = map[byte]*node{}
			}
			m = &node{id: none}
			n.next[b] = m
		}
		n = m
	}
	n.id = id
}

// match returns the longest token at the start of text and its length in
// bytes, 0 if there is none. It reads no further than the longest token.
func (s *specials) match(text string) (id int32, n int) {
	id = none
	at := s.roots[text[0]]
	for i := 1; at != nil; i++ {
		if at.id != none {
			id, n = at.id, i
		}
		if i == len(text) {
			break
		}
		at = at.next[text[i]]
	}
	return id, n
}
