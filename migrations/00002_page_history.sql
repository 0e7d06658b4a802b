-- What happened to the pages of every run of a worker; see engine/history. It
-- names owners by tags and leases by random numbers, never a tenant.

-- +goose Up

CREATE TABLE page_history (
    epoch     uuid NOT NULL,
    number    bigint NOT NULL CHECK (number > 0),
    first_seq bigint NOT NULL CHECK (first_seq > 0),
    last_seq  bigint NOT NULL CHECK (last_seq >= first_seq),
    -- The highest generation granted up to the end of the block.
    granted   bigint NOT NULL CHECK (granted >= 0),
    -- Null in a gap.
    first_at  timestamptz,
    last_at   timestamptz,
    min_page  bigint,
    max_page  bigint,
    events    integer NOT NULL CHECK (events >= 0),
    gap       boolean NOT NULL CHECK (gap = (events = 0)),
    prev      bytea NOT NULL CHECK (length(prev) = 32),
    hash      bytea NOT NULL CHECK (length(hash) = 32),
    body      bytea NOT NULL,
    PRIMARY KEY (epoch, number)
);
-- The chain does not fork, and a sequence number is in one block.
CREATE UNIQUE INDEX page_history_chain ON page_history (epoch, prev);
CREATE UNIQUE INDEX page_history_seq ON page_history (epoch, first_seq);
-- Where a generation was granted, and where a moment is.
CREATE INDEX page_history_granted ON page_history (epoch, granted, number);
CREATE INDEX page_history_time ON page_history (epoch, last_at, number);

GRANT SELECT, INSERT ON page_history TO bulkhead_settle;
