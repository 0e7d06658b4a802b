-- Replicas of the front and their leases; limits of tenants and what was taken
-- from them. The protocol is in infra/replica and tenancy/quota.

-- +goose Up

-- Every run of every front. A replica whose lease is over can be declared dead,
-- and what it held is then given back by another.
CREATE TABLE replica (
    epoch         uuid PRIMARY KEY,
    address       text NOT NULL,
    build         text NOT NULL,
    started_at    timestamptz NOT NULL,
    lease_until   timestamptz NOT NULL,
    -- It left, or was declared dead. It never comes back.
    ended_at      timestamptz,
    -- Who recovers what it held, and until when nobody else does.
    claimed_by    uuid,
    claimed_until timestamptz,
    recovered_at  timestamptz,
    -- The number of its last exchange of limits.
    exchange      bigint NOT NULL DEFAULT 0
);
CREATE INDEX replica_unrecovered ON replica (lease_until) WHERE recovered_at IS NULL;

-- So that a limit cannot name the key of another tenant.
ALTER TABLE api_key ADD CONSTRAINT api_key_of_tenant UNIQUE (tenant, id);

-- A limit of a tenant, or of a part of it: null stands for all projects, keys
-- and models.
CREATE TABLE quota_limit (
    id            uuid PRIMARY KEY,
    tenant        uuid NOT NULL REFERENCES tenant (id),
    project       uuid,
    api_key       uuid,
    model         text CHECK (length(model) BETWEEN 1 AND 128),
    meter         text NOT NULL CHECK (meter IN ('requests', 'concurrent', 'tokens', 'money')),
    period        text NOT NULL CHECK (period IN ('none', 'minute', 'day', 'month')),
    -- Requests, weighted tokens, or millionths of the currency.
    amount        bigint NOT NULL CHECK (amount BETWEEN 0 AND 100000000000000),
    -- Where to warn; null: nowhere.
    soft          bigint CHECK (soft BETWEEN 0 AND amount),
    -- What a token counts.
    input_weight  integer NOT NULL DEFAULT 1 CHECK (input_weight BETWEEN 0 AND 1000),
    output_weight integer NOT NULL DEFAULT 1 CHECK (output_weight BETWEEN 0 AND 1000),
    -- Set by the operator; tenants see it and cannot change it.
    platform      boolean NOT NULL,
    created_at    timestamptz NOT NULL,
    version       bigint NOT NULL DEFAULT 1,
    CHECK ((meter = 'concurrent') = (period = 'none')),
    CHECK (period <> 'minute' OR amount <= 100000000000), -- refill arithmetic stays in 64 bits
    CHECK (meter <> 'money' OR period <> 'minute'),
    CHECK (project IS NULL OR api_key IS NULL),
    FOREIGN KEY (tenant, project) REFERENCES project (tenant, id),
    FOREIGN KEY (tenant, api_key) REFERENCES api_key (tenant, id),
    UNIQUE NULLS NOT DISTINCT (tenant, project, api_key, model, meter, period, input_weight, output_weight, platform)
);

-- What is taken from a limit. One row, written by whoever takes or gives back.
CREATE TABLE quota_bucket (
    limit_id     uuid PRIMARY KEY REFERENCES quota_limit (id) ON DELETE CASCADE,
    tenant       uuid NOT NULL,
    -- Of the day or month; 1970 where there are none.
    window_start timestamptz NOT NULL,
    -- Taken and spent, where that drains by time; up to drained_at it has.
    used         bigint NOT NULL DEFAULT 0 CHECK (used >= 0),
    drained_at   timestamptz NOT NULL,
    -- In the slices of replicas, and in days and months what was spent out of them.
    held         bigint NOT NULL DEFAULT 0 CHECK (held >= 0),
    recalled_at  timestamptz,
    warned_at    timestamptz
);
CREATE INDEX quota_bucket_tenant ON quota_bucket (tenant);

-- What a replica has taken from a limit and not given back.
CREATE TABLE quota_slice (
    replica      uuid NOT NULL REFERENCES replica (epoch),
    limit_id     uuid NOT NULL REFERENCES quota_limit (id) ON DELETE CASCADE,
    window_start timestamptz NOT NULL,
    tenant       uuid NOT NULL,
    held         bigint NOT NULL CHECK (held >= 0),
    -- Totals of what the replica reported, where taken drains by time.
    spent        bigint NOT NULL DEFAULT 0,
    refunded     bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (replica, limit_id, window_start)
);
CREATE INDEX quota_slice_tenant ON quota_slice (tenant);
CREATE INDEX quota_slice_limit ON quota_slice (limit_id);

-- Of what a replica holds, what its settled requests spent; written in the
-- transaction of their usage. It has no foreign keys, so that nothing but the database
-- being away can keep a receipt from being written.
CREATE TABLE quota_spend (
    replica      uuid NOT NULL,
    limit_id     uuid NOT NULL,
    window_start timestamptz NOT NULL,
    tenant       uuid NOT NULL,
    amount       bigint NOT NULL,
    PRIMARY KEY (replica, limit_id, window_start)
);
CREATE INDEX quota_spend_tenant ON quota_spend (tenant, limit_id);

-- List prices. The latest that is in effect counts.
CREATE TABLE price (
    id                 uuid PRIMARY KEY,
    model              text NOT NULL CHECK (length(model) BETWEEN 1 AND 128),
    -- Null: every revision.
    model_digest       bytea CHECK (length(model_digest) = 32),
    meter              text NOT NULL CHECK (meter IN ('input', 'cached_input', 'output')),
    effective_from     timestamptz NOT NULL,
    -- Millionths of the currency for a million tokens.
    micros_per_million bigint NOT NULL CHECK (micros_per_million BETWEEN 0 AND 1000000000000),
    created_at         timestamptz NOT NULL,
    UNIQUE NULLS NOT DISTINCT (model, model_digest, meter, effective_from)
);

-- What an intent holds, so that it is not given back while it may still run, and
-- whom to ask.
ALTER TABLE intent ADD limits uuid[] NOT NULL DEFAULT '{}', ADD amounts bigint[] NOT NULL DEFAULT '{}',
    ADD transfer uuid, ADD prefill_epoch uuid, ADD decode_epoch uuid;

-- The clock of all limits. Tests replace it.
CREATE FUNCTION quota_now() RETURNS timestamptz LANGUAGE sql VOLATILE RETURN clock_timestamp();

-- Where the window of a period that includes a moment begins and ends.
CREATE FUNCTION quota_window(period text, at timestamptz, OUT starts timestamptz, OUT ends timestamptz)
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN period IN ('day', 'month')
    THEN ROW (date_trunc(period, at, 'UTC'), (date_trunc(period, at AT TIME ZONE 'UTC') + ('1 ' || period)::interval) AT TIME ZONE 'UTC')
    ELSE ROW ('1970-01-01 UTC'::timestamptz, 'infinity'::timestamptz) END;

-- Lets spent drain from a bucket up to a moment, and begins its new window.
-- +goose StatementBegin
CREATE FUNCTION quota_advance(b quota_bucket, l quota_limit, at timestamptz) RETURNS quota_bucket
LANGUAGE plpgsql IMMUTABLE SET search_path = bulkhead, pg_temp
AS $$
DECLARE
    starts  timestamptz := (quota_window(l.period, at)).starts;
    elapsed bigint;
    drained bigint;
BEGIN
    -- Clocks can step back, and a window that has begun does not end then.
    IF starts > b.window_start THEN
        b.window_start := starts;
        b.held := 0;
        b.warned_at := NULL;
    END IF;
    IF l.period = 'minute' AND at > b.drained_at THEN
        elapsed := least(extract(epoch FROM at - b.drained_at) * 1000000, 60000000)::bigint;
        drained := l.amount * elapsed / 60000000;
        IF drained >= b.used OR elapsed = 60000000 THEN
            b.used := greatest(b.used - drained, 0);
            b.drained_at := at;
        ELSIF drained > 0 THEN
            b.used := b.used - drained;
            -- What was too little for a whole unit drains next time. Rounding up
            -- the time drains less, never more.
            b.drained_at := b.drained_at + make_interval(secs => ceil(drained * 60000000.0 / l.amount) / 1000000);
        END IF;
    END IF;
    RETURN b;
END
$$;
-- +goose StatementEnd

-- quota_exchange is the one thing that a replica does with its slices: for each
-- limit it says what it keeps of its slice, what it has spent and got back since
-- it began, and what it wants more: at least `least`, all of `need` if there
-- is, and `extra` while there is plenty. Every number but the wishes is absolute, so that
-- asking again after a lost answer changes nothing; and every exchange has a
-- higher number than the one before, so that one which was given up cannot come true after
-- the next. A limit that is not in the answer does not exist any more.
-- +goose StatementBegin
CREATE FUNCTION quota_exchange(me uuid, number bigint, wanted uuid[], keep_of timestamptz[], keep bigint[], spend bigint[], refund bigint[],
    least_of bigint[], need bigint[], extra bigint[])
RETURNS TABLE (limit_id uuid, window_start timestamptz, ends_in_us bigint, slice bigint, told_spent bigint, told_refunded bigint,
               amount bigint, free bigint, others bigint, wait_us bigint, warn boolean)
LANGUAGE plpgsql SET search_path = bulkhead, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    t     timestamptz := quota_now();
    i     integer;
    l     quota_limit;
    b     quota_bucket;
    s     quota_slice;
    grant_ bigint;
    taken bigint;
BEGIN
    -- A replica that was declared dead holds nothing, and takes nothing.
    UPDATE replica SET exchange = number WHERE epoch = me AND ended_at IS NULL AND exchange < number;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'the replica has ended, or this is not its latest exchange' USING ERRCODE = 'BH001';
    END IF;
    -- In one order, so that two replicas never wait for each other.
    FOR i IN SELECT o FROM generate_subscripts(wanted, 1) o ORDER BY wanted[o] LOOP
        SELECT * INTO l FROM quota_limit q WHERE q.id = wanted[i] FOR KEY SHARE;
        CONTINUE WHEN NOT FOUND;
        SELECT * INTO b FROM quota_bucket q WHERE q.limit_id = l.id FOR UPDATE;
        IF NOT FOUND THEN
            INSERT INTO quota_bucket (limit_id, tenant, window_start, drained_at)
                VALUES (l.id, l.tenant, (quota_window(l.period, t)).starts, t) ON CONFLICT DO NOTHING;
            SELECT * INTO b FROM quota_bucket q WHERE q.limit_id = l.id FOR UPDATE;
        END IF;
        b := quota_advance(b, l, t);
        SELECT * INTO s FROM quota_slice q WHERE q.replica = me AND q.limit_id = l.id AND q.window_start = b.window_start FOR UPDATE;
        IF NOT FOUND THEN
            s := ROW (me, l.id, b.window_start, l.tenant, 0, 0, 0);
        END IF;
        IF l.period = 'minute' THEN
            -- What was spent leaves the slice and begins to drain.
            taken := greatest(spend[i] - s.spent, 0);
            s.held := greatest(s.held - taken, 0);
            b.held := greatest(b.held - taken, 0);
            b.used := greatest(b.used + taken - greatest(refund[i] - s.refunded, 0), 0);
            s.spent := greatest(s.spent, spend[i]);
            s.refunded := greatest(s.refunded, refund[i]);
        END IF;
        -- What the replica does not know of, or does not need, goes back.
        taken := CASE WHEN keep_of[i] = b.window_start THEN least(keep[i], s.held) ELSE 0 END;
        IF taken < s.held AND b.recalled_at > clock_timestamp() - interval '1 second' THEN
            PERFORM pg_notify('bulkhead_quota', 'free ' || l.id); -- somebody waits for it
        END IF;
        b.held := greatest(b.held - (s.held - taken), 0);
        s.held := taken;

        free := l.amount - b.used - b.held;
        grant_ := CASE WHEN need[i] + extra[i] = 0 OR free <= 0 THEN 0
            WHEN free >= need[i] THEN need[i] + least(extra[i], (free - need[i]) / 8)
            WHEN least_of[i] > 0 AND free >= least_of[i] THEN free
            ELSE 0 END;
        -- Others give back what they do not use when they hear of it.
        IF grant_ < need[i] AND b.held > s.held AND coalesce(b.recalled_at < clock_timestamp() - interval '50 ms', true) THEN
            b.recalled_at := clock_timestamp();
            PERFORM pg_notify('bulkhead_quota', 'recall ' || l.id);
        END IF;
        b.held := b.held + grant_;
        s.held := s.held + grant_;
        free := free - grant_;
        warn := l.soft IS NOT NULL AND b.warned_at IS NULL AND l.amount - free > l.soft;
        IF warn THEN
            b.warned_at := t;
        END IF;
        UPDATE quota_bucket q SET window_start = b.window_start, used = b.used, drained_at = b.drained_at, held = b.held,
            recalled_at = b.recalled_at, warned_at = b.warned_at WHERE q.limit_id = l.id;
        INSERT INTO quota_slice AS q VALUES (s.*)
            ON CONFLICT (replica, limit_id, window_start) DO UPDATE SET held = s.held, spent = s.spent, refunded = s.refunded;

        limit_id := l.id;
        window_start := b.window_start;
        ends_in_us := CASE WHEN l.period IN ('day', 'month') THEN (extract(epoch FROM (quota_window(l.period, t)).ends - t) * 1000000)::bigint END;
        slice := s.held;
        told_spent := s.spent;
        told_refunded := s.refunded;
        amount := l.amount;
        others := b.held - s.held;
        wait_us := CASE
            WHEN l.period = 'none' OR greatest(least_of[i], 1) > l.amount THEN NULL
            WHEN l.period = 'minute' THEN ceil(greatest(greatest(least_of[i], 1) - free, 1) * 60000000.0 / l.amount)::bigint
            ELSE ends_in_us END;
        RETURN NEXT;
    END LOOP;
END
$$;
-- +goose StatementEnd

-- Gives back what a dead replica held, except what its unsettled requests may
-- still use. Returns how many slices are left; call it again when those
-- requests are settled.
-- +goose StatementBegin
CREATE FUNCTION quota_recover(dead uuid) RETURNS bigint
LANGUAGE plpgsql SET search_path = bulkhead, pg_temp
AS $$
DECLARE
    s       quota_slice;
    period_ text;
    spent_  bigint;
    pending bigint;
    remain  bigint := 0;
BEGIN
    -- Waits for an exchange under way, and nothing comes after it.
    PERFORM FROM replica WHERE epoch = dead AND ended_at IS NOT NULL FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'replica has not ended' USING ERRCODE = 'BH002';
    END IF;
    FOR s IN SELECT * FROM quota_slice q WHERE q.replica = dead ORDER BY q.limit_id, q.window_start LOOP
        SELECT period INTO period_ FROM quota_limit WHERE id = s.limit_id FOR KEY SHARE;
        CONTINUE WHEN NOT FOUND;
        PERFORM FROM quota_bucket q WHERE q.limit_id = s.limit_id FOR UPDATE;
        SELECT * INTO s FROM quota_slice q WHERE q.replica = dead AND q.limit_id = s.limit_id AND q.window_start = s.window_start FOR UPDATE;
        CONTINUE WHEN NOT FOUND;
        IF period_ = 'minute' THEN
            -- Nobody knows what of it was spent. All of it counts, and drains.
            UPDATE quota_bucket q SET held = greatest(q.held - s.held, 0), used = q.used + s.held WHERE q.limit_id = s.limit_id;
            DELETE FROM quota_slice q WHERE q.replica = dead AND q.limit_id = s.limit_id AND q.window_start = s.window_start;
            CONTINUE;
        END IF;
        SELECT coalesce(sum(c.amount), 0) INTO pending
            FROM intent n CROSS JOIN unnest(n.limits, n.amounts) AS c (limit_id, amount)
            WHERE n.replica = dead AND c.limit_id = s.limit_id;
        SELECT coalesce(sum(q.amount), 0) INTO spent_
            FROM quota_spend q WHERE q.replica = dead AND q.limit_id = s.limit_id AND q.window_start = s.window_start;
        pending := least(pending, greatest(s.held - spent_, 0));
        UPDATE quota_bucket q SET held = greatest(q.held - greatest(s.held - spent_ - pending, 0), 0)
            WHERE q.limit_id = s.limit_id AND q.window_start = s.window_start;
        IF pending > 0 THEN
            UPDATE quota_slice q SET held = spent_ + pending
                WHERE q.replica = dead AND q.limit_id = s.limit_id AND q.window_start = s.window_start;
            remain := remain + 1;
        ELSE
            DELETE FROM quota_slice q WHERE q.replica = dead AND q.limit_id = s.limit_id AND q.window_start = s.window_start;
        END IF;
    END LOOP;
    IF remain = 0 THEN
        DELETE FROM quota_spend WHERE replica = dead;
    END IF;
    RETURN remain;
END
$$;
-- +goose StatementEnd

-- Tells replicas that the limits of a tenant changed, or a price.
-- +goose StatementBegin
CREATE FUNCTION quota_limit_changed() RETURNS trigger
LANGUAGE plpgsql SET search_path = bulkhead, pg_temp
AS $$
BEGIN
    PERFORM pg_notify('bulkhead_quota', 'limits ' || coalesce(NEW.tenant, OLD.tenant));
    RETURN NULL;
END
$$;
-- +goose StatementEnd
-- +goose StatementBegin
CREATE FUNCTION price_changed() RETURNS trigger
LANGUAGE plpgsql SET search_path = bulkhead, pg_temp
AS $$
BEGIN
    PERFORM pg_notify('bulkhead_quota', 'prices');
    RETURN NULL;
END
$$;
-- +goose StatementEnd
CREATE TRIGGER changed AFTER INSERT OR UPDATE OR DELETE ON quota_limit FOR EACH ROW EXECUTE FUNCTION quota_limit_changed();
CREATE TRIGGER changed AFTER INSERT OR UPDATE OR DELETE ON price FOR EACH STATEMENT EXECUTE FUNCTION price_changed();

ALTER TABLE quota_limit  ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
ALTER TABLE quota_bucket ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
ALTER TABLE quota_slice  ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
ALTER TABLE quota_spend  ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
ALTER TABLE price        ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;

CREATE POLICY owner ON quota_limit TO bulkhead_owner USING (true);
CREATE POLICY owner ON quota_bucket TO bulkhead_owner USING (true);
CREATE POLICY owner ON quota_slice TO bulkhead_owner USING (true);
CREATE POLICY owner ON quota_spend TO bulkhead_owner USING (true);
CREATE POLICY settle ON quota_limit  TO bulkhead_settle USING (true);
CREATE POLICY settle ON quota_bucket TO bulkhead_settle USING (true);
CREATE POLICY settle ON quota_slice  TO bulkhead_settle USING (true);
CREATE POLICY settle ON quota_spend  TO bulkhead_settle USING (true);
CREATE POLICY settle ON price        TO bulkhead_settle USING (true);

-- A tenant reads all limits that bind it and changes its own; the operator's are
-- the operator's.
CREATE POLICY app_read  ON quota_limit FOR SELECT TO bulkhead_app USING (tenant = current_tenant() OR current_is_platform());
CREATE POLICY app_make  ON quota_limit FOR INSERT TO bulkhead_app WITH CHECK (current_is_platform() OR (tenant = current_tenant() AND NOT platform));
CREATE POLICY app_write ON quota_limit FOR UPDATE TO bulkhead_app USING (current_is_platform() OR (tenant = current_tenant() AND NOT platform))
    WITH CHECK (current_is_platform() OR (tenant = current_tenant() AND NOT platform));
CREATE POLICY app_drop  ON quota_limit FOR DELETE TO bulkhead_app USING (current_is_platform() OR (tenant = current_tenant() AND NOT platform));
CREATE POLICY app ON quota_bucket FOR SELECT TO bulkhead_app USING (tenant = current_tenant() OR current_is_platform());
CREATE POLICY app ON quota_slice  FOR SELECT TO bulkhead_app USING (tenant = current_tenant() OR current_is_platform());
CREATE POLICY app ON quota_spend  FOR SELECT TO bulkhead_app USING (tenant = current_tenant() OR current_is_platform());
CREATE POLICY app_read ON price FOR SELECT TO bulkhead_app USING (true);
CREATE POLICY app_make ON price FOR INSERT TO bulkhead_app WITH CHECK (current_is_platform());

GRANT SELECT, INSERT, UPDATE ON replica TO bulkhead_settle;
GRANT SELECT ON replica TO bulkhead_app;
-- Locking a row takes the right to update it.
GRANT SELECT, UPDATE (version) ON quota_limit TO bulkhead_settle;
GRANT SELECT, INSERT, UPDATE ON quota_bucket TO bulkhead_settle;
GRANT SELECT, INSERT, UPDATE, DELETE ON quota_slice, quota_spend TO bulkhead_settle;
GRANT SELECT ON price TO bulkhead_settle;
GRANT SELECT, INSERT, DELETE, UPDATE (amount, soft, version) ON quota_limit TO bulkhead_app;
GRANT SELECT ON quota_bucket, quota_slice, quota_spend TO bulkhead_app;
GRANT SELECT, INSERT ON price TO bulkhead_app;
GRANT EXECUTE ON FUNCTION quota_now(), quota_window(text, timestamptz), quota_advance(quota_bucket, quota_limit, timestamptz) TO bulkhead_settle, bulkhead_app;
GRANT EXECUTE ON FUNCTION quota_exchange(uuid, bigint, uuid[], timestamptz[], bigint[], bigint[], bigint[], bigint[], bigint[], bigint[]), quota_recover(uuid) TO bulkhead_settle;

-- No tenant is without limits.
-- +goose StatementBegin
CREATE FUNCTION quota_defaults(wanted uuid, at timestamptz) RETURNS void
LANGUAGE sql SET search_path = bulkhead, pg_temp
AS $$
    INSERT INTO quota_limit (id, tenant, meter, period, amount, soft, platform, created_at)
    SELECT gen_random_uuid(), wanted, meter, period, amount, soft, true, at FROM (VALUES
        ('requests',   'minute', 1000::bigint, NULL::bigint),
        ('tokens',     'minute', 1000000, NULL),
        ('concurrent', 'none',   64, NULL),
        ('tokens',     'day',    100000000, NULL),
        ('tokens',     'month',  1000000000, NULL),
        ('money',      'month',  100000000, 80000000)
    ) AS d (meter, period, amount, soft)
    ON CONFLICT DO NOTHING
$$;
-- +goose StatementEnd
GRANT EXECUTE ON FUNCTION quota_defaults(uuid, timestamptz) TO bulkhead_app;
SELECT quota_defaults(id, now()) FROM tenant;
