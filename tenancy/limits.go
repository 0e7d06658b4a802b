package tenancy

import (
	"context"

	"github.com/jackc/pgx/v5"

	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/infra/pgdb"
	"bulkhead.dev/tenancy/quota"
)

// whose returns the tenant that a principal means, and fails unless it may see
// it.
func whose(p Principal, want Scopes, tenant id.Tenant) (id.Tenant, error) {
	if tenant == (id.Tenant{}) || tenant == p.Tenant {
		return p.Tenant, p.Require(want)
	}
	return tenant, p.Require(ScopePlatform)
}

// Limits returns the limits of a tenant and what is taken of them. A zero
// tenant is that of the principal; any other is for the operator.
func (s *Store) Limits(ctx context.Context, p Principal, tenant id.Tenant) (list []quota.Usage, err error) {
	if tenant, err = whose(p, ScopeLimitsRead, tenant); err != nil {
		return nil, err
	}
	err = pgdb.WithTenant(ctx, s.db, p.Tenant, func(tx pgx.Tx) error {
		list, err = quota.Usages(ctx, tx, tenant)
		return err
	})
	return list, public("list limits", err)
}

// SetLimit makes or changes a limit: of the platform if the operator does it,
// and of the tenant itself otherwise. If version is not 0, the limit must
// exist with that version.
func (s *Store) SetLimit(ctx context.Context, p Principal, l quota.Limit, version int64) (after quota.Limit, err error) {
	if l.Tenant, err = whose(p, ScopeLimitsWrite, l.Tenant); err != nil {
		return l, err
	}
	now := s.stamp()
	l.ID, l.Created, l.Platform = id.NewLimit(now), now, p.Scopes.Has(ScopePlatform)
	err = pgdb.WithTenant(ctx, s.db, p.Tenant, func(tx pgx.Tx) error {
		before, set, err := quota.Set(ctx, tx, l)
		if err != nil {
			return err
		}
		if version != 0 && (before == nil || before.Version != version) {
			return apperr.New(apperr.Conflict, "stale_etag", "The limit was changed or deleted meanwhile; read it again.").WithParam("etag")
		}
		after = *set
		return nil
	})
	return after, public("set limit", err)
}

// DeleteLimit deletes a limit and returns it. The operator deletes any, a tenant
// those that it set itself.
func (s *Store) DeleteLimit(ctx context.Context, p Principal, limit id.Limit) (gone quota.Limit, err error) {
	if !p.Scopes.Has(ScopePlatform) {
		if err := p.Require(ScopeLimitsWrite); err != nil {
			return gone, err
		}
	}
	err = pgdb.WithTenant(ctx, s.db, p.Tenant, func(tx pgx.Tx) error {
		l, err := quota.Remove(ctx, tx, limit)
		if err == nil {
			gone = *l
		}
		return err
	})
	return gone, public("delete limit", err)
}

// EffectiveLimits returns the limits that bind a request, and which binds first.
func (s *Store) EffectiveLimits(ctx context.Context, p Principal, a quota.Ask) (list []quota.Effective, err error) {
	if a.Tenant, err = whose(p, ScopeLimitsRead, a.Tenant); err != nil {
		return nil, err
	}
	err = pgdb.WithTenant(ctx, s.db, p.Tenant, func(tx pgx.Tx) error {
		all, err := quota.Usages(ctx, tx, a.Tenant)
		if err != nil {
			return err
		}
		prices, err := quota.ListPrices(ctx, tx, "")
		if err != nil {
			return err
		}
		list = quota.Binding(all, a, prices, s.now())
		return nil
	})
	return list, public("read limits", err)
}

// Prices returns the list prices of a model, or of all for "".
func (s *Store) Prices(ctx context.Context, p Principal, model string) (list []quota.Price, err error) {
	err = pgdb.WithTenant(ctx, s.db, p.Tenant, func(tx pgx.Tx) error {
		list, err = quota.ListPrices(ctx, tx, model)
		return err
	})
	return list, public("list prices", err)
}

// SetPrice adds a list price. Only the operator may.
func (s *Store) SetPrice(ctx context.Context, p Principal, price quota.Price) (quota.Price, error) {
	if err := p.Require(ScopePlatform); err != nil {
		return price, err
	}
	now := s.stamp()
	price.ID = id.NewPrice(now)
	if price.From.IsZero() {
		price.From = now
	}
	err := pgdb.WithTenant(ctx, s.db, p.Tenant, func(tx pgx.Tx) error { return quota.SetPrice(ctx, tx, price, now) })
	return price, public("set price", err)
}
