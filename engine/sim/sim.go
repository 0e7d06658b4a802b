package sim

import (
	"errors"
	"fmt"
	"math"
	"time"

	"bulkhead.dev/engine/compute"
	"bulkhead.dev/engine/kv"
)

// Level stands where the CPU level of a model stands.
const Level = "sim"

// maxText bounds the ids that answers are made of: enough not to repeat soon.
const maxText = 256

// Latency is what passes take.
type Latency struct {
	PromptToken time.Duration // of a prompt, each token
	Step        time.Duration // one step of decoding, however many sequences
	Sequence    time.Duration // each sequence in a step, on top
}

// Options configure a Model. All but Latency are needed.
type Options struct {
	Vocab   int // entries of the vocabulary
	Context int // tokens of the context window
	// Piece returns what a token says, and whether it is part of a text. Only
	// words of ASCII letters are answered.
	Piece   func(id int32) (piece []byte, text bool)
	DType   kv.DType
	Latency Latency
	Sleep   func(time.Duration)
}

// Model stands in for a *compute.Model. It is not safe for concurrent use.
type Model struct {
	opts     Options
	geometry kv.Geometry
	words    []int32   // ids that say a word
	addrs    []uintptr // scratch of a pass
}

// ErrVocabulary means that a tokenizer has no token to answer with.
var ErrVocabulary = errors.New("the vocabulary has no word of ASCII letters")

// New makes a model.
func New(o Options) (*Model, error) {
	m := &Model{opts: o, geometry: Geometry(o.DType)}
	if err := m.geometry.Validate(); err != nil {
		return nil, err
	}
	var single []int32
	for id := int32(0); int(id) < o.Vocab && len(m.words) < maxText; id++ {
		piece, text := o.Piece(id)
		switch n := letters(piece); {
		case !text || n == 0:
		case n == 1:
			single = append(single, id)
		default:
			m.words = append(m.words, id)
		}
	}
	if len(m.words) == 0 {
		m.words = single
	}
	if len(m.words) == 0 {
		return nil, ErrVocabulary
	}
	return m, nil
}

// letters counts the letters of a token that says letters, with or without a
// space in front, and nothing else.
func letters(piece []byte) int {
	n := 0
	for i, b := range piece {
		switch {
		case b >= 'a' && b <= 'z' || b >= 'A' && b <= 'Z':
			n++
		case b == ' ' && i == 0:
		default:
			return 0
		}
	}
	return n
}

// Geometry returns the geometry of the pages.
func (m *Model) Geometry() kv.Geometry { return m.geometry }

// Vocab returns the number of logits.
func (m *Model) Vocab() int { return m.opts.Vocab }

// Level returns Level.
func (m *Model) Level() string { return Level }

// Close does nothing.
func (m *Model) Close() error { return nil }

// Forward does what compute.Model.Forward does, without arithmetic: everything
// is checked before anything is written.
func (m *Model) Forward(spans []compute.Span) error {
	for i := range spans {
		spans[i].Wrote = 0
		if err := m.check(&spans[i]); err != nil {
			return fmt.Errorf("span %d: %w", i, err)
		}
	}
	for i := range spans {
		if err := m.span(&spans[i]); err != nil {
			return fmt.Errorf("span %d: %w", i, err)
		}
	}
	if d := m.takes(spans); d > 0 {
		m.opts.Sleep(d)
	}
	return nil
}

func (m *Model) check(s *compute.Span) error {
	switch {
	case len(s.Tokens) == 0:
		return fmt.Errorf("%w: no tokens", compute.ErrSpan)
	case s.Pos < 0 || s.Pos > m.opts.Context-len(s.Tokens):
		return fmt.Errorf("%w: positions %d to %d of a window of %d", compute.ErrSpan, s.Pos, s.Pos+len(s.Tokens), m.opts.Context)
	case s.Logits != nil && len(s.Logits) != m.opts.Vocab:
		return fmt.Errorf("%w: room for %d logits of %d", compute.ErrSpan, len(s.Logits), m.opts.Vocab)
	case s.Pages == nil:
		return fmt.Errorf("%w: no pages", compute.ErrSpan)
	}
	for _, t := range s.Tokens {
		if t < 0 || int(t) >= m.opts.Vocab {
			return fmt.Errorf("%w: a token is not of this vocabulary", compute.ErrSpan)
		}
	}
	return m.resolve(s)
}

func (m *Model) resolve(s *compute.Span) (err error) {
	n := s.Pos + len(s.Tokens)
	if m.addrs, err = s.Pages.Resolve(m.addrs[:0], n); err != nil {
		return err
	}
	if len(m.addrs) != m.geometry.PagesFor(n) {
		return fmt.Errorf("%w: %d pages for %d positions", compute.ErrSpan, len(m.addrs), n)
	}
	return nil
}

// span reads what is in front of a span, writes its positions, and makes its
// logits.
func (m *Model) span(s *compute.Span) error {
	if err := m.resolve(s); err != nil {
		return err
	}
	h, whole := history(0), true
	at := func(pos int) slot {
		return slot{pageAt(m.addrs[pos/kv.PageTokens], m.geometry), m.geometry.DType == kv.F32, pos % kv.PageTokens}
	}
	for pos := range s.Pos {
		k, v := at(pos).read()
		whole = whole && k.marked()
		h = h.add(k, v)
	}
	for i, token := range s.Tokens {
		k := keyOf(token, s.Pos+i)
		v := h.value(k)
		at(s.Pos+i).write(k, v)
		h = h.add(k, v)
		s.Wrote++
	}
	if s.Logits == nil {
		return nil
	}
	for i := range s.Logits {
		s.Logits[i] = float32(math.Inf(-1))
	}
	if !whole {
		s.Logits[0] = float32(math.NaN())
		return nil
	}
	s.Logits[m.words[uint64(h.value(0))%uint64(len(m.words))]] = 0
	return nil
}

// takes is what the latency model says of a pass.
func (m *Model) takes(spans []compute.Span) (d time.Duration) {
	l, decoding := m.opts.Latency, false
	for i := range spans {
		if spans[i].Logits == nil {
			d += time.Duration(len(spans[i].Tokens)) * l.PromptToken
			continue
		}
		decoding = true
		d += l.Sequence
	}
	if decoding {
		d += l.Step
	}
	return d
}
