package tenancy_test

import (
	"testing"
	"time"

	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/tenancy"
	"bulkhead.dev/tenancy/quota"
)

// Every tenant has limits from its first moment, the platform's own too.
func TestNobodyIsWithoutLimits(t *testing.T) {
	t.Parallel()
	b := setup(t)
	made, _, err := b.store.CreateTenant(t.Context(), b.operator(), "another")
	assert.NoError(t, err)
	for _, tenant := range []id.Tenant{b.first.Tenant.ID, b.first.Platform.ID, made.ID} {
		list, err := b.store.Limits(t.Context(), b.operator(), tenant)
		assert.NoError(t, err)
		meters := map[quota.Meter]bool{}
		for _, u := range list {
			meters[u.Meter] = true
			assert.True(t, u.Platform && u.Remaining == u.Amount && u.Amount > 0)
		}
		assert.Equal(t, len(meters), 4)
	}
}

// A tenant sets limits beside the operator's, never in their place; and sees
// nothing of anybody else's.
func TestWhoSetsLimits(t *testing.T) {
	t.Parallel()
	b := setup(t)
	other, _, err := b.store.CreateTenant(t.Context(), b.operator(), "other")
	assert.NoError(t, err)
	concurrent := func(n int64) quota.Limit {
		return quota.Limit{Meter: quota.Concurrent, Period: quota.None, Amount: n, InputWeight: 1, OutputWeight: 1}
	}
	mine, err := b.store.SetLimit(t.Context(), b.tenant(), concurrent(1000), 0)
	assert.NoError(t, err)
	assert.True(t, !mine.Platform && mine.Tenant == b.first.Tenant.ID)
	list, err := b.store.Limits(t.Context(), b.tenant(), id.Tenant{})
	assert.NoError(t, err)
	assert.Equal(t, len(list), 7) // it is one more
	for _, u := range list {
		if u.Platform {
			_, err := b.store.DeleteLimit(t.Context(), b.tenant(), u.ID)
			assert.Equal(t, assert.ErrorAs[*apperr.Error](t, err).Code, "limit_of_the_platform")
		}
	}
	again, err := b.store.SetLimit(t.Context(), b.tenant(), concurrent(5), mine.Version)
	assert.NoError(t, err)
	assert.True(t, again.ID == mine.ID && again.Amount == 5 && again.Version == mine.Version+1)
	_, err = b.store.SetLimit(t.Context(), b.tenant(), concurrent(6), mine.Version)
	assert.Equal(t, kind(t, err), apperr.Conflict)

	theirs := concurrent(1)
	theirs.Tenant = other.ID
	_, err = b.store.SetLimit(t.Context(), b.tenant(), theirs, 0)
	assert.Equal(t, kind(t, err), apperr.Forbidden)
	_, err = b.store.Limits(t.Context(), b.tenant(), other.ID)
	assert.Equal(t, kind(t, err), apperr.Forbidden)
	// A forged scope opens nothing that the database does not.
	forged := b.tenant()
	forged.Scopes |= tenancy.ScopePlatform
	_, err = b.store.SetLimit(t.Context(), forged, theirs, 0)
	assert.True(t, err != nil)
	seen, err := b.store.Limits(t.Context(), forged, other.ID)
	assert.NoError(t, err)
	assert.Equal(t, len(seen), 0)
	_, err = b.store.SetLimit(t.Context(), forged, concurrent(1_000_000), 0)
	assert.True(t, err != nil)
	// The key of another tenant is as good as none.
	k, _, err := b.store.CreateKey(t.Context(), b.operator(), tenancy.NewKey{Tenant: other.ID})
	assert.NoError(t, err)
	for _, key := range []id.Key{k.ID, id.NewKey(time.Now())} {
		l := concurrent(1)
		l.Key = key
		_, err = b.store.SetLimit(t.Context(), b.tenant(), l, 0)
		assert.Equal(t, assert.ErrorAs[*apperr.Error](t, err).Code, "not_found")
	}
	_, err = b.store.SetLimit(t.Context(), b.operator(), theirs, 0)
	assert.NoError(t, err)
	reader := b.tenant()
	reader.Scopes = tenancy.ScopeLimitsRead
	_, err = b.store.SetLimit(t.Context(), reader, concurrent(1), 0)
	assert.Equal(t, kind(t, err), apperr.Forbidden)
	_, err = b.store.DeleteLimit(t.Context(), b.tenant(), mine.ID)
	assert.NoError(t, err)
	_, err = b.store.DeleteLimit(t.Context(), b.tenant(), mine.ID)
	assert.Equal(t, kind(t, err), apperr.NotFound)
}

func TestLimitsThatMakeNoSense(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for name, l := range map[string]quota.Limit{
		"meter":           {Meter: "watts", Period: quota.Day, Amount: 1},
		"period":          {Meter: quota.Tokens, Period: "week", Amount: 1},
		"concurrent":      {Meter: quota.Concurrent, Period: quota.Day, Amount: 1},
		"no period":       {Meter: quota.Requests, Period: quota.None, Amount: 1},
		"money by minute": {Meter: quota.Money, Period: quota.Minute, Amount: 1},
		"negative":        {Meter: quota.Requests, Period: quota.Day, Amount: -1},
		"huge":            {Meter: quota.Requests, Period: quota.Minute, Amount: 1 << 40},
		"soft":            {Meter: quota.Requests, Period: quota.Day, Amount: 1, Soft: 2},
		"weights":         {Meter: quota.Requests, Period: quota.Day, Amount: 1, InputWeight: 3},
		"both":            {Meter: quota.Requests, Period: quota.Day, Amount: 1, Project: b.first.Project.ID, Key: b.first.Key.ID},
	} {
		if l.InputWeight == 0 {
			l.InputWeight, l.OutputWeight = 1, 1
		}
		_, err := b.store.SetLimit(t.Context(), b.tenant(), l, 0)
		if err == nil || apperr.From(err).Code != "invalid_limit" {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestEffectiveLimits(t *testing.T) {
	t.Parallel()
	b := setup(t)
	_, err := b.store.SetLimit(t.Context(), b.tenant(), quota.Limit{Key: b.first.Key.ID, Meter: quota.Tokens, Period: quota.Day, Amount: 5000, InputWeight: 1, OutputWeight: 2}, 0)
	assert.NoError(t, err)
	a := quota.Ask{Project: b.first.Project.ID, Key: b.first.Key.ID, Model: "m", Input: 500, Output: 500}
	list, err := b.store.EffectiveLimits(t.Context(), b.tenant(), a)
	assert.NoError(t, err)
	binds := 0
	for _, e := range list {
		if e.Binds {
			binds++
			assert.True(t, e.Key == b.first.Key.ID && e.Fits == 3)
		}
	}
	assert.Equal(t, binds, 1)
	a.Key[3]++
	list, err = b.store.EffectiveLimits(t.Context(), b.tenant(), a)
	assert.NoError(t, err)
	for _, e := range list {
		assert.True(t, !e.Binds || (e.Meter == quota.Concurrent && e.Fits == 64))
	}
	// A price makes money bind.
	for _, meter := range []string{"input", "output"} {
		_, err = b.store.SetPrice(t.Context(), b.operator(), quota.Price{Model: "m", Meter: meter, Micros: 100_000_000_000})
		assert.NoError(t, err)
	}
	_, err = b.store.SetPrice(t.Context(), b.tenant(), quota.Price{Model: "m", Meter: "input", Micros: 0})
	assert.Equal(t, kind(t, err), apperr.Forbidden)
	list, err = b.store.EffectiveLimits(t.Context(), b.tenant(), a)
	assert.NoError(t, err)
	for _, e := range list {
		assert.True(t, !e.Binds || (e.Meter == quota.Money && e.Fits == 1))
	}
	prices, err := b.store.Prices(t.Context(), b.tenant(), "m")
	assert.NoError(t, err)
	assert.Equal(t, len(prices), 2)
}
