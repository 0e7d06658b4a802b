//go:build !unix

package gguf

import (
	"fmt"
	"os"
)

// Open reads the file at path into memory. The error is a *FormatError where
// the content is at fault. The caller closes the File.
func Open(path string) (*File, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("open model: %w", err)
	}
	return Parse(b)
}
