//go:build unix

package gguf

import (
	"errors"
	"fmt"
	"os"
	"syscall"
)

// Open maps the file at path and reads its metadata. The error is a
// *FormatError where the content is at fault. The caller closes the File.
func Open(path string) (*File, error) {
	h, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open model: %w", err)
	}
	defer h.Close() // the mapping outlives the descriptor
	info, err := h.Stat()
	if err != nil {
		return nil, fmt.Errorf("open model: %w", err)
	}
	size := info.Size()
	if !info.Mode().IsRegular() || size == 0 || int64(int(size)) != size {
		return nil, &FormatError{Reason: "not a regular file with content"}
	}
	b, err := syscall.Mmap(int(h.Fd()), 0, int(size), syscall.PROT_READ, syscall.MAP_PRIVATE)
	if err != nil {
		return nil, fmt.Errorf("map model: %w", err)
	}
	f, err := Parse(b)
	if err != nil {
		return nil, errors.Join(err, syscall.Munmap(b))
	}
	f.unmap = func() error {
		if err := syscall.Munmap(b); err != nil {
			return fmt.Errorf("unmap model: %w", err)
		}
		return nil
	}
	return f, nil
}
