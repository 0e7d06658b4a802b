package sched

import (
	"errors"
	"fmt"
)

// Outcomes of admission. Nothing was reserved.
var (
	// ErrQueueFull: no slot is free and the queue is at its limit.
	ErrQueueFull = errors.New("queue is full")
	// ErrOwnerLimit: the owner has as many requests as it may have at once.
	ErrOwnerLimit = errors.New("owner is at its concurrency limit")
	// ErrDraining: the gate was closed.
	ErrDraining = errors.New("worker takes no new work")
)

// TooLargeError means that work needs more pages than the pool has, so waiting
// cannot help.
type TooLargeError struct{ Want, Have int }

func (e *TooLargeError) Error() string {
	return fmt.Sprintf("needs %d pages, the pool has %d", e.Want, e.Have)
}

// Outcomes of work that had started. Its pages are released.
var (
	// ErrCanceled: the run was closed before it had finished.
	ErrCanceled = errors.New("canceled")
	// ErrStopped: the loop ended before the work had finished.
	ErrStopped = errors.New("scheduler stopped")
	// ErrSlowConsumer: nobody took the text for longer than the limit.
	ErrSlowConsumer = errors.New("text was not taken in time")
	// ErrNotFinite: a step gave logits that are not finite numbers.
	ErrNotFinite = errors.New("step gave no finite logits")
	// ErrRecompute: the keys and values that this worker computed for the last
	// position of the prompt differ from those that it had pulled.
	ErrRecompute = errors.New("recomputed keys and values differ from those pulled")
	// ErrModel: the forward pass failed, or did not write the positions it was
	// asked to.
	ErrModel = errors.New("forward pass failed")
	// ErrPages: the pool refused the pages of a sequence.
	ErrPages = errors.New("pages of the sequence are not usable")
	// ErrRequest: the parameters of a run cannot be served.
	ErrRequest = errors.New("bad parameters")
)
