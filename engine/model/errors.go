package model

import (
	"errors"
	"fmt"
)

var (
	// ErrUnsupported reports a model that is sound but has a part that
	// Bulkhead does not compute. The message names the part.
	ErrUnsupported = errors.New("model is not supported")
	// ErrInvalid reports a model file that contradicts itself or lacks a part.
	ErrInvalid = errors.New("model is not valid")
)

func unsupported(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrUnsupported, fmt.Sprintf(format, args...))
}

func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrInvalid, fmt.Sprintf(format, args...))
}
