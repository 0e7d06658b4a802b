package fabric

import (
	"encoding/binary"
	"fmt"
	"io"
)

// memoryID names one memory that pages lie in. Offsets mean nothing without it.
type memoryID [16]byte

// token is what a client shows once to be given a descriptor.
type token [32]byte

const (
	grantBytes  = 16 + 32 + 8 + 2
	offsetBytes = 8
	// maxPath is above the longest path that a unix socket can have.
	maxPath = 128
)

// grant answers a map request: what to show where.
type grant struct {
	mem   memoryID
	token token
	size  uint64
	path  string
}

func (g grant) append(b []byte) []byte {
	b = appendPreamble(b, uint16(statusOK))
	b = append(b, g.mem[:]...)
	b = append(b, g.token[:]...)
	b = binary.LittleEndian.AppendUint64(b, g.size)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(g.path)))
	return append(b, g.path...)
}

// readGrant reads the answer to a map request: ErrNotShared is one.
func readGrant(from io.Reader) (g grant, err error) {
	st, err := readPreamble(from)
	switch {
	case err != nil:
		return g, unexpected(err)
	case status(st) == statusNotShared:
		return g, ErrNotShared
	case status(st) != statusOK:
		return g, fmt.Errorf("%w: status %d", ErrProtocol, st)
	}
	var h [grantBytes]byte
	if _, err := io.ReadFull(from, h[:]); err != nil {
		return g, unexpected(err)
	}
	copy(g.mem[:], h[:])
	copy(g.token[:], h[16:])
	g.size = binary.LittleEndian.Uint64(h[48:])
	n := binary.LittleEndian.Uint16(h[56:])
	if g.size < 1 || g.size > 1<<62 || n < 1 || n > maxPath {
		return g, fmt.Errorf("%w: memory of %d bytes, path of %d", ErrProtocol, g.size, n)
	}
	path := make([]byte, n)
	if _, err := io.ReadFull(from, path); err != nil {
		return g, unexpected(err)
	}
	g.path = string(path)
	return g, nil
}

func appendLend(b []byte, mem memoryID, r readRequest) []byte {
	return r.appendBody(append(appendPreamble(b, kindLend), mem[:]...))
}

// appendLoan answers a lend request: the header of a read, and where the pages
// begin.
func appendLoan(b []byte, pageBytes int, offsets []int64) []byte {
	b = answerHeader{pageBytes: uint32(pageBytes), count: uint32(len(offsets))}.append(b)
	for _, at := range offsets {
		b = binary.LittleEndian.AppendUint64(b, uint64(at))
	}
	return b
}

// readOffsets reads where n pages begin. Each lies within size bytes.
func readOffsets(from io.Reader, n, pageBytes, size int) ([]int, error) {
	b := make([]byte, n*offsetBytes)
	if _, err := io.ReadFull(from, b); err != nil {
		return nil, unexpected(err)
	}
	at := make([]int, n)
	for i := range at {
		v := binary.LittleEndian.Uint64(b[i*offsetBytes:])
		if pageBytes > size || v > uint64(size-pageBytes) {
			return nil, fmt.Errorf("%w: page at %d in %d bytes", ErrProtocol, v, size)
		}
		at[i] = int(v)
	}
	return at, nil
}
