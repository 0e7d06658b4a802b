// Package audit reads evidence: the receipts that audit/settle has written in
// the format of audit/receipt.
package audit

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"

	"bulkhead.dev/audit/receipt"
	"bulkhead.dev/audit/settle/settledb"
	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/infra/pgdb"
)

// Reader fetches receipts of one tenant at a time. It is safe for concurrent
// use.
type Reader struct{ db pgdb.DB }

// NewReader makes a reader over a pool of the role bulkhead_app.
func NewReader(db pgdb.DB) *Reader { return &Reader{db: db} }

// Stored is a receipt as it is stored.
type Stored struct {
	Body   []byte         // the bytes that were hashed
	Digest receipt.Digest // SHA-256 of Body, checked on reading
}

// ErrDamaged means that the stored bytes do not have the stored digest.
var ErrDamaged = errors.New("a stored receipt does not match its digest")

// Get returns the receipt of a request of the tenant. Errors are *apperr.Error:
// NotFound with receipt_not_found for a request that has none or belongs to
// somebody else, which cannot be told apart.
func (r *Reader) Get(ctx context.Context, tenant id.Tenant, request id.Request) (Stored, error) {
	var s Stored
	err := pgdb.WithTenant(ctx, r.db, tenant, func(tx pgx.Tx) error {
		row, err := settledb.New(tx).Receipt(ctx, request)
		if err != nil {
			return err
		}
		s.Body, s.Digest = row.Body, receipt.Digest(row.Digest)
		return nil
	})
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return Stored{}, apperr.New(apperr.NotFound, "receipt_not_found", "There is no receipt with this id.")
	case errors.Is(err, context.Canceled): // the caller went away; the database is fine
		return Stored{}, apperr.From(err)
	case pgdb.IsUnavailable(err):
		return Stored{}, apperr.Wrap(pgdb.Wrap("read receipt", err), apperr.Unavailable, "database_unavailable",
			"The platform cannot reach its database now.")
	case err != nil:
		return Stored{}, apperr.From(pgdb.Wrap("read receipt", err))
	case receipt.DigestOf(s.Body) != s.Digest:
		return Stored{}, apperr.From(ErrDamaged)
	}
	return s, nil
}
