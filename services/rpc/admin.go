package rpc

import (
	"context"
	"encoding/hex"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"bulkhead.dev/audit/receipt"
	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/id"
	auditv1 "bulkhead.dev/services/gen/bulkhead/audit/v1"
	catalogv1 "bulkhead.dev/services/gen/bulkhead/catalog/v1"
	tenancyv1 "bulkhead.dev/services/gen/bulkhead/tenancy/v1"
	"bulkhead.dev/services/httpx"
	"bulkhead.dev/tenancy"
)

func principal(ctx context.Context) tenancy.Principal { return httpx.InfoFrom(ctx).Principal }

// stamp leaves the zero time out.
func stamp(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

func badID(param string, err error) error {
	return apperr.Wrap(err, apperr.Invalid, "invalid_id", "%s is not an id of this kind.", param).WithParam(param)
}

type catalog struct{ Options }

// ListModels implements the catalogue service. The list is short; it is one page.
func (s *catalog) ListModels(ctx context.Context, _ *catalogv1.ListModelsRequest) (*catalogv1.ListModelsResponse, error) {
	list, err := s.Backend.Models(ctx, principal(ctx))
	if err != nil {
		return nil, err
	}
	out := &catalogv1.ListModelsResponse{}
	for _, m := range list {
		out.Models = append(out.Models, modelOf(m))
	}
	return out, nil
}

// GetModel implements the catalogue service.
func (s *catalog) GetModel(ctx context.Context, in *catalogv1.GetModelRequest) (*catalogv1.GetModelResponse, error) {
	m, err := s.Backend.Model(ctx, principal(ctx), in.GetName())
	if err != nil {
		return nil, err
	}
	return &catalogv1.GetModelResponse{Model: modelOf(m)}, nil
}

func modelOf(m tenancy.Model) *catalogv1.Model {
	return &catalogv1.Model{Name: m.Name, Digest: "sha256:" + hex.EncodeToString(m.Digest[:]), Bytes: uint64(m.Bytes), Architecture: m.Architecture,
		ContextWindow: uint32(m.ContextWindow), DefaultOutputTokens: uint32(m.DefaultOutputTokens), Chat: m.Chat, Created: stamp(m.Created)}
}

type receipts struct{ Options }

// GetReceipt implements the audit service.
func (s *receipts) GetReceipt(ctx context.Context, in *auditv1.GetReceiptRequest) (*auditv1.GetReceiptResponse, error) {
	request, err := id.ParseRequest(in.GetId())
	if err != nil {
		r, err := id.ParseReceipt(in.GetId())
		if err != nil {
			return nil, badID("id", err)
		}
		request = r.Request()
	}
	stored, err := s.Receipts.Get(ctx, principal(ctx).Tenant, request)
	if err != nil {
		return nil, err
	}
	r, err := receipt.Decode(stored.Body)
	if err != nil {
		return nil, err
	}
	text, err := r.JSON()
	if err != nil {
		return nil, err
	}
	return &auditv1.GetReceiptResponse{Id: request.Receipt().String(), Body: stored.Body, Digest: stored.Digest[:], Json: string(text)}, nil
}

type tenants struct{ Options }

func page(size uint32, token string) tenancy.Page {
	return tenancy.Page{Size: int(min(size, 1<<16)), Token: token}
}

// CreateTenant implements the tenancy service.
func (s *tenants) CreateTenant(ctx context.Context, in *tenancyv1.CreateTenantRequest) (*tenancyv1.CreateTenantResponse, error) {
	t, p, err := s.Tenants.CreateTenant(ctx, principal(ctx), in.GetName())
	if err != nil {
		return nil, err
	}
	return &tenancyv1.CreateTenantResponse{Tenant: tenantOf(t), Project: projectOf(p)}, nil
}

// ListTenants implements the tenancy service.
func (s *tenants) ListTenants(ctx context.Context, in *tenancyv1.ListTenantsRequest) (*tenancyv1.ListTenantsResponse, error) {
	list, next, err := s.Tenants.ListTenants(ctx, principal(ctx), page(in.GetPageSize(), in.GetPageToken()))
	if err != nil {
		return nil, err
	}
	out := &tenancyv1.ListTenantsResponse{NextPageToken: next}
	for _, t := range list {
		out.Tenants = append(out.Tenants, tenantOf(t))
	}
	return out, nil
}

// CreateProject implements the tenancy service.
func (s *tenants) CreateProject(ctx context.Context, in *tenancyv1.CreateProjectRequest) (*tenancyv1.CreateProjectResponse, error) {
	p, err := s.Tenants.CreateProject(ctx, principal(ctx), in.GetName())
	if err != nil {
		return nil, err
	}
	return &tenancyv1.CreateProjectResponse{Project: projectOf(p)}, nil
}

// ListProjects implements the tenancy service.
func (s *tenants) ListProjects(ctx context.Context, in *tenancyv1.ListProjectsRequest) (*tenancyv1.ListProjectsResponse, error) {
	list, next, err := s.Tenants.ListProjects(ctx, principal(ctx), page(in.GetPageSize(), in.GetPageToken()))
	if err != nil {
		return nil, err
	}
	out := &tenancyv1.ListProjectsResponse{NextPageToken: next}
	for _, p := range list {
		out.Projects = append(out.Projects, projectOf(p))
	}
	return out, nil
}

// CreateKey implements the tenancy service.
func (s *tenants) CreateKey(ctx context.Context, in *tenancyv1.CreateKeyRequest) (*tenancyv1.CreateKeyResponse, error) {
	n := tenancy.NewKey{Name: in.GetName()}
	var err error
	if in.GetTenantId() != "" {
		if n.Tenant, err = id.ParseTenant(in.GetTenantId()); err != nil {
			return nil, badID("tenant_id", err)
		}
	}
	if in.GetProjectId() != "" {
		if n.Project, err = id.ParseProject(in.GetProjectId()); err != nil {
			return nil, badID("project_id", err)
		}
	}
	if n.Scopes, err = tenancy.ParseScopes(in.GetScopes()); err != nil {
		return nil, err
	}
	k, secret, err := s.Tenants.CreateKey(ctx, principal(ctx), n)
	if err != nil {
		return nil, err
	}
	return &tenancyv1.CreateKeyResponse{Key: keyOf(k), Secret: secret.Reveal()}, nil
}

// ListKeys implements the tenancy service.
func (s *tenants) ListKeys(ctx context.Context, in *tenancyv1.ListKeysRequest) (*tenancyv1.ListKeysResponse, error) {
	list, next, err := s.Tenants.ListKeys(ctx, principal(ctx), page(in.GetPageSize(), in.GetPageToken()))
	if err != nil {
		return nil, err
	}
	out := &tenancyv1.ListKeysResponse{NextPageToken: next}
	for _, k := range list {
		out.Keys = append(out.Keys, keyOf(k))
	}
	return out, nil
}

// RevokeKey implements the tenancy service.
func (s *tenants) RevokeKey(ctx context.Context, in *tenancyv1.RevokeKeyRequest) (*tenancyv1.RevokeKeyResponse, error) {
	key, err := id.ParseKey(in.GetKeyId())
	if err != nil {
		return nil, badID("key_id", err)
	}
	k, err := s.Tenants.RevokeKey(ctx, principal(ctx), key)
	if err != nil {
		return nil, err
	}
	return &tenancyv1.RevokeKeyResponse{Key: keyOf(k)}, nil
}

func tenantOf(t tenancy.Tenant) *tenancyv1.Tenant {
	return &tenancyv1.Tenant{Id: t.ID.String(), Name: t.Name, Created: stamp(t.Created)}
}

func projectOf(p tenancy.Project) *tenancyv1.Project {
	return &tenancyv1.Project{Id: p.ID.String(), TenantId: p.Tenant.String(), Name: p.Name, Created: stamp(p.Created)}
}

func keyOf(k tenancy.Key) *tenancyv1.Key {
	return &tenancyv1.Key{Id: k.ID.String(), ProjectId: k.Project.String(), Name: k.Name, Prefix: k.Prefix, Scopes: k.Scopes.Strings(),
		Created: stamp(k.Created), Revoked: stamp(k.Revoked)}
}
