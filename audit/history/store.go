package history

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"bulkhead.dev/engine/history"
	"bulkhead.dev/engine/kv"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/infra/pgdb"
)

// Store keeps blocks in PostgreSQL. It uses the role bulkhead_settle.
type Store struct{ db pgdb.DB }

// NewStore makes a store.
func NewStore(db pgdb.DB) *Store { return &Store{db} }

// Append stores the blocks that follow on what is stored of the epoch, and
// returns the number of the last one. Blocks that were stored before are passed
// over if they are the same. history.ErrBlock means that they do not fit
// together, or that something else is stored in their place.
func (s *Store) Append(ctx context.Context, epoch id.Epoch, blocks [][]byte) (stored uint64, err error) {
	err = pgdb.InTx(ctx, s.db, func(tx pgx.Tx) error {
		link, err := lastOf(ctx, tx, epoch)
		if err != nil {
			return err
		}
		for _, b := range blocks {
			h, err := history.DecodeHeader(b)
			if err != nil {
				return err
			}
			if h.Number <= link.Number {
				if err := same(ctx, tx, epoch, h.Number, b); err != nil {
					return err
				}
				continue
			}
			if h, link, err = link.Next(epoch, b); err != nil {
				return err
			}
			if err := insert(ctx, tx, h, b); err != nil {
				return err
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

func lastOf(ctx context.Context, tx pgx.Tx, epoch id.Epoch) (l history.Link, err error) {
	var number, last int64
	var hash []byte
	err = tx.QueryRow(ctx, `SELECT number, last_seq, hash FROM page_history WHERE epoch = $1 ORDER BY number DESC LIMIT 1`,
		[16]byte(epoch)).Scan(&number, &last, &hash)
	if errors.Is(err, pgx.ErrNoRows) {
		return history.Link{}, nil
	}
	if err != nil {
		return l, pgdb.Wrap("find the last block of page history", err)
	}
	return history.Link{Number: uint64(number), LastSeq: uint64(last), Hash: [32]byte(hash)}, nil
}

// same checks that a block that was delivered again is what is stored.
func same(ctx context.Context, tx pgx.Tx, epoch id.Epoch, number uint64, block []byte) error {
	var hash []byte
	err := tx.QueryRow(ctx, `SELECT hash FROM page_history WHERE epoch = $1 AND number = $2`, [16]byte(epoch), int64(number)).Scan(&hash)
	if err != nil {
		return pgdb.Wrap("read a block of page history", err)
	}
	if [32]byte(hash) != history.Hash(block) {
		return fmt.Errorf("%w: block %d of %v is stored with another content", history.ErrBlock, number, epoch)
	}
	return nil
}

func insert(ctx context.Context, tx pgx.Tx, h history.Header, block []byte) error {
	var firstAt, lastAt *time.Time
	var minPage, maxPage *int64
	if !h.Gap {
		lo, hi := int64(h.MinPage), int64(h.MaxPage)
		firstAt, lastAt, minPage, maxPage = &h.FirstAt, &h.LastAt, &lo, &hi
	}
	hash := history.Hash(block)
	_, err := tx.Exec(ctx, `
INSERT INTO page_history (epoch, number, first_seq, last_seq, first_at, last_at, min_page, max_page, events, gap, prev, hash, body)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)`,
		[16]byte(h.Epoch), int64(h.Number), int64(h.FirstSeq), int64(h.LastSeq), firstAt, lastAt, minPage, maxPage,
		int32(h.Events), h.Gap, h.Prev[:], hash[:], block)
	return pgdb.Wrap("store a block of page history", err)
}

// Tenure is the time for which somebody held a page. Times are zero for what is
// not recorded, or has not happened.
type Tenure struct {
	Generation uint64
	Owner      id.Owner
	Lease      id.Lease
	Granted    time.Time
	// AtGrant is when the page was wiped for this tenure; Ahead when it was wiped
	// after it, before anybody else had it.
	AtGrant, Ahead time.Time
	LastWrite      time.Time // sealed
	Quarantined    time.Time
	Reason         kv.QuarantineReason
	Freed          time.Time // given back, or out of quarantine
}

// Past is what is known of a page.
type Past struct {
	Tenures []Tenure // in order of generation
	// Gaps are ranges of events of the worker that were lost. What happened to
	// the page in them is unknown.
	Gaps [][2]uint64
}

// Of returns the past of one page of a run of a worker.
func (s *Store) Of(ctx context.Context, epoch id.Epoch, page uint32) (p Past, err error) {
	rows, err := s.db.Query(ctx, `
SELECT body FROM page_history WHERE epoch = $1 AND (gap OR ($2 BETWEEN min_page AND max_page)) ORDER BY number`, [16]byte(epoch), int64(page))
	if err != nil {
		return p, pgdb.Wrap("read page history", err)
	}
	var body []byte
	_, err = pgx.ForEachRow(rows, []any{&body}, func() error {
		h, events, err := history.Decode(body)
		if err != nil {
			return err
		}
		if h.Gap {
			p.Gaps = append(p.Gaps, [2]uint64{h.FirstSeq, h.LastSeq})
		}
		for _, e := range events {
			if page >= e.First && page-e.First < e.Count {
				p.take(e)
			}
		}
		return nil
	})
	return p, pgdb.Wrap("read page history", err)
}

// take adds an event to the tenure that it belongs to.
func (p *Past) take(e history.Event) {
	n := len(p.Tenures) - 1
	if n < 0 || p.Tenures[n].Generation != e.Generation {
		// Its beginning may be lost.
		p.Tenures = append(p.Tenures, Tenure{Generation: e.Generation, Owner: e.Owner, Lease: e.Lease})
		n++
	}
	t := &p.Tenures[n]
	switch e.Kind {
	case kv.EventGrant:
		t.Granted = e.At
	case kv.EventScrub:
		if e.Method == kv.Ahead {
			t.Ahead = e.At
		} else {
			t.AtGrant = e.At
		}
	case kv.EventSeal:
		t.LastWrite = e.At
	case kv.EventQuarantine:
		t.Quarantined, t.Reason = e.At, e.Reason
	case kv.EventFree, kv.EventClear:
		t.Freed = e.At
	}
}

// Before returns the tenure in front of the one with the generation, and whether
// nothing is missing between them.
func (p Past) Before(generation uint64) (t Tenure, sure bool) {
	for _, x := range p.Tenures {
		if x.Generation >= generation {
			break
		}
		t = x
	}
	return t, len(p.Gaps) == 0
}
