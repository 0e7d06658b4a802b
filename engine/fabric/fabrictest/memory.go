package fabrictest

import (
	"fmt"
	"io"

	"bulkhead.dev/engine/fabric"
)

// Memory is a sink of plain memory, one slice for each page.
type Memory [][]byte

var _ fabric.Sink = Memory(nil)

// NewMemory makes a sink of so many pages.
func NewMemory(pages, pageBytes int) Memory {
	m := make(Memory, pages)
	for i := range m {
		m[i] = make([]byte, pageBytes)
	}
	return m
}

// PageBytes implements fabric.Sink.
func (m Memory) PageBytes() int {
	if len(m) == 0 {
		return 0
	}
	return len(m[0])
}

// Copy implements fabric.Sink.
func (m Memory) Copy(i int, page []byte) error {
	if len(page) != len(m[i]) {
		return fmt.Errorf("a page of %d bytes for %d bytes of memory", len(page), len(m[i]))
	}
	copy(m[i], page)
	return nil
}

// Read implements fabric.Sink.
func (m Memory) Read(i int, stream io.Reader) error {
	_, err := io.ReadFull(stream, m[i])
	return err
}

// Each is a sink that passes pages on to f, which may change them.
type Each struct {
	fabric.Sink
	// Page is called with each page as it comes; what it returns is stored in
	// its place, unless it returns an error.
	Page func(i int, page []byte) ([]byte, error)
}

// Copy implements fabric.Sink.
func (e Each) Copy(i int, page []byte) error {
	page, err := e.Page(i, append([]byte(nil), page...))
	if err != nil {
		return err
	}
	return e.Sink.Copy(i, page)
}

// Read implements fabric.Sink.
func (e Each) Read(i int, stream io.Reader) error {
	page := make([]byte, e.PageBytes())
	if _, err := io.ReadFull(stream, page); err != nil {
		return err
	}
	return e.Copy(i, page)
}
