package fabric

import (
	"io"

	"bulkhead.dev/engine/mem"
)

// windowBytes is how much of a stream a client reads at once: few calls, and the
// bytes are in the second-level cache when they are stored and digested in one
// pass. Storing them from there costs less than letting the kernel copy them to
// where they belong, and reading them again.
const windowBytes = 256 << 10

// window is the part of a stream that was read and not yet used. Wipe it.
type window struct {
	from io.Reader
	buf  []byte
	r, w int // buf[r:w] is still to be used
	// failed tells whether the stream failed, as opposed to who uses it.
	failed bool
}

var _ mem.Source = (*window)(nil)

// newWindow makes a window for a message of so many bytes, and a little more, so
// that it shows if more comes.
func newWindow(from io.Reader, bytes int) *window {
	return &window{from: from, buf: make([]byte, min(bytes+2*mem.Line, windowBytes))}
}

// fill reads more behind what is left.
func (v *window) fill() error {
	v.w = copy(v.buf, v.buf[v.r:v.w])
	v.r = 0
	n, err := v.from.Read(v.buf[v.w:])
	if v.w += n; n > 0 {
		return nil // an error comes again
	}
	if err == nil {
		err = io.ErrNoProgress
	}
	v.failed = true
	return err
}

// Read implements io.Reader.
func (v *window) Read(b []byte) (int, error) {
	if v.r == v.w {
		if err := v.fill(); err != nil {
			return 0, err
		}
	}
	n := copy(b, v.buf[v.r:v.w])
	v.r += n
	return n, nil
}

// Next implements mem.Source.
func (v *window) Next(n int) ([]byte, error) {
	for v.w-v.r < mem.Line {
		if err := v.fill(); err != nil {
			return nil, err
		}
	}
	n = min(n, (v.w-v.r)/mem.Line*mem.Line)
	b := v.buf[v.r : v.r+n : v.r+n]
	v.r += n
	return b, nil
}

// left tells how many bytes were read and not used.
func (v *window) left() int { return v.w - v.r }

// wipe overwrites what was read.
func (v *window) wipe() { clear(v.buf) }
