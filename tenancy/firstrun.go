package tenancy

import (
	"context"

	"github.com/jackc/pgx/v5"

	"bulkhead.dev/infra/id"
	"bulkhead.dev/infra/pgdb"
	"bulkhead.dev/infra/secret"
	"bulkhead.dev/tenancy/tenancydb"
)

// First is what the first start of a platform makes.
type First struct {
	Platform    Tenant // the operator's tenant
	Operator    Key    // all scopes
	OperatorKey secret.String
	Tenant      Tenant  // "default"
	Project     Project // "default"
	Key         Key     // every scope that a tenant can have
	TenantKey   secret.String
}

// FirstRun fills an empty database: the operator's tenant with a key, and the
// tenant "default" with a project and a key. It calls save with the secrets
// before it commits, so that no key exists whose secret was never kept; an error of
// save undoes everything. In a database that was filled before it does
// nothing and returns false. Of several replicas that start at once one fills it.
func (s *Store) FirstRun(ctx context.Context, save func(First) error) (bool, error) {
	made := false
	err := pgdb.InTx(ctx, s.db, func(tx pgx.Tx) (err error) {
		now := s.stamp()
		f := First{Platform: Tenant{ID: id.NewTenant(now), Name: "platform", Platform: true, Created: now}}
		made, err = tenancydb.New(tx).BootstrapPlatform(ctx, tenancydb.BootstrapPlatformParams{
			ID: f.Platform.ID, Name: f.Platform.Name, CreatedAt: now})
		if err != nil || !made {
			return err
		}
		if err := pgdb.SetTenant(ctx, tx, f.Platform.ID); err != nil {
			return err
		}
		if err := tenancydb.New(tx).DefaultLimits(ctx, tenancydb.DefaultLimitsParams{Tenant: f.Platform.ID, At: now}); err != nil {
			return err
		}
		own, err := s.insertProject(ctx, tx, f.Platform.ID, firstProject)
		if err != nil {
			return err
		}
		f.Operator, f.OperatorKey, err = s.insertKey(ctx, tx, NewKey{
			Tenant: f.Platform.ID, Project: own.ID, Name: "operator", Scopes: ScopesTenant | ScopePlatform})
		if err != nil {
			return err
		}
		if f.Tenant, f.Project, err = s.insertTenant(ctx, tx, "default"); err != nil {
			return err
		}
		f.Key, f.TenantKey, err = s.insertKey(ctx, tx, NewKey{
			Tenant: f.Tenant.ID, Project: f.Project.ID, Name: "first", Scopes: ScopesTenant})
		if err != nil {
			return err
		}
		return save(f)
	})
	if err != nil {
		return false, public("first run", err)
	}
	return made, nil
}
