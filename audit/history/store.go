package history

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"bulkhead.dev/audit/history/historydb"
	"bulkhead.dev/engine/history"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/infra/pgdb"
)

// pageSize is how many blocks are read at once; a block is seldom above 100 kB.
const pageSize = 16

// Store keeps blocks in PostgreSQL. It uses the role bulkhead_settle.
type Store struct {
	db pgdb.DB
	q  *historydb.Queries
	// one holds an element while blocks are stored. Receipts go through the same
	// few connections and come first: all workers together take one of them.
	one chan struct{}
}

// NewStore makes a store.
func NewStore(db pgdb.DB) *Store {
	return &Store{db: db, q: historydb.New(db), one: make(chan struct{}, 1)}
}

// Append stores the blocks that follow on what is stored of the epoch, and
// returns the number of the last one. Blocks that were stored before are passed
// over if they are the same. history.ErrBlock means that they do not fit
// together, or that something else is stored in their place.
func (s *Store) Append(ctx context.Context, epoch id.Epoch, blocks [][]byte) (stored uint64, err error) {
	select {
	case s.one <- struct{}{}:
		defer func() { <-s.one }()
	case <-ctx.Done():
		return 0, fmt.Errorf("store page history: %w", ctx.Err())
	}
	err = pgdb.InTx(ctx, s.db, func(tx pgx.Tx) error {
		q := s.q.WithTx(tx)
		link, granted, err := last(ctx, q, epoch)
		if err != nil {
			return err
		}
		for _, b := range blocks {
			h, err := history.DecodeHeader(b)
			if err != nil {
				return err
			}
			if h.Number <= link.Number {
				if err := same(ctx, q, epoch, h.Number, b); err != nil {
					return err
				}
				continue
			}
			if h, link, err = link.Next(epoch, b); err != nil {
				return err
			}
			granted = max(granted, h.Granted)
			if err := q.InsertBlock(ctx, row(h, granted, b)); err != nil {
				return pgdb.Wrap("store a block of page history", err)
			}
		}
		stored = link.Number
		return nil
	})
	if err != nil {
		return 0, err
	}
	return stored, nil
}

func last(ctx context.Context, q *historydb.Queries, epoch id.Epoch) (l history.Link, granted uint64, err error) {
	r, err := q.LastBlock(ctx, epoch)
	if errors.Is(err, pgx.ErrNoRows) {
		return l, 0, nil
	}
	if err != nil {
		return l, 0, pgdb.Wrap("find the last block of page history", err)
	}
	return history.Link{Number: uint64(r.Number), LastSeq: uint64(r.LastSeq), Hash: [32]byte(r.Hash)}, uint64(r.Granted), nil
}

// same checks that a block that was delivered again is what is stored.
func same(ctx context.Context, q *historydb.Queries, epoch id.Epoch, number uint64, block []byte) error {
	hash, err := q.BlockHash(ctx, historydb.BlockHashParams{Epoch: epoch, Number: int64(number)})
	if err != nil {
		return pgdb.Wrap("read a block of page history", err)
	}
	if [32]byte(hash) != history.Hash(block) {
		return fmt.Errorf("%w: block %d of %v is stored with another content", history.ErrBlock, number, epoch)
	}
	return nil
}

// row makes the columns of a block. granted is the highest generation until its
// end.
func row(h history.Header, granted uint64, block []byte) historydb.InsertBlockParams {
	hash := history.Hash(block)
	r := historydb.InsertBlockParams{
		Epoch: h.Epoch, Number: int64(h.Number), FirstSeq: int64(h.FirstSeq), LastSeq: int64(h.LastSeq), Granted: int64(granted),
		Events: int32(h.Events), Gap: h.Gap, Prev: h.Prev[:], Hash: hash[:], Body: block,
	}
	if !h.Gap {
		r.FirstAt, r.LastAt = &h.FirstAt, &h.LastAt
		r.MinPage, r.MaxPage = pgtype.Int8{Int64: int64(h.MinPage), Valid: true}, pgtype.Int8{Int64: int64(h.MaxPage), Valid: true}
	}
	return r
}

// Verify checks everything that is stored of an epoch: that the chain is whole,
// and that the columns say what the blocks do. It returns where the chain ends.
// history.ErrBlock means that something was changed or taken away.
func (s *Store) Verify(ctx context.Context, epoch id.Epoch) (link history.Link, err error) {
	var granted uint64
	for {
		rows, err := s.q.Blocks(ctx, historydb.BlocksParams{Epoch: epoch, After: int64(link.Number), PageSize: pageSize})
		if err != nil {
			return link, pgdb.Wrap("read page history", err)
		}
		for _, r := range rows {
			h, next, err := link.Next(epoch, r.Body)
			if err != nil {
				return link, err
			}
			granted = max(granted, h.Granted)
			if !alike(row(h, granted, r.Body), historydb.InsertBlockParams(r)) {
				return link, fmt.Errorf("%w: block %d of %v is stored under columns of another", history.ErrBlock, h.Number, epoch)
			}
			link = next
		}
		if len(rows) < pageSize {
			return link, nil
		}
	}
}

func alike(a, b historydb.InsertBlockParams) bool {
	return a.Epoch == b.Epoch && a.Number == b.Number && a.FirstSeq == b.FirstSeq && a.LastSeq == b.LastSeq && a.Granted == b.Granted &&
		a.Events == b.Events && a.Gap == b.Gap && a.MinPage == b.MinPage && a.MaxPage == b.MaxPage &&
		bytes.Equal(a.Prev, b.Prev) && bytes.Equal(a.Hash, b.Hash) && sameTime(a.FirstAt, b.FirstAt) && sameTime(a.LastAt, b.LastAt)
}

func sameTime(a, b *time.Time) bool { return (a == nil) == (b == nil) && (a == nil || a.Equal(*b)) }
