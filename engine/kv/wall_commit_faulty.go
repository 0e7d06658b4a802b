//go:build faulty

package kv

import "io"

// BlindSink takes pages into memory, without digests. A release has no such
// thing.
type BlindSink struct{ Memory []byte }

// PageBytes implements the sink of package fabric.
func (s BlindSink) PageBytes() int { return len(s.Memory) }

// Copy implements the sink of package fabric.
func (s BlindSink) Copy(_ int, page []byte) error {
	copy(s.Memory, page)
	return nil
}

// Read implements the sink of package fabric.
func (s BlindSink) Read(_ int, stream io.Reader) error {
	_, err := io.ReadFull(stream, s.Memory)
	return err
}

// ReceiveBlindly takes in pages without digests, into the first pages of the
// landing. A release has no such thing.
func (l *Landing) ReceiveBlindly(pages int, read func(i int, memory []byte)) {
	for i := range pages {
		read(i, l.h.pool.bytes(l.h.refs[i].Index))
	}
}

// CommitBlindly makes a sequence out of whatever lies in the pages that were
// granted, as the decode leg of the incident did: the whole reservation counts
// as written. A release has no such thing.
func (l *Landing) CommitBlindly(tokens int) *Sequence {
	h, p := l.h, l.h.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, r := range h.refs {
		if i == len(h.refs)-1 {
			p.step(r.Index, OpAdopt)
			continue
		}
		p.step(r.Index, OpCommit)
	}
	h.length, h.decode = tokens, true
	h.phase++
	return &Sequence{handle{h, h.phase}}
}
