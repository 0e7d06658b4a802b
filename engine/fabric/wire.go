package fabric

import (
	"encoding/binary"
	"fmt"
	"io"

	"bulkhead.dev/infra/id"
)

const (
	wireMagic   = "BHKF"
	wireVersion = 1
	kindRead    = 1

	readHeaderBytes   = 4 + 2 + 2 + 16 + 32 + 4
	refBytes          = 4 + 8
	answerHeaderBytes = 4 + 2 + 2 + 4 + 4
	pageHeaderBytes   = 2 + 2 + 4 + 8

	// maxRefs bounds one exchange: 48 KiB of references. Clients split.
	maxRefs = 4096
	// maxPageBytes is above the largest page that a geometry could reasonably
	// have (128 layers of 8192 numbers of 4 bytes for 16 positions: 128 MiB).
	maxPageBytes = 1 << 28
)

type status uint16

const (
	statusOK status = iota
	statusRefused
	statusStale
	statusBad
	numStatus
)

func (s status) err() error {
	switch s {
	case statusOK:
		return nil
	case statusRefused:
		return ErrRefused
	case statusStale:
		return ErrStale
	}
	return ErrProtocol
}

type readRequest struct {
	transfer id.Transfer
	secret   Secret
	refs     []PageRef
}

func (r readRequest) append(b []byte) []byte {
	b = append(b, wireMagic...)
	b = binary.LittleEndian.AppendUint16(b, wireVersion)
	b = binary.LittleEndian.AppendUint16(b, kindRead)
	b = append(b, r.transfer[:]...)
	b = append(b, r.secret[:]...)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(r.refs)))
	for _, p := range r.refs {
		b = binary.LittleEndian.AppendUint32(b, p.Index)
		b = binary.LittleEndian.AppendUint64(b, p.Generation)
	}
	return b
}

// readReadRequest reads one request. io.EOF means that the peer closed the
// connection between two exchanges.
func readReadRequest(from io.Reader) (r readRequest, err error) {
	var h [readHeaderBytes]byte
	if _, err := io.ReadFull(from, h[:]); err != nil {
		return r, err
	}
	if err := checkPreamble(h[:]); err != nil {
		return r, err
	}
	if kind := binary.LittleEndian.Uint16(h[6:]); kind != kindRead {
		return r, fmt.Errorf("%w: kind %d", ErrProtocol, kind)
	}
	copy(r.transfer[:], h[8:])
	copy(r.secret[:], h[24:])
	n := binary.LittleEndian.Uint32(h[56:])
	if n < 1 || n > maxRefs {
		return r, fmt.Errorf("%w: %d pages in one exchange", ErrProtocol, n)
	}
	b := make([]byte, int(n)*refBytes)
	if _, err := io.ReadFull(from, b); err != nil {
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return r, err
	}
	r.refs = make([]PageRef, n)
	for i := range r.refs {
		r.refs[i] = PageRef{
			Index:      binary.LittleEndian.Uint32(b[i*refBytes:]),
			Generation: binary.LittleEndian.Uint64(b[i*refBytes+4:]),
		}
	}
	return r, nil
}

func checkPreamble(h []byte) error {
	if string(h[:4]) != wireMagic {
		return fmt.Errorf("%w: not a page stream", ErrProtocol)
	}
	if v := binary.LittleEndian.Uint16(h[4:]); v != wireVersion {
		return fmt.Errorf("%w: version %d, want %d", ErrProtocol, v, wireVersion)
	}
	return nil
}

type answerHeader struct {
	status           status
	pageBytes, count uint32
}

func (a answerHeader) append(b []byte) []byte {
	b = append(b, wireMagic...)
	b = binary.LittleEndian.AppendUint16(b, wireVersion)
	b = binary.LittleEndian.AppendUint16(b, uint16(a.status))
	b = binary.LittleEndian.AppendUint32(b, a.pageBytes)
	return binary.LittleEndian.AppendUint32(b, a.count)
}

func readAnswerHeader(from io.Reader) (a answerHeader, err error) {
	var h [answerHeaderBytes]byte
	if _, err := io.ReadFull(from, h[:]); err != nil {
		return a, err
	}
	if err := checkPreamble(h[:]); err != nil {
		return a, err
	}
	a.status = status(binary.LittleEndian.Uint16(h[6:]))
	a.pageBytes = binary.LittleEndian.Uint32(h[8:])
	a.count = binary.LittleEndian.Uint32(h[12:])
	switch {
	case a.status >= numStatus:
		return a, fmt.Errorf("%w: status %d", ErrProtocol, a.status)
	case a.status != statusOK && (a.count != 0 || a.pageBytes != 0):
		return a, fmt.Errorf("%w: a refusal with pages", ErrProtocol)
	case a.status == statusOK && (a.count < 1 || a.count > maxRefs || a.pageBytes < 1 || a.pageBytes > maxPageBytes):
		return a, fmt.Errorf("%w: %d pages of %d bytes", ErrProtocol, a.count, a.pageBytes)
	}
	return a, nil
}

type pageHeader struct {
	status status
	ref    PageRef
}

func (p pageHeader) append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint16(b, uint16(p.status))
	b = binary.LittleEndian.AppendUint16(b, 0)
	b = binary.LittleEndian.AppendUint32(b, p.ref.Index)
	return binary.LittleEndian.AppendUint64(b, p.ref.Generation)
}

func readPageHeader(from io.Reader) (p pageHeader, err error) {
	var h [pageHeaderBytes]byte
	if _, err := io.ReadFull(from, h[:]); err != nil {
		return p, err
	}
	p.status = status(binary.LittleEndian.Uint16(h[:]))
	p.ref = PageRef{Index: binary.LittleEndian.Uint32(h[4:]), Generation: binary.LittleEndian.Uint64(h[8:])}
	if p.status >= numStatus || binary.LittleEndian.Uint16(h[2:]) != 0 {
		return p, fmt.Errorf("%w: page header", ErrProtocol)
	}
	return p, nil
}
