-- name: BootstrapPlatform :one
SELECT bootstrap_platform(@id, @name, @created_at);

-- name: InsertTenant :exec
INSERT INTO tenant (id, name, created_at) VALUES (@id, @name, @created_at);

-- name: Tenants :many
SELECT id, name, platform, created_at, suspended_at FROM tenant WHERE id > @after ORDER BY id LIMIT @page;

-- name: InsertProject :exec
INSERT INTO project (id, tenant, name, created_at) VALUES (@id, @tenant, @name, @created_at);

-- name: Projects :many
SELECT id, tenant, name, created_at FROM project WHERE id > @after ORDER BY id LIMIT @page;

-- name: ProjectByName :one
SELECT id, tenant, name, created_at FROM project WHERE name = @name;

-- name: InsertKey :exec
INSERT INTO api_key (id, tenant, project, name, prefix, hmac, pepper_id, scopes, created_at)
VALUES (@id, @tenant, @project, @name, @prefix, @hmac, @pepper_id, @scopes, @created_at);

-- name: Keys :many
SELECT id, tenant, project, name, prefix, scopes, created_at, revoked_at FROM api_key WHERE id > @after ORDER BY id LIMIT @page;

-- name: RevokeKey :one
UPDATE api_key SET revoked_at = coalesce(revoked_at, @at::timestamptz) WHERE id = @id
RETURNING id, tenant, project, name, prefix, scopes, created_at, revoked_at;

-- name: UpsertModel :exec
INSERT INTO model (name, digest, bytes, architecture, context_window, default_output_tokens, chat, source, licence, created_at)
VALUES (@name, @digest, @bytes, @architecture, @context_window, @default_output_tokens, @chat, @source, @licence, @created_at)
ON CONFLICT (name) DO UPDATE SET digest = excluded.digest, bytes = excluded.bytes, architecture = excluded.architecture,
    context_window = excluded.context_window, default_output_tokens = excluded.default_output_tokens,
    chat = excluded.chat, source = excluded.source, licence = excluded.licence;

-- name: Models :many
SELECT * FROM model ORDER BY name;

-- name: ModelByName :one
SELECT * FROM model WHERE name = @name;

-- name: DefaultLimits :exec
SELECT quota_defaults(@tenant, @at);
