-- What happened to the pages of every run of a worker; see engine/history. It
-- names owners by tags and leases by random numbers, never a tenant.

-- +goose Up

CREATE TABLE page_history (
    epoch     uuid NOT NULL,
    number    bigint NOT NULL CHECK (number > 0),
    first_seq bigint NOT NULL CHECK (first_seq > 0),
    last_seq  bigint NOT NULL CHECK (last_seq >= first_seq),
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
CREATE INDEX page_history_pages ON page_history (epoch, min_page, max_page);

GRANT SELECT, INSERT ON page_history TO bulkhead_settle;
