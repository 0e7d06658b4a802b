-- name: LastBlock :one
SELECT number, last_seq, granted, hash FROM page_history WHERE epoch = @epoch ORDER BY number DESC LIMIT 1;

-- name: BlockHash :one
SELECT hash FROM page_history WHERE epoch = @epoch AND number = @number;

-- name: InsertBlock :exec
INSERT INTO page_history (epoch, number, first_seq, last_seq, granted, first_at, last_at, min_page, max_page, events, gap, prev, hash, body)
VALUES (@epoch, @number, @first_seq, @last_seq, @granted, @first_at, @last_at, @min_page, @max_page, @events, @gap, @prev, @hash, @body);

-- name: Blocks :many
SELECT * FROM page_history WHERE epoch = @epoch AND number > @after ORDER BY number LIMIT @page_size;

-- name: BlocksAfter :many
SELECT number, hash, body FROM page_history
WHERE epoch = @epoch AND number > @after AND (gap OR @page::bigint BETWEEN min_page AND max_page)
ORDER BY number LIMIT @page_size;

-- name: BlocksBefore :many
SELECT number, hash, body FROM page_history
WHERE epoch = @epoch AND number < @before AND (gap OR @page::bigint BETWEEN min_page AND max_page)
ORDER BY number DESC LIMIT @page_size;

-- name: BlockOfGrant :one
SELECT number FROM page_history WHERE epoch = @epoch AND granted >= @generation ORDER BY granted, number LIMIT 1;

-- name: BlockAt :one
SELECT number FROM page_history WHERE epoch = @epoch AND last_at >= @at ORDER BY last_at, number LIMIT 1;
