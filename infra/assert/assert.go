// Package assert has the few checks that our tests repeat. Each stops the test
// that calls it and prints a difference, not two values.
package assert

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// Equal stops the test unless got and want are deeply equal.
func Equal[T any](t testing.TB, got, want T, opts ...cmp.Option) {
	t.Helper()
	if d := cmp.Diff(want, got, opts...); d != "" {
		t.Fatalf("not equal (-want +got):\n%s", d)
	}
}

// NoError stops the test if err is not nil.
func NoError(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("unexpected error: %v", err)
	}
}

// ErrorIs stops the test unless err wraps target.
func ErrorIs(t testing.TB, err, target error) {
	t.Helper()
	if !errors.Is(err, target) {
		t.Fatalf("error is %v, want one that wraps %v", err, target)
	}
}

// ErrorAs stops the test unless err holds a T, and returns it.
func ErrorAs[T error](t testing.TB, err error) T {
	t.Helper()
	e, ok := errors.AsType[T](err)
	if !ok {
		var zero T
		t.Fatalf("error is %v (%T), want a %T", err, err, zero)
	}
	return e
}

// True stops the test unless ok holds.
func True(t testing.TB, ok bool) {
	t.Helper()
	if !ok {
		t.Fatal("condition does not hold")
	}
}

// False stops the test if ok holds.
func False(t testing.TB, ok bool) {
	t.Helper()
	if ok {
		t.Fatal("condition holds, want it not to")
	}
}
