package rpc

import (
	"context"
	"fmt"
	"strconv"

	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/id"
	limitsv1 "bulkhead.dev/services/gen/bulkhead/limits/v1"
	"bulkhead.dev/tenancy"
	"bulkhead.dev/tenancy/quota"
)

// Limits keeps limits and list prices; *tenancy.Store.
type Limits interface {
	Limits(ctx context.Context, p tenancy.Principal, tenant id.Tenant) ([]quota.Usage, error)
	SetLimit(ctx context.Context, p tenancy.Principal, l quota.Limit, version int64) (quota.Limit, error)
	DeleteLimit(ctx context.Context, p tenancy.Principal, limit id.Limit) (quota.Limit, error)
	EffectiveLimits(ctx context.Context, p tenancy.Principal, a quota.Ask) ([]quota.Effective, error)
	Prices(ctx context.Context, p tenancy.Principal, model string) ([]quota.Price, error)
	SetPrice(ctx context.Context, p tenancy.Principal, price quota.Price) (quota.Price, error)
}

type limits struct{ Options }

// optional reads an id that may be left out.
func optional[T ~[16]byte](param, text string, parse func(string) (T, error)) (v T, err error) {
	if text == "" {
		return v, nil
	}
	if v, err = parse(text); err != nil {
		return v, badID(param, err)
	}
	return v, nil
}

// ListLimits implements the limit service.
func (s *limits) ListLimits(ctx context.Context, in *limitsv1.ListLimitsRequest) (*limitsv1.ListLimitsResponse, error) {
	tenant, err := optional("tenant_id", in.GetTenantId(), id.ParseTenant)
	if err != nil {
		return nil, err
	}
	list, err := s.Limits.Limits(ctx, principal(ctx), tenant)
	if err != nil {
		return nil, err
	}
	out := &limitsv1.ListLimitsResponse{}
	for _, u := range list {
		out.Limits = append(out.Limits, usageOf(u))
	}
	return out, nil
}

// SetLimit implements the limit service.
func (s *limits) SetLimit(ctx context.Context, in *limitsv1.SetLimitRequest) (*limitsv1.SetLimitResponse, error) {
	m := in.GetLimit()
	l := quota.Limit{Model: m.GetModel(), Meter: quota.Meter(m.GetMeter()), Period: quota.Period(m.GetPeriod()), Amount: m.GetAmount(), Soft: m.GetSoft(),
		InputWeight: int64(m.GetInputWeight()), OutputWeight: int64(m.GetOutputWeight())}
	if l.InputWeight == 0 && l.OutputWeight == 0 {
		l.InputWeight, l.OutputWeight = 1, 1
	}
	var version int64
	var err error
	if l.Tenant, err = optional("limit.tenant_id", m.GetTenantId(), id.ParseTenant); err != nil {
		return nil, err
	}
	if l.Project, err = optional("limit.project_id", m.GetProjectId(), id.ParseProject); err != nil {
		return nil, err
	}
	if l.Key, err = optional("limit.key_id", m.GetKeyId(), id.ParseKey); err != nil {
		return nil, err
	}
	if in.GetEtag() != "" {
		if version, err = strconv.ParseInt(in.GetEtag(), 10, 64); err != nil || version < 1 {
			return nil, apperr.New(apperr.Invalid, "invalid_etag", "etag is not one that this platform gave out.").WithParam("etag")
		}
	}
	set, err := s.Limits.SetLimit(ctx, principal(ctx), l, version)
	if err != nil {
		return nil, err
	}
	return &limitsv1.SetLimitResponse{Limit: limitOf(&set)}, nil
}

// DeleteLimit implements the limit service.
func (s *limits) DeleteLimit(ctx context.Context, in *limitsv1.DeleteLimitRequest) (*limitsv1.DeleteLimitResponse, error) {
	limit, err := id.ParseLimit(in.GetId())
	if err != nil {
		return nil, badID("id", err)
	}
	gone, err := s.Limits.DeleteLimit(ctx, principal(ctx), limit)
	if err != nil {
		return nil, err
	}
	return &limitsv1.DeleteLimitResponse{Limit: limitOf(&gone)}, nil
}

// askAbout is the request that limits are asked about when none is named.
const askAbout = 1000

// GetEffectiveLimits implements the limit service.
func (s *limits) GetEffectiveLimits(ctx context.Context, in *limitsv1.GetEffectiveLimitsRequest) (*limitsv1.GetEffectiveLimitsResponse, error) {
	p := principal(ctx)
	a := quota.Ask{Project: p.Project, Key: p.Key, Model: in.GetModel(), Input: int(in.GetInputTokens()), Output: int(in.GetOutputTokens())}
	if a.Input == 0 && a.Output == 0 {
		a.Input, a.Output = askAbout, askAbout
	}
	var err error
	if a.Tenant, err = optional("tenant_id", in.GetTenantId(), id.ParseTenant); err != nil {
		return nil, err
	}
	if a.Tenant != (id.Tenant{}) && a.Tenant != p.Tenant {
		a.Project, a.Key = id.Project{}, id.Key{}
	}
	if in.GetProjectId() != "" {
		if a.Project, err = id.ParseProject(in.GetProjectId()); err != nil {
			return nil, badID("project_id", err)
		}
	}
	if in.GetKeyId() != "" {
		if a.Key, err = id.ParseKey(in.GetKeyId()); err != nil {
			return nil, badID("key_id", err)
		}
	}
	list, err := s.Limits.EffectiveLimits(ctx, p, a)
	if err != nil {
		return nil, err
	}
	out := &limitsv1.GetEffectiveLimitsResponse{}
	for _, e := range list {
		m := &limitsv1.EffectiveLimit{Usage: usageOf(e.Usage), Fits: e.Fits, Binds: e.Binds}
		if e.Binds {
			m.Why = fmt.Sprintf("Of %s%s, %d of %d are left, which is enough for %d requests of %d tokens with answers of up to %d: fewer than every other limit allows.",
				e.Meter, per(e.Period), e.Remaining, e.Amount, e.Fits, a.Input, a.Output)
		}
		out.Limits = append(out.Limits, m)
	}
	return out, nil
}

func per(p quota.Period) string {
	if p == quota.None {
		return " requests"
	}
	return " per " + string(p)
}

// ListPrices implements the limit service.
func (s *limits) ListPrices(ctx context.Context, in *limitsv1.ListPricesRequest) (*limitsv1.ListPricesResponse, error) {
	list, err := s.Limits.Prices(ctx, principal(ctx), in.GetModel())
	if err != nil {
		return nil, err
	}
	out := &limitsv1.ListPricesResponse{}
	for _, p := range list {
		out.Prices = append(out.Prices, priceOf(p))
	}
	return out, nil
}

// SetPrice implements the limit service.
func (s *limits) SetPrice(ctx context.Context, in *limitsv1.SetPriceRequest) (*limitsv1.SetPriceResponse, error) {
	m := in.GetPrice()
	p := quota.Price{Model: m.GetModel(), Meter: m.GetMeter(), Micros: m.GetMicrosPerMillion()}
	if m.GetFrom() != nil {
		p.From = m.GetFrom().AsTime()
	}
	set, err := s.Limits.SetPrice(ctx, principal(ctx), p)
	if err != nil {
		return nil, err
	}
	return &limitsv1.SetPriceResponse{Price: priceOf(set)}, nil
}

func priceOf(p quota.Price) *limitsv1.Price {
	return &limitsv1.Price{Id: p.ID.String(), Model: p.Model, Meter: p.Meter, From: stamp(p.From), MicrosPerMillion: p.Micros}
}

func usageOf(u quota.Usage) *limitsv1.LimitUsage {
	return &limitsv1.LimitUsage{Limit: limitOf(&u.Limit), Spent: u.Spent, Held: u.Held, Remaining: u.Remaining, Ends: stamp(u.Ends)}
}

func limitOf(l *quota.Limit) *limitsv1.Limit {
	out := &limitsv1.Limit{Id: l.ID.String(), TenantId: l.Tenant.String(), Model: l.Model, Meter: string(l.Meter), Period: string(l.Period),
		Amount: l.Amount, Soft: l.Soft, InputWeight: int32(l.InputWeight), OutputWeight: int32(l.OutputWeight), Platform: l.Platform,
		Created: stamp(l.Created), Etag: strconv.FormatInt(l.Version, 10)}
	if l.Project != (id.Project{}) {
		out.ProjectId = l.Project.String()
	}
	if l.Key != (id.Key{}) {
		out.KeyId = l.Key.String()
	}
	return out
}
