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
	headerBytes = 4 + 2 + 2 + 16 + 3*8 + 2*8 + 3*4 + 32 + 4

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
	FirstAt, LastAt   time.Time // zero in a gap
	MinPage, MaxPage  uint32    // MinPage is above MaxPage in a gap
	Events            uint32
	Prev              [32]byte // hash of the block before, zero in the first
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
	for _, v := range []uint64{h.Number, h.FirstSeq, h.LastSeq, micros(h.FirstAt), micros(h.LastAt)} {
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

// encode makes a block. events are consecutive and not empty.
func encode(epoch id.Epoch, number uint64, prev [32]byte, events []Event) []byte {
	h := Header{
		Epoch: epoch, Number: number, FirstSeq: events[0].Seq, LastSeq: events[len(events)-1].Seq,
		FirstAt: events[0].At, LastAt: events[len(events)-1].At, MinPage: math.MaxUint32, Events: uint32(len(events)), Prev: prev,
	}
	for _, e := range events {
		h.MinPage = min(h.MinPage, e.First)
		h.MaxPage = max(h.MaxPage, e.First+e.Count-1)
	}
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

// dictionary gives the ids that occur a number, in order of appearance.
type dictionary struct {
	at  map[[16]byte]uint64
	ids [][16]byte
}

func (d *dictionary) number(v [16]byte) uint64 {
	n, ok := d.at[v]
	if !ok {
		if d.at == nil {
			d.at = map[[16]byte]uint64{}
		}
		n = uint64(len(d.ids))
		d.at[v] = n
		d.ids = append(d.ids, v)
	}
	return n
}

func (d *dictionary) append(b []byte) []byte {
	b = binary.AppendUvarint(b, uint64(len(d.ids)))
	for _, v := range d.ids {
		b = append(b, v[:]...)
	}
	return b
}

func encodeBody(events []Event) []byte {
	var owners, leases dictionary
	var rows []byte
	var page uint32
	var generation, at uint64
	for _, e := range events {
		rows = append(rows, byte(e.Kind), byte(e.Reason)|byte(e.Method)<<4)
		rows = binary.AppendUvarint(rows, owners.number(e.Owner))
		rows = binary.AppendUvarint(rows, leases.number(e.Lease))
		rows = binary.AppendVarint(rows, int64(e.First)-int64(page))
		rows = binary.AppendUvarint(rows, uint64(e.Count))
		rows = binary.AppendVarint(rows, int64(e.Generation-generation))
		rows = binary.AppendVarint(rows, int64(micros(e.At)-at))
		page, generation, at = e.First, e.Generation, micros(e.At)
	}
	return append(leases.append(owners.append(nil)), rows...)
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
	firstAt, lastAt := le.Uint64(b[48:]), le.Uint64(b[56:])
	h.FirstAt, h.LastAt = atMicros(firstAt), atMicros(lastAt)
	h.MinPage, h.MaxPage, h.Events = le.Uint32(b[64:]), le.Uint32(b[68:]), le.Uint32(b[72:])
	copy(h.Prev[:], b[76:])
	size = int(le.Uint32(b[108:]))
	switch {
	case h.Number < 1 || h.FirstSeq < 1 || h.LastSeq < h.FirstSeq:
		return h, 0, fmt.Errorf("%w: block %d with events %d to %d", ErrBlock, h.Number, h.FirstSeq, h.LastSeq)
	case firstAt > math.MaxInt64 || lastAt > math.MaxInt64:
		return h, 0, fmt.Errorf("%w: a time that is none", ErrBlock)
	case h.Gap && (len(b) != headerBytes || size != 0 || h.Events != 0 || firstAt != 0 || lastAt != 0 || h.MinPage != math.MaxUint32 || h.MaxPage != 0):
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
	lo, hi := uint32(math.MaxUint32), uint32(0)
	for _, e := range events {
		lo, hi = min(lo, e.First), max(hi, e.First+e.Count-1)
	}
	if lo != h.MinPage || hi != h.MaxPage || !events[0].At.Equal(h.FirstAt) || !events[len(events)-1].At.Equal(h.LastAt) {
		return h, nil, fmt.Errorf("%w: the events are not those that the header tells of", ErrBlock)
	}
	return h, events, nil
}

// reader reads a body; the first error stays.
type reader struct {
	b   []byte
	err error
}

func (r *reader) fail() { r.err = errors.New("cut off, or not the shortest form"); r.b = nil }

func (r *reader) bytes(n int) []byte {
	if len(r.b) < n {
		r.fail()
		return make([]byte, n)
	}
	out := r.b[:n]
	r.b = r.b[n:]
	return out
}

func (r *reader) uvarint() uint64 {
	v, n := binary.Uvarint(r.b)
	if n < 1 || n > 1 && r.b[n-1] == 0 {
		r.fail()
		return 0
	}
	r.b = r.b[n:]
	return v
}

func (r *reader) varint() int64 {
	u := r.uvarint()
	return int64(u>>1) ^ -int64(u&1)
}

func (r *reader) ids() (out [][16]byte) {
	n := r.uvarint()
	if n < 1 || n > MaxEvents || r.err != nil {
		r.fail()
		return nil
	}
	for range n {
		out = append(out, [16]byte(r.bytes(16)))
	}
	return out
}

func decodeBody(b []byte, h Header) ([]Event, error) {
	r := &reader{b: b}
	owners, leases := r.ids(), r.ids()
	events := make([]Event, 0, h.Events)
	var page int64
	var generation, at uint64
	for i := range uint64(h.Events) {
		kind, packed := r.bytes(1)[0], r.bytes(1)[0]
		owner, lease := r.uvarint(), r.uvarint()
		page += r.varint()
		count := r.uvarint()
		generation += uint64(r.varint())
		at += uint64(r.varint())
		if r.err != nil {
			return nil, r.err
		}
		e := Event{Event: kv.Event{
			Seq: h.FirstSeq + i, Kind: kv.EventKind(kind), First: uint32(page), Count: uint32(count), Generation: generation,
			Reason: kv.QuarantineReason(packed & 15), Method: kv.ScrubMethod(packed >> 4),
		}, At: atMicros(at)}
		if owner >= uint64(len(owners)) || lease >= uint64(len(leases)) || page < 0 || page > math.MaxUint32 || count < 1 ||
			uint64(page)+count > 1<<32 || kind < byte(kv.EventGrant) || kind > byte(kv.EventClear) || at > math.MaxInt64 {
			return nil, fmt.Errorf("event %d is none", e.Seq)
		}
		e.Owner, e.Lease = owners[owner], leases[lease]
		events = append(events, e)
	}
	if len(r.b) != 0 {
		return nil, errors.New("something follows the last event")
	}
	return events, nil
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
