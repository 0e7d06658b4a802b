package fabric

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"bulkhead.dev/infra/id"
)

const (
	wireMagic   = "BHKF"
	wireVersion = 2

	kindRead = 1 // send me pages
	kindMap  = 2 // let me map the memory that pages lie in
	kindLend = 3 // hold pages open while I copy them out of that memory
	kindDone = 4 // I do not look at them any more

	preambleBytes     = 4 + 2 + 2
	readHeaderBytes   = preambleBytes + 16 + 32 + 4
	refBytes          = 4 + 8
	answerHeaderBytes = 4 + 2 + 2 + 4 + 4
	pageHeaderBytes   = 2 + 2 + 4 + 8

	// maxRefs bounds one exchange: 48 KiB of references. Clients split.
	maxRefs = 4096
	// maxLent bounds the pages that one connection can hold open in memory. It
	// is few enough that a reader that stands still costs little, and many
	// enough that asking takes no time beside copying.
	maxLent = 64
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
	statusNotShared
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
	case statusNotShared:
		return ErrNotShared
	}
	return ErrProtocol
}

func appendPreamble(b []byte, kind uint16) []byte {
	b = append(b, wireMagic...)
	b = binary.LittleEndian.AppendUint16(b, wireVersion)
	return binary.LittleEndian.AppendUint16(b, kind)
}

// readPreamble reads what every request begins with and returns its kind.
// io.EOF means that the peer closed the connection between two exchanges.
func readPreamble(from io.Reader) (kind uint16, err error) {
	var h [preambleBytes]byte
	if _, err := io.ReadFull(from, h[:]); err != nil {
		return 0, err
	}
	if err := checkPreamble(h[:]); err != nil {
		return 0, err
	}
	return binary.LittleEndian.Uint16(h[6:]), nil
}

// request is any request but done, which has no body.
type request struct {
	kind uint16
	read readRequest // read and lend
	mem  memoryID    // lend: the memory that the client has mapped
}

// readBody reads the body of a request of the given kind.
func readBody(from io.Reader, kind uint16) (r request, err error) {
	r.kind = kind
	limit := maxRefs
	switch kind {
	case kindMap:
		return r, nil
	case kindLend:
		limit = maxLent
		if _, err := io.ReadFull(from, r.mem[:]); err != nil {
			return r, unexpected(err)
		}
	case kindRead:
	default:
		return r, fmt.Errorf("%w: kind %d", ErrProtocol, kind)
	}
	r.read, err = readReadBody(from, limit)
	return r, err
}

type readRequest struct {
	transfer id.Transfer
	secret   Secret
	refs     []PageRef
}

func (r readRequest) append(b []byte) []byte { return r.appendBody(appendPreamble(b, kindRead)) }

func (r readRequest) appendBody(b []byte) []byte {
	b = append(b, r.transfer[:]...)
	b = append(b, r.secret[:]...)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(r.refs)))
	for _, p := range r.refs {
		b = binary.LittleEndian.AppendUint32(b, p.Index)
		b = binary.LittleEndian.AppendUint64(b, p.Generation)
	}
	return b
}

func readReadBody(from io.Reader, limit int) (r readRequest, err error) {
	var h [readHeaderBytes - preambleBytes]byte
	if _, err := io.ReadFull(from, h[:]); err != nil {
		return r, unexpected(err)
	}
	copy(r.transfer[:], h[:])
	copy(r.secret[:], h[16:])
	n := binary.LittleEndian.Uint32(h[48:])
	if n < 1 || n > uint32(limit) {
		return r, fmt.Errorf("%w: %d pages in one exchange", ErrProtocol, n)
	}
	b := make([]byte, int(n)*refBytes)
	if _, err := io.ReadFull(from, b); err != nil {
		return r, unexpected(err)
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

// unexpected is for the middle of a message, where nothing may end.
func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
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
