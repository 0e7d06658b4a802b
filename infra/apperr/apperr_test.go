package apperr_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/assert"
)

func TestCauseStaysInside(t *testing.T) {
	t.Parallel()
	cause := errors.New("pq: the prompt was hunter2")
	err := apperr.Wrap(cause, apperr.Unavailable, "key_check_unavailable", "The key cannot be checked now.")
	assert.False(t, strings.Contains(fmt.Sprintf("%v %+v %s", err, err, err), "hunter2"))
	assert.ErrorIs(t, err, cause)
}

func TestFrom(t *testing.T) {
	t.Parallel()
	own := apperr.New(apperr.Invalid, "x", "y")
	assert.True(t, apperr.From(nil) == nil)
	assert.True(t, apperr.From(fmt.Errorf("outer: %w", own)) == own)
	assert.Equal(t, apperr.From(fmt.Errorf("read: %w", context.Canceled)).Kind, apperr.Canceled)
	assert.Equal(t, apperr.From(context.DeadlineExceeded).Kind, apperr.Deadline)
	assert.Equal(t, apperr.From(errors.New("boom")).Kind, apperr.Internal)
}
