package fabric

import (
	"bufio"
	"encoding/binary"
	"net"
)

const (
	// recordHeader is the size of the header of a TLS record; its last two bytes
	// are the length of what follows.
	recordHeader = 5
	// readAhead is how much of a stream is read at once: some records, of which
	// each would otherwise take two reads.
	readAhead = 64 << 10
)

// records is the connection below TLS of a client. Package crypto/tls decrypts a
// record where it was read to, and keeps that memory with the connection: up to
// the size of a record of somebody's pages would outlive the exchange, and the
// pages themselves. So records remembers where the bodies of records went, and
// overwrites them when they were used up: when the next record is asked for, and
// at the end of an exchange.
//
// It gives out one record at a time and never a part of the next, so that TLS
// has no reason to move what it has in memory. What is read ahead here is still
// encrypted. It belongs to whoever reads the connection.
type records struct {
	net.Conn
	ahead  *bufio.Reader
	header [recordHeader]byte
	got    int      // bytes of the header
	left   int      // bytes of the body that were not given out
	bodies [][]byte // where the rest went
}

func newRecords(c net.Conn) *records {
	return &records{Conn: c, ahead: bufio.NewReaderSize(c, readAhead)}
}

func (r *records) Read(p []byte) (n int, err error) {
	if r.left == 0 {
		r.wipe()
		n, err = r.ahead.Read(p[:min(len(p), recordHeader-r.got)])
		r.got += copy(r.header[r.got:], p[:n])
		if r.got == recordHeader {
			r.got, r.left = 0, int(binary.BigEndian.Uint16(r.header[3:]))
		}
		return n, err
	}
	n, err = r.ahead.Read(p[:min(len(p), r.left)])
	r.left -= n
	r.bodies = append(r.bodies, p[:n])
	return n, err
}

// wipe overwrites the bodies of the records that were given out. What they held
// must have been used up.
func (r *records) wipe() {
	for _, b := range r.bodies {
		clear(b)
	}
	clear(r.bodies)
	r.bodies = r.bodies[:0]
}
