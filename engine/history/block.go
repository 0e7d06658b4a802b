package history

import (
	"bytes"
	"compress/flate"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"time"

	"bulkhead.dev/engine/kv"
	"bulkhead.dev/infra/id"
)

const (
	magic       = "BHKH"
	version     = 1
	flagGap     = 1
	headerBytes = 4 + 2 + 2 + 16 + 4*8 + 2*8 + 3*4 + 32 + 4

	// MaxEvents is how many events a block may have.
	MaxEvents = 1 << 14
	// maxBody bounds the body before it is deflated: no event takes more.
	maxBody = 2*(binary.MaxVarintLen64+MaxEvents*16) + MaxEvents*(2+6*binary.MaxVarintLen64)
	// MaxBlockBytes is above the size of any block; deflate adds little to what
	// it cannot make smaller.
	MaxBlockBytes = headerBytes + maxBody + maxBody/1000 + 64
)

// ErrBlock means that bytes are no block, or that blocks are no chain.
var ErrBlock = errors.New("bad block of page history")

// Event is an event and when it happened.
type Event struct {
	kv.Event
	At time.Time // to the microsecond
}

// Header is what a block says in front.
type Header struct {
	Epoch             id.Epoch
	Number            uint64 // from 1
	FirstSeq, LastSeq uint64
	// Granted is the highest generation that a grant in the block gave, 0 if there
	// is no grant in it.
	Granted          uint64
	FirstAt, LastAt  time.Time // zero in a gap
	MinPage, MaxPage uint32    // MinPage is above MaxPage in a gap
	Events           uint32
	Prev             [32]byte // hash of the block before, zero in the first
	// Gap means that the events of these sequence numbers were lost.
	Gap bool
}

// Hash identifies an encoded block.
func Hash(block []byte) [32]byte { return sha256.Sum256(block) }

func (h Header) append(b []byte, size int) []byte {
	le := binary.LittleEndian
	flags := uint16(0)
	if h.Gap {
		flags = flagGap
	}
	b = append(b, magic...)
	b = le.AppendUint16(b, version)
	b = le.AppendUint16(b, flags)
	b = append(b, h.Epoch[:]...)
	for _, v := range []uint64{h.Number, h.FirstSeq, h.LastSeq, h.Granted, micros(h.FirstAt), micros(h.LastAt)} {
		b = le.AppendUint64(b, v)
	}
	for _, v := range []uint32{h.MinPage, h.MaxPage, h.Events} {
		b = le.AppendUint32(b, v)
	}
	b = append(b, h.Prev[:]...)
	return le.AppendUint32(b, uint32(size))
}

func micros(t time.Time) uint64 {
	if t.IsZero() {
		return 0
	}
	return uint64(t.UnixMicro())
}

func atMicros(v uint64) time.Time {
	if v == 0 {
		return time.Time{}
	}
	return time.UnixMicro(int64(v)).UTC()
}

// describe makes the header of a block of events, without the place in the chain.
func describe(events []Event) Header {
	h := Header{
		FirstSeq: events[0].Seq, LastSeq: events[len(events)-1].Seq, FirstAt: events[0].At, LastAt: events[len(events)-1].At,
		MinPage: math.MaxUint32, Events: uint32(len(events)),
	}
	for _, e := range events {
		h.MinPage = min(h.MinPage, e.First)
		h.MaxPage = max(h.MaxPage, e.First+e.Count-1)
		if e.Kind == kv.EventGrant {
			h.Granted = max(h.Granted, e.Generation)
		}
	}
	return h
}

// encode makes a block. events are consecutive and not empty, and their times do
// not go back.
func encode(epoch id.Epoch, number uint64, prev [32]byte, events []Event) []byte {
	h := describe(events)
	h.Epoch, h.Number, h.Prev = epoch, number, prev
	body := encodeBody(events)
	out := bytes.NewBuffer(h.append(make([]byte, 0, headerBytes+len(body)/2), len(body)))
	w, err := flate.NewWriter(out, flate.BestSpeed)
	if err == nil {
		_, err = w.Write(body)
	}
	if err == nil {
		err = w.Close()
	}
	if err != nil { // the level is valid, and a buffer does not fail
		panic(err)
	}
	return out.Bytes()
}

// encodeGap makes a block that says which events were lost.
func encodeGap(epoch id.Epoch, number uint64, prev [32]byte, first, last uint64) []byte {
	return Header{Epoch: epoch, Number: number, FirstSeq: first, LastSeq: last, MinPage: math.MaxUint32, Prev: prev, Gap: true}.append(nil, 0)
}

// DecodeHeader reads what a block says in front.
func DecodeHeader(b []byte) (h Header, err error) {
	h, _, err = decodeHeader(b)
	return h, err
}

func decodeHeader(b []byte) (h Header, size int, err error) {
	if len(b) < headerBytes || len(b) > MaxBlockBytes {
		return h, 0, fmt.Errorf("%w: %d bytes", ErrBlock, len(b))
	}
	le := binary.LittleEndian
	if string(b[:4]) != magic || le.Uint16(b[4:]) != version || le.Uint16(b[6:]) > flagGap {
		return h, 0, fmt.Errorf("%w: not of version %d", ErrBlock, version)
	}
	h.Gap = le.Uint16(b[6:]) == flagGap
	copy(h.Epoch[:], b[8:])
	h.Number, h.FirstSeq, h.LastSeq = le.Uint64(b[24:]), le.Uint64(b[32:]), le.Uint64(b[40:])
	h.Granted = le.Uint64(b[48:])
	firstAt, lastAt := le.Uint64(b[56:]), le.Uint64(b[64:])
	h.FirstAt, h.LastAt = atMicros(firstAt), atMicros(lastAt)
	h.MinPage, h.MaxPage, h.Events = le.Uint32(b[72:]), le.Uint32(b[76:]), le.Uint32(b[80:])
	copy(h.Prev[:], b[84:])
	size = int(le.Uint32(b[116:]))
	switch {
	case h.Number < 1 || h.FirstSeq < 1 || h.LastSeq < h.FirstSeq:
		return h, 0, fmt.Errorf("%w: block %d with events %d to %d", ErrBlock, h.Number, h.FirstSeq, h.LastSeq)
	case firstAt > math.MaxInt64 || lastAt > math.MaxInt64 || lastAt < firstAt:
		return h, 0, fmt.Errorf("%w: a time that is none", ErrBlock)
	case h.Gap && (len(b) != headerBytes || size != 0 || h.Events != 0 || h.Granted != 0 || firstAt != 0 || lastAt != 0 || h.MinPage != math.MaxUint32 || h.MaxPage != 0):
		return h, 0, fmt.Errorf("%w: a gap with something in it", ErrBlock)
	case !h.Gap && (h.Events < 1 || h.Events > MaxEvents || uint64(h.Events) != h.LastSeq-h.FirstSeq+1 || h.MinPage > h.MaxPage || size < 1 || size > maxBody):
		return h, 0, fmt.Errorf("%w: %d events from %d to %d in %d bytes", ErrBlock, h.Events, h.FirstSeq, h.LastSeq, size)
	}
	return h, size, nil
}

// Decode reads a block whole. Every error is an ErrBlock.
func Decode(b []byte) (Header, []Event, error) {
	h, size, err := decodeHeader(b)
	if err != nil || h.Gap {
		return h, nil, err
	}
	rest := bytes.NewReader(b[headerBytes:])
	r := flate.NewReader(rest)
	body := make([]byte, size)
	if _, err := io.ReadFull(r, body); err != nil {
		return h, nil, fmt.Errorf("%w: body: %w", ErrBlock, err)
	}
	if n, err := r.Read(make([]byte, 1)); n != 0 || err != io.EOF || rest.Len() != 0 {
		return h, nil, fmt.Errorf("%w: the body does not end where it should", ErrBlock)
	}
	events, err := decodeBody(body, h)
	if err != nil {
		return h, nil, fmt.Errorf("%w: %w", ErrBlock, err)
	}
	want := describe(events)
	want.Epoch, want.Number, want.Prev = h.Epoch, h.Number, h.Prev
	if want != h {
		return h, nil, fmt.Errorf("%w: the events are not those that the header tells of", ErrBlock)
	}
	return h, events, nil
}

// Link is a place in a chain of blocks: after one of them. The zero Link is before the
// first.
type Link struct {
	Number, LastSeq uint64
	Hash            [32]byte
}

// Next checks that a block is the next one of the epoch and returns the link
// that it makes. Every error is an ErrBlock.
func (l Link) Next(epoch id.Epoch, block []byte) (Header, Link, error) {
	h, _, err := Decode(block)
	if err != nil {
		return h, l, err
	}
	if h.Epoch != epoch || h.Number != l.Number+1 || h.FirstSeq != l.LastSeq+1 || h.Prev != l.Hash {
		return h, l, fmt.Errorf("%w: block %d with events from %d on does not follow on block %d with events up to %d",
			ErrBlock, h.Number, h.FirstSeq, l.Number, l.LastSeq)
	}
	return h, Link{h.Number, h.LastSeq, Hash(block)}, nil
}
