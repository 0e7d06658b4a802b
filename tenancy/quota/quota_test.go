package quota_test

import (
	"testing"
	"time"

	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/tenancy/quota"
)

// 200 at once on three replicas, and room for 20: 20 are admitted, neither more
// nor fewer, whatever is limited.
func TestExactAcrossReplicas(t *testing.T) {
	t.Parallel()
	for name, l := range map[string]quota.Limit{
		"concurrent":        {Meter: quota.Concurrent, Period: quota.None, Amount: 20},
		"requests a minute": {Meter: quota.Requests, Period: quota.Minute, Amount: 20},
		"tokens a day":      {Meter: quota.Tokens, Period: quota.Day, Amount: 2050},
		"weighted tokens":   {Meter: quota.Tokens, Period: quota.Month, Amount: 20*(10+3*90) + 5, InputWeight: 1, OutputWeight: 3},
		"of the key":        {Meter: quota.Requests, Period: quota.Day, Amount: 20},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			if name == "requests a minute" {
				b.freeze(t) // nothing flows back
			}
			if name == "of the key" {
				l.Key = b.ask.Key
			}
			limit := b.limit(t, l)
			b.limit(t, quota.Limit{Meter: quota.Requests, Period: quota.Month, Amount: 1_000_000}) // never binds
			nodes := []*node{b.node(t), b.node(t), b.node(t)}
			got, refused := gather(200, func(i int) (*quota.Reservation, error) { return nodes[i%3].Reserve(t.Context(), b.ask) })
			assert.Equal(t, []int64{int64(len(got)), refused}, []int64{20, 180})
			for _, r := range got {
				r.Close() // of nothing that was used
			}
			if name == "requests a minute" {
				return // a request counts, whatever became of it
			}
			// All of it is free again, on whichever replica it is asked for.
			time.Sleep(150 * time.Millisecond) // longer than a refusal is believed
			got, _ = gather(60, func(int) (*quota.Reservation, error) { return nodes[0].Reserve(t.Context(), b.ask) })
			assert.Equal(t, len(got), 20)
			for _, r := range got {
				r.Close()
			}
			for _, n := range nodes {
				n.stop()
			}
			_, held := b.left(t, limit)
			assert.Equal(t, held, 0)
		})
	}
}

// Small requests fit where a large one does not, and a large one that never
// fits is told so.
func TestRefusalsSayWhy(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.limit(t, quota.Limit{Meter: quota.Tokens, Period: quota.Minute, Amount: 1000})
	n := b.node(t)
	large := b.ask
	large.Output = 991
	_, err := n.Reserve(t.Context(), large)
	e, why := refusal(t, err)
	assert.True(t, e.NoRetry && e.Code == "rate_limit_exceeded" && why.Needed == 1001)
	large.Output = 890
	r, err := n.Reserve(t.Context(), large)
	assert.NoError(t, err)
	assert.Equal(t, r.Status.Tokens.Limit, 1000)
	assert.True(t, r.Status.Tokens.Remaining < 120)
	_, err = n.Reserve(t.Context(), large)
	e, why = refusal(t, err)
	assert.True(t, e.RetryAfter > 30*time.Second && e.RetryAfter <= time.Minute && !e.NoRetry)
	assert.True(t, why.Status.Tokens.Remaining < 200 && why.Status.Tokens.Reset > 0)
	small := b.ask
	small.Output = 40
	s, err := n.Reserve(t.Context(), small)
	assert.NoError(t, err)
	s.Close()
	r.Close()
}

// A request that is refused by one limit takes nothing of another.
func TestAllOrNothing(t *testing.T) {
	t.Parallel()
	b := setup(t)
	wide := b.limit(t, quota.Limit{Meter: quota.Tokens, Period: quota.Day, Amount: 1000})
	b.limit(t, quota.Limit{Meter: quota.Concurrent, Period: quota.None, Amount: 1})
	n := b.node(t)
	r, err := n.Reserve(t.Context(), b.ask)
	assert.NoError(t, err)
	for range 50 {
		_, err := n.Reserve(t.Context(), b.ask)
		_, why := refusal(t, err)
		assert.Equal(t, why.Limit.Meter, quota.Concurrent)
	}
	r.Close()
	got, _ := gather(1, func(int) (*quota.Reservation, error) { return n.Reserve(t.Context(), b.ask) })
	assert.Equal(t, len(got), 1)
	got[0].Close()
	n.stop()
	remaining, held := b.left(t, wide)
	assert.Equal(t, []int64{remaining, held}, []int64{1000, 0})
}

// Limits of one model or project do not bind others.
func TestScopes(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.limit(t, quota.Limit{Meter: quota.Requests, Period: quota.Day, Amount: 1, Model: "m", Key: b.ask.Key})
	b.limit(t, quota.Limit{Meter: quota.Requests, Period: quota.Day, Amount: 2, Model: "n", Key: b.ask.Key})
	b.limit(t, quota.Limit{Meter: quota.Requests, Period: quota.Day, Amount: 4, Project: b.ask.Project})
	n := b.node(t)
	admit := func(model string, key bool) bool {
		a := b.ask
		a.Model = model
		if !key {
			a.Key[0]++
		}
		r, err := n.Reserve(t.Context(), a)
		if err == nil {
			r.Spend(10, 1)
			r.Close()
		}
		return err == nil
	}
	assert.True(t, admit("m", true))
	assert.False(t, admit("m", true))
	assert.True(t, admit("n", true))
	assert.True(t, admit("n", true))
	assert.False(t, admit("n", true))
	assert.True(t, admit("m", false)) // another key of the project
	assert.False(t, admit("m", false))
}

// A change of a limit is heard by replicas that know the old one.
func TestChangesAreHeard(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.limit(t, quota.Limit{Meter: quota.Requests, Period: quota.Day, Amount: 0})
	n := b.node(t)
	_, err := n.Reserve(t.Context(), b.ask)
	e, _ := refusal(t, err)
	assert.True(t, e.NoRetry)
	b.limit(t, quota.Limit{Meter: quota.Requests, Period: quota.Day, Amount: 1})
	r, err := n.Reserve(t.Context(), b.ask)
	assert.NoError(t, err)
	r.Close()
	b.exec(t, "DELETE FROM quota_limit")
	for range 3 {
		for err = error(apperr.New(apperr.Unavailable, "", "")); err != nil; {
			_, err = n.Reserve(t.Context(), b.ask)
		}
	}
	b.limit(t, quota.Limit{Meter: quota.Concurrent, Period: quota.None, Amount: 0})
	for err == nil {
		if r, err = n.Reserve(t.Context(), b.ask); err == nil {
			r.Close()
		}
	}
	refusal(t, err)
}
