package replica_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/infra/pgdb/pgtest"
	"bulkhead.dev/infra/replica"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

type clock struct{ ahead atomic.Int64 }

func (c *clock) now() time.Time { return time.Now().Add(time.Duration(c.ahead.Load())) }

func join(t *testing.T, b *pgtest.Bundle, c *clock, recover func(context.Context, id.Epoch) error) *replica.Member {
	t.Helper()
	m, err := replica.Join(t.Context(), replica.Options{DB: b.Pools.Settle, Epoch: id.NewEpoch(time.Now()), Build: "test", Now: c.now, Recover: recover})
	assert.NoError(t, err)
	return m
}

// A replica stops using what it holds before anybody can take it, by its own
// clock, and uses it again when it has renewed in time.
func TestFence(t *testing.T) {
	t.Parallel()
	b := pgtest.New(t)
	var c clock
	m := join(t, b, &c, nil)
	assert.False(t, m.Fenced())
	c.ahead.Store(int64(replica.FenceAfter / 2))
	assert.False(t, m.Fenced())
	c.ahead.Store(int64(replica.FenceAfter))
	assert.True(t, m.Fenced())
	assert.NoError(t, m.Renew(t.Context())) // nobody had declared it dead
	assert.False(t, m.Fenced())
	assert.True(t, replica.FenceAfter+replica.RenewEvery <= replica.LeaseFor)
	live, err := m.Live(t.Context())
	assert.NoError(t, err)
	assert.Equal(t, live, []id.Epoch{m.Epoch()})
	assert.NoError(t, m.Leave(t.Context()))
	assert.True(t, m.Fenced())
	assert.ErrorIs(t, m.Renew(t.Context()), replica.ErrEnded)
}

// One survivor recovers a dead replica, again and again until that works, and
// the dead one finds out if it was not dead.
func TestRecovery(t *testing.T) {
	t.Parallel()
	b := pgtest.New(t)
	var c clock
	var calls atomic.Int64
	dead := join(t, b, &c, nil)
	survivor := join(t, b, &c, func(_ context.Context, ended id.Epoch) error {
		assert.Equal(t, ended, dead.Epoch())
		if calls.Add(1) == 1 {
			return errors.New("a worker does not answer")
		}
		return nil
	})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- survivor.Run(ctx) }()
	_, err := b.Admin(t).Exec(t.Context(), "UPDATE replica SET lease_until = now() - interval '1 second' WHERE epoch = $1", [16]byte(dead.Epoch()))
	assert.NoError(t, err)
	// The survivor has not been here for long enough.
	time.Sleep(1500 * time.Millisecond)
	assert.Equal(t, calls.Load(), 0)
	for _, ahead := range []time.Duration{replica.LeaseFor / 2, replica.LeaseFor} { // without a pause
		c.ahead.Store(int64(ahead))
		assert.NoError(t, survivor.Renew(t.Context()))
	}
	for calls.Load() < 2 {
		time.Sleep(20 * time.Millisecond)
	}
	var recovered bool
	for !recovered {
		assert.NoError(t, b.Pools.Settle.QueryRow(t.Context(), "SELECT recovered_at IS NOT NULL FROM replica WHERE epoch = $1", [16]byte(dead.Epoch())).Scan(&recovered))
	}
	assert.ErrorIs(t, dead.Renew(t.Context()), replica.ErrEnded)
	cancel()
	assert.NoError(t, <-done)
	assert.Equal(t, calls.Load(), 2)
}

// After an outage nobody is declared dead before it could have renewed.
func TestNobodyIsDeclaredDeadAfterAnOutage(t *testing.T) {
	t.Parallel()
	b := pgtest.New(t)
	var c clock
	var calls atomic.Int64
	other := join(t, b, &c, nil)
	m := join(t, b, &c, func(context.Context, id.Epoch) error { calls.Add(1); return nil })
	c.ahead.Store(int64(time.Minute)) // nobody renewed for a minute
	_, err := b.Admin(t).Exec(t.Context(), "UPDATE replica SET lease_until = now() - interval '48 seconds'")
	assert.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- m.Run(ctx) }()
	time.Sleep(3 * time.Second) // it has renewed, and looked
	assert.Equal(t, calls.Load(), 0)
	assert.False(t, m.Fenced())
	assert.NoError(t, other.Renew(t.Context()))
	cancel()
	assert.NoError(t, <-done)
}

// With proof that the others are dead there is nothing to wait for.
func TestEndOthers(t *testing.T) {
	t.Parallel()
	b := pgtest.New(t)
	var c clock
	old := join(t, b, &c, nil)
	left := join(t, b, &c, nil)
	assert.NoError(t, left.Leave(t.Context()))
	seen := map[id.Epoch]bool{}
	m := join(t, b, &c, func(_ context.Context, e id.Epoch) error { seen[e] = true; return nil })
	assert.NoError(t, m.EndOthers(t.Context()))
	assert.Equal(t, seen, map[id.Epoch]bool{old.Epoch(): true, left.Epoch(): true})
	assert.ErrorIs(t, old.Renew(t.Context()), replica.ErrEnded)
	assert.NoError(t, m.Renew(t.Context()))
	assert.NoError(t, m.EndOthers(t.Context()))
	assert.Equal(t, len(seen), 2)
}
