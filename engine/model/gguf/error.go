package gguf

import "fmt"

// FormatError reports a file that is not a well-formed GGUF file, or that goes
// over a limit of this reader.
type FormatError struct {
	// Offset is the position in the file, in bytes, at which reading stopped.
	Offset int64
	// Reason says what is wrong there.
	Reason string
	// Truncated is set where the file would be good if it were longer: the
	// usual trace of a broken download.
	Truncated bool
}

// Error implements error.
func (e *FormatError) Error() string {
	return fmt.Sprintf("gguf: at byte %d: %s", e.Offset, e.Reason)
}
