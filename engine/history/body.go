package history

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"bulkhead.dev/engine/kv"
)

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

// encodeBody writes column after column: what is alike stands together.
func encodeBody(events []Event) []byte {
	var owners, leases dictionary
	for _, e := range events {
		owners.number(e.Owner)
		leases.number(e.Lease)
	}
	b := leases.append(owners.append(make([]byte, 0, 16*len(events))))
	for _, e := range events {
		b = append(b, byte(e.Kind))
	}
	for _, e := range events {
		b = append(b, byte(e.Reason)|byte(e.Method)<<4)
	}
	for _, e := range events {
		b = binary.AppendUvarint(b, owners.number(e.Owner))
	}
	for _, e := range events {
		b = binary.AppendUvarint(b, leases.number(e.Lease))
	}
	var page uint32
	for _, e := range events {
		b = binary.AppendVarint(b, int64(e.First)-int64(page))
		page = e.First
	}
	for _, e := range events {
		b = binary.AppendUvarint(b, uint64(e.Count))
	}
	var generation uint64
	for _, e := range events {
		b = binary.AppendVarint(b, int64(e.Generation-generation))
		generation = e.Generation
	}
	var at uint64
	for _, e := range events {
		b = binary.AppendUvarint(b, micros(e.At)-at)
		at = micros(e.At)
	}
	return b
}

// reader reads a body; the first error stays.
type reader struct {
	b   []byte
	err error
}

func (r *reader) fail() { r.err = errors.New("cut off, or a number that is too large"); r.b = nil }

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
	if n < 1 {
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

// decodeBody takes the one form that encodeBody writes, and nothing else.
func decodeBody(b []byte, h Header) ([]Event, error) {
	r := &reader{b: b}
	owners, leases := r.ids(), r.ids()
	events := make([]Event, h.Events)
	kinds, packed := r.bytes(len(events)), r.bytes(len(events))
	for i := range events {
		e := &events[i]
		e.Seq, e.Kind = h.FirstSeq+uint64(i), kv.EventKind(kinds[i])
		e.Reason, e.Method = kv.QuarantineReason(packed[i]&15), kv.ScrubMethod(packed[i]>>4)
		if e.Kind < kv.EventGrant || e.Kind > kv.EventClear || e.Reason > kv.WriterOpen || e.Method > kv.Ahead ||
			(e.Kind == kv.EventScrub) != (e.Method != kv.NotScrubbed) || e.Kind == kv.EventQuarantine && e.Reason == kv.NotQuarantined {
			return nil, fmt.Errorf("event %d: no such kind, reason or method", e.Seq)
		}
	}
	for i := range events {
		n := r.uvarint()
		if n >= uint64(len(owners)) {
			return nil, fmt.Errorf("event %d: no such owner", events[i].Seq)
		}
		events[i].Owner = owners[n]
	}
	for i := range events {
		n := r.uvarint()
		if n >= uint64(len(leases)) {
			return nil, fmt.Errorf("event %d: no such lease", events[i].Seq)
		}
		events[i].Lease = leases[n]
	}
	var page int64
	for i := range events {
		if page += r.varint(); page < 0 || page > math.MaxUint32 {
			return nil, fmt.Errorf("event %d: no such page", events[i].Seq)
		}
		events[i].First = uint32(page)
	}
	for i := range events {
		n := r.uvarint()
		if n < 1 || n > 1<<32-uint64(events[i].First) || n > math.MaxUint32 {
			return nil, fmt.Errorf("event %d: no such pages", events[i].Seq)
		}
		events[i].Count = uint32(n)
	}
	var generation uint64
	for i := range events {
		generation += uint64(r.varint())
		events[i].Generation = generation
	}
	var at uint64
	for i := range events {
		d := r.uvarint()
		if at += d; at > math.MaxInt64 || d > math.MaxInt64 {
			return nil, fmt.Errorf("event %d: no such time", events[i].Seq)
		}
		events[i].At = atMicros(at)
	}
	if r.err != nil {
		return nil, r.err
	}
	// Ids out of order, doubled or unused, longer numbers, trailing bytes.
	if !bytes.Equal(encodeBody(events), b) {
		return nil, errors.New("not the form that a writer gives it")
	}
	return events, nil
}
