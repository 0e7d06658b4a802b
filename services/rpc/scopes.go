package rpc

import (
	"bulkhead.dev/services/gen/bulkhead/audit/v1/auditv1connect"
	"bulkhead.dev/services/gen/bulkhead/catalog/v1/catalogv1connect"
	"bulkhead.dev/services/gen/bulkhead/inference/v1/inferencev1connect"
	"bulkhead.dev/services/gen/bulkhead/limits/v1/limitsv1connect"
	"bulkhead.dev/services/gen/bulkhead/operations/v1/operationsv1connect"
	"bulkhead.dev/services/gen/bulkhead/tenancy/v1/tenancyv1connect"
	"bulkhead.dev/tenancy"
)

// scopes says what a key must have for each procedure. A procedure that is not
// here is answered to nobody.
var scopes = map[string]tenancy.Scopes{
	inferencev1connect.InferenceServiceGenerateProcedure:       tenancy.ScopeInference,
	inferencev1connect.InferenceServiceGenerateStreamProcedure: tenancy.ScopeInference,

	tenancyv1connect.TenancyServiceCreateTenantProcedure:  tenancy.ScopePlatform,
	tenancyv1connect.TenancyServiceListTenantsProcedure:   tenancy.ScopePlatform,
	tenancyv1connect.TenancyServiceCreateProjectProcedure: tenancy.ScopeKeysWrite,
	tenancyv1connect.TenancyServiceListProjectsProcedure:  tenancy.ScopeKeysRead,
	tenancyv1connect.TenancyServiceCreateKeyProcedure:     tenancy.ScopeKeysWrite,
	tenancyv1connect.TenancyServiceListKeysProcedure:      tenancy.ScopeKeysRead,
	tenancyv1connect.TenancyServiceRevokeKeyProcedure:     tenancy.ScopeKeysWrite,

	catalogv1connect.CatalogServiceListModelsProcedure: tenancy.ScopeInference,
	catalogv1connect.CatalogServiceGetModelProcedure:   tenancy.ScopeInference,

	// The store asks for the platform where a tenant's right is not enough.
	limitsv1connect.LimitServiceListLimitsProcedure:         tenancy.ScopeLimitsRead,
	limitsv1connect.LimitServiceSetLimitProcedure:           tenancy.ScopeLimitsWrite,
	limitsv1connect.LimitServiceDeleteLimitProcedure:        tenancy.ScopeLimitsWrite,
	limitsv1connect.LimitServiceGetEffectiveLimitsProcedure: tenancy.ScopeLimitsRead,
	limitsv1connect.LimitServiceListPricesProcedure:         tenancy.ScopeLimitsRead,
	limitsv1connect.LimitServiceSetPriceProcedure:           tenancy.ScopePlatform,

	operationsv1connect.OperationsServiceListPagesProcedure: tenancy.ScopePlatform,

	auditv1connect.AuditServiceGetReceiptProcedure: tenancy.ScopeReceiptsRead,
}
