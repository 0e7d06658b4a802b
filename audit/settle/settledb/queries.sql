-- name: Replicas :many
SELECT DISTINCT replica FROM intent ORDER BY replica;

-- name: IntentsOf :many
SELECT request_id, tenant, project, api_key, reserved_tokens, created_at, transfer, prefill_epoch, decode_epoch FROM intent
WHERE replica = @replica AND request_id > @after ORDER BY request_id LIMIT @page;

-- name: Digests :many
SELECT request_id, digest FROM receipt WHERE request_id = ANY (@ids::uuid[]);

-- name: Receipt :one
SELECT body, digest FROM receipt WHERE request_id = @request_id;
