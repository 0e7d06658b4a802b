-- Roles (made by pgdb.Migrate, because they belong to the server and not to one
-- database):
--   bulkhead_owner   owns everything and cannot log in; migrations run as it
--   bulkhead_app     the application; row-level security binds it to one tenant
--   bulkhead_auth    looks up API keys through one function, and nothing else
--   bulkhead_settle  writes usage and receipts, and reads them to recover
--   bulkhead_log     the sequencer of the transparency log; no rights yet
--
-- Ids are uuid, which is 16 bytes and nothing more: they are not RFC 9562
-- UUIDs, but ULIDs, so they sort by time.

-- +goose Up

-- By default everybody may call a function.
ALTER DEFAULT PRIVILEGES REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC;

-- The tenant that the current transaction is bound to, or null.
CREATE FUNCTION current_tenant() RETURNS uuid
LANGUAGE sql STABLE PARALLEL SAFE
RETURN nullif(current_setting('bulkhead.tenant', true), '')::uuid;

CREATE TABLE tenant (
    id              uuid PRIMARY KEY,
    name            text NOT NULL CHECK (length(name) BETWEEN 1 AND 128),
    -- The operator's own tenant. It exists once.
    platform        boolean NOT NULL DEFAULT false,
    -- Raising it drops everything that is cached for the tenant.
    isolation_epoch bigint NOT NULL DEFAULT 1,
    created_at      timestamptz NOT NULL,
    suspended_at    timestamptz
);
CREATE UNIQUE INDEX tenant_name ON tenant (name);
CREATE UNIQUE INDEX tenant_one_platform ON tenant (platform) WHERE platform;

CREATE TABLE project (
    id         uuid PRIMARY KEY,
    tenant     uuid NOT NULL REFERENCES tenant (id),
    name       text NOT NULL CHECK (length(name) BETWEEN 1 AND 128),
    created_at timestamptz NOT NULL,
    UNIQUE (tenant, name),
    UNIQUE (tenant, id)
);

CREATE TABLE api_key (
    id         uuid PRIMARY KEY,
    tenant     uuid NOT NULL REFERENCES tenant (id),
    project    uuid NOT NULL,
    name       text NOT NULL CHECK (length(name) <= 128),
    -- The public part that finds the row.
    prefix     text NOT NULL UNIQUE CHECK (length(prefix) = 12),
    -- HMAC-SHA-256 of the whole key under the pepper.
    hmac       bytea NOT NULL CHECK (length(hmac) = 32),
    pepper_id  text NOT NULL,
    scopes     text[] NOT NULL,
    created_at timestamptz NOT NULL,
    revoked_at timestamptz,
    -- A key cannot belong to a project of another tenant.
    FOREIGN KEY (tenant, project) REFERENCES project (tenant, id)
);
CREATE INDEX api_key_tenant ON api_key (tenant, id);

-- The catalogue. It is the operator's and holds nothing of a tenant.
CREATE TABLE model (
    name                  text PRIMARY KEY CHECK (length(name) BETWEEN 1 AND 128),
    digest                bytea NOT NULL CHECK (length(digest) = 32),
    bytes                 bigint NOT NULL CHECK (bytes > 0),
    architecture          text NOT NULL,
    context_window        integer NOT NULL CHECK (context_window > 0),
    default_output_tokens integer NOT NULL CHECK (default_output_tokens > 0),
    chat                  boolean NOT NULL,
    source                text NOT NULL,
    licence               text NOT NULL,
    created_at            timestamptz NOT NULL
);

-- Every run of every worker process, kept because receipts name epochs.
CREATE TABLE worker (
    epoch          uuid PRIMARY KEY,
    role           text NOT NULL CHECK (role IN ('prefill', 'decode')),
    model_digest   bytea NOT NULL CHECK (length(model_digest) = 32),
    geometry       bytea NOT NULL CHECK (length(geometry) = 32),
    address        text NOT NULL,
    fabric_address text NOT NULL,
    build          text NOT NULL,
    cpu_level      text NOT NULL,
    pages          integer NOT NULL CHECK (pages > 0),
    page_tokens    integer NOT NULL CHECK (page_tokens > 0),
    registered_at  timestamptz NOT NULL,
    ended_at       timestamptz
);

-- What a replica is about to serve. A row goes away when the receipt is written.
CREATE TABLE intent (
    request_id      uuid PRIMARY KEY,
    tenant          uuid NOT NULL,
    project         uuid NOT NULL,
    api_key         uuid NOT NULL,
    replica         uuid NOT NULL,
    reserved_tokens bigint NOT NULL CHECK (reserved_tokens >= 0),
    created_at      timestamptz NOT NULL
);
CREATE INDEX intent_replica ON intent (replica);

-- One wide row per request. Request ids start with the time, so ranges of them
-- are ranges of time, and the primary key holds across partitions.
CREATE TABLE usage (
    request_id      uuid NOT NULL PRIMARY KEY,
    tenant          uuid NOT NULL,
    project         uuid NOT NULL,
    api_key         uuid NOT NULL,
    model           text NOT NULL,
    model_digest    bytea NOT NULL,
    surface         text NOT NULL,
    streamed        boolean NOT NULL,
    outcome         text NOT NULL,
    withheld        boolean NOT NULL,
    finish_reason   text NOT NULL,
    input_tokens    bigint NOT NULL CHECK (input_tokens >= 0),
    cached_tokens   bigint NOT NULL CHECK (cached_tokens >= 0 AND cached_tokens <= input_tokens),
    output_tokens   bigint NOT NULL CHECK (output_tokens >= 0),
    -- What the legs computed, charged or not.
    prefill_tokens  bigint NOT NULL CHECK (prefill_tokens >= 0),
    decode_tokens   bigint NOT NULL CHECK (decode_tokens >= 0),
    received_at     timestamptz NOT NULL,
    admitted_at     timestamptz,
    first_byte_at   timestamptz,
    finished_at     timestamptz NOT NULL,
    receipt_digest  bytea NOT NULL CHECK (length(receipt_digest) = 32)
) PARTITION BY RANGE (request_id);
CREATE INDEX usage_tenant ON usage (tenant, request_id);

-- The body is what is hashed; the other columns are derived from it.
CREATE TABLE receipt (
    request_id     uuid NOT NULL PRIMARY KEY,
    tenant         uuid NOT NULL,
    body           bytea NOT NULL CHECK (length(body) BETWEEN 1 AND 65536),
    digest         bytea NOT NULL CHECK (length(digest) = 32),
    model_digest   bytea NOT NULL,
    prefill_epoch  uuid,
    decode_epoch   uuid,
    -- Null: that leg measured nothing.
    edge_tokens    bigint,
    prefill_tokens bigint,
    decode_tokens  bigint,
    output_tokens  bigint NOT NULL,
    outcome        text NOT NULL,
    withheld       boolean NOT NULL,
    -- The dense number of the tenant and the place in the log, given by the
    -- sequencer.
    seq            bigint,
    leaf_index     bigint,
    -- Ciphertext of the private part, where there is one.
    private        bytea
) PARTITION BY RANGE (request_id);
CREATE INDEX receipt_tenant ON receipt (tenant, request_id);
CREATE INDEX receipt_unnumbered ON receipt (request_id) WHERE seq IS NULL;

-- Row-level security. FORCE makes the owner subject to it too, so that the
-- functions below see exactly what a policy grants to bulkhead_owner.
ALTER TABLE tenant  ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
ALTER TABLE project ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
ALTER TABLE api_key ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
ALTER TABLE intent  ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
ALTER TABLE usage   ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
ALTER TABLE receipt ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;

CREATE POLICY owner ON tenant  TO bulkhead_owner USING (true);
CREATE POLICY owner ON project TO bulkhead_owner USING (true);
CREATE POLICY owner ON api_key TO bulkhead_owner USING (true);

-- Whether the transaction is bound to the operator's tenant.
-- +goose StatementBegin
CREATE FUNCTION current_is_platform() RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = bulkhead, pg_temp
AS $$ SELECT EXISTS (SELECT FROM tenant WHERE id = current_tenant() AND platform) $$;
-- +goose StatementEnd

CREATE POLICY app ON tenant TO bulkhead_app
    USING (id = current_tenant() OR current_is_platform())
    WITH CHECK (current_is_platform() AND NOT platform);
CREATE POLICY app ON project TO bulkhead_app USING (tenant = current_tenant());
CREATE POLICY app ON api_key TO bulkhead_app USING (tenant = current_tenant());
CREATE POLICY app ON usage   FOR SELECT TO bulkhead_app USING (tenant = current_tenant());
CREATE POLICY app ON receipt FOR SELECT TO bulkhead_app USING (tenant = current_tenant());

CREATE POLICY settle ON intent  TO bulkhead_settle USING (true);
CREATE POLICY settle ON usage   TO bulkhead_settle USING (true);
CREATE POLICY settle ON receipt TO bulkhead_settle USING (true);

-- The one thing that bulkhead_auth can do.
-- +goose StatementBegin
CREATE FUNCTION find_api_key(wanted text)
RETURNS TABLE (id uuid, tenant uuid, project uuid, hmac bytea, pepper_id text, scopes text[],
               isolation_epoch bigint, revoked boolean, suspended boolean)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = bulkhead, pg_temp
AS $$
    SELECT k.id, k.tenant, k.project, k.hmac, k.pepper_id, k.scopes,
           t.isolation_epoch, k.revoked_at IS NOT NULL, t.suspended_at IS NOT NULL
    FROM api_key k JOIN tenant t ON t.id = k.tenant
    WHERE k.prefix = wanted
$$;
-- +goose StatementEnd

-- Makes the operator's tenant in a database that has none, and tells whether it
-- did. Of several callers at once one does.
-- +goose StatementBegin
CREATE FUNCTION bootstrap_platform(wanted uuid, label text, at timestamptz) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = bulkhead, pg_temp
AS $$
BEGIN
    LOCK TABLE tenant IN SHARE ROW EXCLUSIVE MODE;
    IF EXISTS (SELECT FROM tenant WHERE platform) THEN
        RETURN false;
    END IF;
    INSERT INTO tenant (id, name, platform, created_at) VALUES (wanted, label, true, at);
    RETURN true;
END
$$;
-- +goose StatementEnd

-- Makes the monthly partitions of this month and the given number of months
-- after it. A range that already has rows in the default partition is left there.
-- +goose StatementBegin
CREATE FUNCTION extend_partitions(months integer) RETURNS integer
LANGUAGE plpgsql SET search_path = bulkhead, pg_temp
AS $$
DECLARE
    parent text;
    month  timestamptz;
    part   text;
    made   integer := 0;
BEGIN
    FOREACH parent IN ARRAY ARRAY['usage', 'receipt'] LOOP
        FOR month IN SELECT date_trunc('month', now(), 'UTC') + make_interval(months => m)
                     FROM generate_series(0, months) m LOOP
            part := format('%s_%s', parent, to_char(month AT TIME ZONE 'UTC', 'YYYY_MM'));
            CONTINUE WHEN to_regclass(format('bulkhead.%I', part)) IS NOT NULL;
            BEGIN
                EXECUTE format('CREATE TABLE %I PARTITION OF %I FOR VALUES FROM (%L) TO (%L)', part, parent,
                    first_id_of(month), first_id_of(date_trunc('month', month, 'UTC') + interval '1 month'));
                EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY', part);
                made := made + 1;
            EXCEPTION WHEN check_violation THEN
                NULL;
            END;
        END LOOP;
    END LOOP;
    RETURN made;
END
$$;
-- +goose StatementEnd

-- The smallest request id of a moment: 48 bits of Unix milliseconds, then zeros.
CREATE FUNCTION first_id_of(at timestamptz) RETURNS uuid
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN rpad(lpad(to_hex(floor(extract(epoch FROM at) * 1000)::bigint), 12, '0'), 32, '0')::uuid;

CREATE TABLE usage_default   PARTITION OF usage DEFAULT;
CREATE TABLE receipt_default PARTITION OF receipt DEFAULT;
ALTER TABLE usage_default   ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
ALTER TABLE receipt_default ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;

-- Rights. What is not granted here nobody but the owner has.
GRANT USAGE ON SCHEMA bulkhead TO bulkhead_app, bulkhead_auth, bulkhead_settle;
GRANT EXECUTE ON FUNCTION find_api_key(text) TO bulkhead_auth;
GRANT EXECUTE ON FUNCTION current_tenant(), current_is_platform(), bootstrap_platform(uuid, text, timestamptz) TO bulkhead_app;
GRANT SELECT, INSERT ON tenant, project, api_key TO bulkhead_app;
GRANT UPDATE (revoked_at) ON api_key TO bulkhead_app;
GRANT SELECT, INSERT, UPDATE ON model, worker TO bulkhead_app;
GRANT SELECT ON usage, receipt TO bulkhead_app;
GRANT SELECT, INSERT, DELETE ON intent TO bulkhead_settle;
GRANT SELECT, INSERT ON usage, receipt TO bulkhead_settle;
