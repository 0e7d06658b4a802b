package compute

import (
	"errors"
	"fmt"
	"runtime"
	"slices"

	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/model"
	"bulkhead.dev/engine/model/gguf"
)

// Errors of this package. A refused call has written nothing.
var (
	ErrOptions = errors.New("bad compute options")
	ErrSpan    = errors.New("bad span")
	ErrMemory  = errors.New("no memory for the model")
	ErrClosed  = errors.New("model is closed")
)

// Levels, from slowest to fastest. "go" is the reference.
const (
	levelGo     = "go"
	levelScalar = "scalar"
	levelAVX2   = "avx2"
	levelVNNI   = "vnni"
	levelAMX    = "amx"
)

// DefaultMaxRows is the number of rows that scratch is made for where Options
// say nothing: a chunk of a prompt. Longer calls are cut.
const DefaultMaxRows = 512

// Pages are the pages of one sequence; *kv.Table.
type Pages interface {
	// Resolve appends to dst the addresses of the pages that hold positions
	// [0, positions), after checking at this moment that the sequence still has
	// them. They stay valid for the pass.
	Resolve(dst []uintptr, positions int) ([]uintptr, error)
}

// Span is a run of consecutive new tokens of one sequence.
type Span struct {
	Tokens []int32
	Pos    int // position of the first token
	Pages  Pages
	// Logits receives the logits after the last token: one for each entry of
	// the vocabulary. nil when they are not wanted, which saves computing them.
	Logits []float32
	// Wrote is set to the number of positions whose keys and values were
	// written in every layer, as counted where they were written.
	Wrote int
}

// Options choose how a model is run.
type Options struct {
	Backend string   // "go", "c", or "" for the best
	Level   string   // at most this level; "" is the best of this CPU
	Threads int      // for the C backend; at least 1
	DType   kv.DType // number format of the pages
	MaxRows int      // rows of one pass; 0 is DefaultMaxRows
}

// Model is a loaded model. It is not safe for concurrent use.
type Model struct {
	cfg      model.Config
	geometry kv.Geometry
	vocab    int
	maxRows  int
	level    string
	embed    embedding
	back     backend

	// Scratch of a pass.
	batch   batch
	addrs   []uintptr
	scratch [][]byte
}

// backend runs passes of at most MaxRows rows.
type backend interface {
	// forward takes rows whose embeddings were put into x().
	forward(b *batch)
	// x is [rows][stride]: where embeddings go.
	x() (data []float32, stride int)
	// logits is [wants][stride].
	logits() (data []float32, stride int)
	// scratch appends every buffer in which a pass over so many rows may have
	// left numbers of a sequence.
	scratch(dst [][]byte, rows int) [][]byte
	close()
}

// batch is a pass over rows. Rows of a sequence are neighbours and their
// positions consecutive.
type batch struct {
	pos   []int32
	seq   []int32
	first []int32  // of each sequence: its first entry in pages
	pages []uint64 // addresses
	wants []int32  // rows whose logits are wanted
	wrote []int32  // out, of each sequence
}

func (b *batch) reset() {
	b.pos, b.seq, b.first, b.pages, b.wants, b.wrote = b.pos[:0], b.seq[:0], b.first[:0], b.pages[:0], b.wants[:0], b.wrote[:0]
}

// Load makes a model out of the weights of a file. The bytes are copied: the
// file may be closed afterwards.
func Load(l *model.Llama, o Options) (*Model, error) {
	if o.MaxRows == 0 {
		o.MaxRows = DefaultMaxRows
	}
	if o.MaxRows < 1 || o.MaxRows > 1<<14 || o.Threads < 0 || o.Threads > 1<<10 || o.DType.Bytes() == 0 {
		return nil, fmt.Errorf("%w: %d rows, %d threads, %v", ErrOptions, o.MaxRows, o.Threads, o.DType)
	}
	o.Threads = max(o.Threads, 1)
	level, err := pick(o)
	if err != nil {
		return nil, err
	}
	c := l.Config
	if c.HeadDim%2 != 0 || c.HeadDim > maxHeadDim || c.RopeDim%2 != 0 || c.RopeDim > c.HeadDim {
		return nil, fmt.Errorf("%w: heads of %d dims of which %d rotate; want even numbers, at most %d", ErrOptions, c.HeadDim, c.RopeDim, maxHeadDim)
	}
	m := &Model{cfg: c, maxRows: o.MaxRows, vocab: c.Vocab, level: level, geometry: kv.Geometry{
		Layers: c.Layers, KVHeads: c.KVHeads, HeadDim: c.HeadDim, PageTokens: kv.PageTokens, DType: o.DType, Layout: kv.Layout1,
	}}
	if err := m.geometry.Validate(); err != nil {
		return nil, err
	}
	w, err := pack(l, o.DType)
	if err != nil {
		return nil, err
	}
	m.embed = embedding{typ: l.Embed.Type, dim: c.Dim, data: slices.Clone(l.Embed.Data)}
	if level == levelGo {
		m.back = newReference(w, o.MaxRows)
		return m, nil
	}
	if m.back, err = newC(w, level, o); err != nil {
		w.free()
		return nil, err
	}
	return m, nil
}

// maxHeadDim is what the buffers of attention are made for.
const maxHeadDim = 256

// pick chooses the level.
func pick(o Options) (string, error) {
	have := Levels()
	level := have[len(have)-1]
	switch o.Backend {
	case "":
	case "go":
		level = levelGo
	case "c":
		if level == levelGo {
			return "", fmt.Errorf("%w: this build has no C kernels", ErrOptions)
		}
	default:
		return "", fmt.Errorf("%w: backend %q", ErrOptions, o.Backend)
	}
	if o.Level == "" {
		return level, nil
	}
	if !slices.Contains(have, o.Level) {
		return "", fmt.Errorf("%w: level %q is not one of %v here", ErrOptions, o.Level, have)
	}
	if o.Backend == "go" && o.Level != levelGo || o.Backend == "c" && o.Level == levelGo {
		return "", fmt.Errorf("%w: backend %q has no level %q", ErrOptions, o.Backend, o.Level)
	}
	return o.Level, nil
}

// Levels returns the levels that can run here, slowest first.
func Levels() []string { return append([]string{levelGo}, cLevels()...) }

// Detect returns the best level that can run here.
func Detect() string {
	l := Levels()
	return l[len(l)-1]
}

// Geometry returns the geometry of the pages that the model works on.
func (m *Model) Geometry() kv.Geometry { return m.geometry }

// Vocab returns the number of logits.
func (m *Model) Vocab() int { return m.vocab }

// Context returns the context window of the model, in tokens.
func (m *Model) Context() int { return m.cfg.Context }

// Level returns the level in use.
func (m *Model) Level() string { return m.level }

// Close frees the model. It is safe to call more than once.
func (m *Model) Close() error {
	if m.back != nil {
		m.back.close()
		m.back = nil
		m.embed = embedding{}
	}
	runtime.KeepAlive(m)
	return nil
}

// Forward computes the given tokens: it writes their keys and values into the
// pages of their sequences and fills in the logits that are wanted. Two spans
// of one call must not be of the same sequence. Everything is checked before
// anything is written; an error means that nothing was, except where pages
// were taken away between two slices of a call that is longer than MaxRows:
// then Wrote says how far it came.
func (m *Model) Forward(spans []Span) error {
	if m.back == nil {
		return ErrClosed
	}
	for i := range spans {
		spans[i].Wrote = 0
		if err := m.check(&spans[i]); err != nil {
			return fmt.Errorf("span %d: %w", i, err)
		}
	}
	// Rows are taken from the spans in order until a slice is full.
	for s, at := 0, 0; s < len(spans); {
		m.batch.reset()
		first, firstAt := s, at
		for s < len(spans) && len(m.batch.pos) < m.maxRows {
			n := min(len(spans[s].Tokens)-at, m.maxRows-len(m.batch.pos))
			if err := m.add(&spans[s], at, n); err != nil {
				return fmt.Errorf("span %d: %w", s, err)
			}
			if at += n; at == len(spans[s].Tokens) {
				s, at = s+1, 0
			}
		}
		m.back.forward(&m.batch)
		m.deliver(spans, first, firstAt)
		m.wipe(len(m.batch.pos))
	}
	return nil
}

// wipe overwrites what a pass over so many rows left in scratch.
func (m *Model) wipe(rows int) {
	m.scratch = m.back.scratch(m.scratch[:0], rows)
	for _, b := range m.scratch {
		clear(b)
	}
}

func (m *Model) check(s *Span) error {
	switch {
	case len(s.Tokens) == 0:
		return fmt.Errorf("%w: no tokens", ErrSpan)
	case s.Pos < 0 || s.Pos > m.cfg.Context-len(s.Tokens):
		return fmt.Errorf("%w: positions %d to %d of a window of %d", ErrSpan, s.Pos, s.Pos+len(s.Tokens), m.cfg.Context)
	case s.Logits != nil && len(s.Logits) != m.vocab:
		return fmt.Errorf("%w: room for %d logits of %d", ErrSpan, len(s.Logits), m.vocab)
	case s.Pages == nil:
		return fmt.Errorf("%w: no pages", ErrSpan)
	}
	for _, t := range s.Tokens {
		if t < 0 || int(t) >= m.vocab {
			return fmt.Errorf("%w: a token is not of this vocabulary", ErrSpan)
		}
	}
	addrs, err := s.Pages.Resolve(m.addrs[:0], s.Pos+len(s.Tokens))
	if err != nil {
		return err
	}
	m.addrs = addrs
	if len(addrs) != m.geometry.PagesFor(s.Pos+len(s.Tokens)) {
		return fmt.Errorf("%w: %d pages for %d positions", ErrSpan, len(addrs), s.Pos+len(s.Tokens))
	}
	return nil
}

// add puts n tokens of a span, from at on, into the batch.
func (m *Model) add(s *Span, at, n int) error {
	b := &m.batch
	addrs, err := s.Pages.Resolve(m.addrs[:0], s.Pos+at+n)
	if err != nil {
		return err
	}
	m.addrs = addrs
	seq := int32(len(b.first))
	b.first = append(b.first, int32(len(b.pages)))
	b.wrote = append(b.wrote, 0)
	for _, a := range addrs {
		b.pages = append(b.pages, uint64(a))
	}
	x, stride := m.back.x()
	for i := range n {
		row := len(b.pos)
		m.embed.row(x[row*stride:row*stride+m.cfg.Dim], int(s.Tokens[at+i]))
		b.pos = append(b.pos, int32(s.Pos+at+i))
		b.seq = append(b.seq, seq)
	}
	if s.Logits != nil && at+n == len(s.Tokens) {
		b.wants = append(b.wants, int32(len(b.pos)-1))
	}
	return nil
}

// deliver copies results to the spans of a pass.
func (m *Model) deliver(spans []Span, s, at int) {
	logits, stride := m.back.logits()
	want := 0
	for _, wrote := range m.batch.wrote {
		n := len(spans[s].Tokens) - at
		spans[s].Wrote += int(wrote)
		if want < len(m.batch.wants) && spans[s].Logits != nil && int(wrote) == n {
			copy(spans[s].Logits, logits[want*stride:want*stride+m.vocab])
			want++
		}
		s, at = s+1, 0
	}
}

// embedding is the table of token embeddings in file order.
type embedding struct {
	typ  gguf.Type
	dim  int
	data []byte
}

// row widens one row, exactly.
func (e *embedding) row(dst []float32, token int) {
	elems, bytes := e.typ.Block()
	n := e.dim / elems * bytes
	widen(e.typ, dst, e.data[token*n:(token+1)*n])
}
