package id_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
)

func TestRequestRoundTrip(t *testing.T) {
	t.Parallel()
	now := time.UnixMilli(1_764_550_000_123).UTC()
	r := id.NewRequest(now)
	got, err := id.ParseRequest(r.String())
	assert.NoError(t, err)
	assert.Equal(t, got, r)
	assert.Equal(t, r.Time(), now)
	assert.True(t, strings.HasPrefix(r.Receipt().String(), "rcp_"))
	assert.Equal(t, r.Receipt().String()[4:], r.String()[4:])
}

func TestParseRefuses(t *testing.T) {
	t.Parallel()
	good := id.NewRequest(time.Now()).String()
	for name, s := range map[string]string{
		"empty":        "",
		"other kind":   "key_" + good[4:],
		"short":        good[:len(good)-1],
		"long":         good + "0",
		"lower case":   "req_" + strings.ToLower("01ARZ3NDEKTSV4RRFFQ69G5FAV"),
		"look-alike":   "req_" + "O1ARZ3NDEKTSV4RRFFQ69G5FAV",
		"out of range": "req_8ZZZZZZZZZZZZZZZZZZZZZZZZZ",
		"not base 32":  "req_01ARZ3NDEKTSV4RRFFQ69G5F-V",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := id.ParseRequest(s)
			assert.True(t, errors.Is(err, id.ErrMalformed))
		})
	}
}

func FuzzParse(f *testing.F) {
	f.Add("req_01ARZ3NDEKTSV4RRFFQ69G5FAV")
	f.Add("req_")
	f.Fuzz(func(t *testing.T, s string) {
		r, err := id.ParseRequest(s)
		if err == nil && r.String() != s {
			t.Fatalf("two texts for one id: %q and %q", s, r.String())
		}
	})
}

// Two ids of one millisecond must differ in their random part and not count up.
func TestNotMonotonic(t *testing.T) {
	t.Parallel()
	now := time.Now()
	seen := map[id.Request]bool{}
	for range 1000 {
		r := id.NewRequest(now)
		assert.False(t, seen[r])
		seen[r] = true
	}
}

func TestFromBytes(t *testing.T) {
	t.Parallel()
	_, err := id.FromBytes[id.Lease](make([]byte, 15))
	assert.True(t, errors.Is(err, id.ErrMalformed))
	l := id.NewLease()
	got, err := id.FromBytes[id.Lease](l[:])
	assert.NoError(t, err)
	assert.Equal(t, got, l)
}
