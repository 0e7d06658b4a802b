package quota_test

import (
	"testing"
	"time"

	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/tenancy/quota"
)

// spend runs one request to its end and writes what it spent, as settlement
// does.
func (b *bundle) spend(t testing.TB, n *node, r *quota.Reservation, input, output int) {
	t.Helper()
	for _, c := range r.Spend(input, output) {
		b.exec(t, `INSERT INTO quota_spend AS s VALUES ($1, $2, $3, $4, $5)
			ON CONFLICT (replica, limit_id, window_start) DO UPDATE SET amount = s.amount + EXCLUDED.amount`,
			[16]byte(n.epoch), [16]byte(c.Limit), c.Window, [16]byte(b.ask.Tenant), c.Amount)
	}
	r.Close()
}

// A day and a month begin anew, and what was reserved before belongs to before.
func TestWindows(t *testing.T) {
	t.Parallel()
	b := setup(t)
	at := b.freeze(t)
	midnight := time.Date(2026, 4, 1, 0, 0, 0, 0, time.UTC)
	at(midnight.Add(-time.Second))
	day := b.limit(t, quota.Limit{Meter: quota.Tokens, Period: quota.Day, Amount: 250})
	month := b.limit(t, quota.Limit{Meter: quota.Tokens, Period: quota.Month, Amount: 350})
	n := b.node(t)
	over, err := n.Reserve(t.Context(), b.ask) // it runs across midnight
	assert.NoError(t, err)
	before, err := n.Reserve(t.Context(), b.ask)
	assert.NoError(t, err)
	b.spend(t, n, before, 10, 90)
	_, err = n.Reserve(t.Context(), b.ask)
	e, why := refusal(t, err)
	assert.True(t, why.Limit.Period == quota.Day && e.Code == "organization_usage_limit_exceeded" && e.NoRetry && e.RetryAfter > 0 && e.RetryAfter <= time.Second)

	at(midnight)
	n.listens(t)
	for range 2 {
		r, err := n.Reserve(t.Context(), b.ask)
		assert.NoError(t, err)
		b.spend(t, n, r, 10, 90)
	}
	_, err = n.Reserve(t.Context(), b.ask)
	_, why = refusal(t, err)
	assert.Equal(t, why.Limit.Period, quota.Day)
	b.spend(t, n, over, 10, 90) // charged to March
	n.stop()
	for limit, want := range map[id.Limit]int64{day: 50, month: 150} {
		remaining, held := b.left(t, limit)
		assert.Equal(t, []int64{remaining, held}, []int64{want, 0})
	}
	// A clock that steps back does not bring the old window back.
	at(midnight.Add(-time.Minute))
	m := b.node(t)
	_, err = m.Reserve(t.Context(), b.ask)
	_, why = refusal(t, err)
	assert.Equal(t, why.Left, 50)
}

// What is taken by the minute flows back evenly, and what was not used flows
// back only as far as it has not.
func TestMinute(t *testing.T) {
	t.Parallel()
	b := setup(t)
	at := b.freeze(t)
	start := time.Date(2026, 4, 1, 12, 0, 0, 0, time.UTC)
	at(start)
	limit := b.limit(t, quota.Limit{Meter: quota.Tokens, Period: quota.Minute, Amount: 600})
	n := b.node(t)
	large := b.ask
	large.Output = 590
	r, err := n.Reserve(t.Context(), large)
	assert.NoError(t, err)
	_, err = n.Reserve(t.Context(), b.ask)
	e, _ := refusal(t, err)
	assert.Equal(t, e.RetryAfter, 10*time.Second) // 100 tokens at 10 a second
	at(start.Add(10*time.Second - time.Millisecond))
	n.listens(t)
	_, err = n.Reserve(t.Context(), b.ask)
	refusal(t, err)
	at(start.Add(10 * time.Second))
	s, err := n.Reserve(t.Context(), b.ask)
	assert.NoError(t, err)
	r.Spend(10, 0)
	r.Close()
	s.Spend(10, 90)
	s.Close()
	n.stop()
	remaining, held := b.left(t, limit)
	assert.Equal(t, held, 0)
	// 590 were not used, of which 100 had flowed back already, and a little more
	// by the clock of the replica.
	assert.True(t, remaining < 490 && remaining > 470)
	at(start.Add(2 * time.Minute))
	remaining, _ = b.left(t, limit)
	assert.Equal(t, remaining, 600)
}

// Money is charged at the price that was in effect when the request was
// reserved, of the revision if it has its own.
func TestMoney(t *testing.T) {
	t.Parallel()
	b := setup(t)
	limit := b.limit(t, quota.Limit{Meter: quota.Money, Period: quota.Month, Amount: 100_000, Soft: 500})
	set := func(meter string, digest *[32]byte, from time.Duration, micros int64) {
		tx, err := b.admin.Begin(t.Context())
		assert.NoError(t, err)
		assert.NoError(t, quota.SetPrice(t.Context(), tx, quota.Price{ID: id.NewPrice(time.Now()), Model: "m", Digest: digest, Meter: meter, From: time.Now().Add(from), Micros: micros}, time.Now()))
		assert.NoError(t, tx.Commit(t.Context()))
	}
	set("input", nil, 0, 1_000_000)
	set("output", nil, 0, 9_000_000)
	set("output", nil, time.Hour, 900_000_000)
	n := b.node(t)
	admitted := func(a quota.Ask) int64 {
		r, err := n.Reserve(t.Context(), a)
		assert.NoError(t, err)
		var cost int64
		for _, h := range r.Holds() {
			cost += h.Amount
		}
		b.spend(t, n, r, 10, 40)
		return cost
	}
	assert.Equal(t, admitted(b.ask), 10+9*90)
	set("output", &[32]byte{7}, 0, 1_000_001)
	revision := b.ask
	revision.Digest[0] = 7
	for range 100 { // until it has heard of the price
		if admitted(revision) == 10+90+1 {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	n.stop()
	remaining, _ := b.left(t, limit)
	assert.True(t, remaining <= 100_000-(10+9*40)-(10+41))
	assert.True(t, n.Counts().Warnings >= 1)
}
