package quota

import (
	"context"
	"errors"

	"bulkhead.dev/infra/id"
	"bulkhead.dev/infra/pgdb"
)

// ErrHeld means that requests of an ended replica are not settled yet, so that
// what they may still use cannot be given back.
var ErrHeld = errors.New("unsettled requests of an ended replica still hold parts of limits")

// Recover gives back what an ended replica held. It is safe to call it again,
// and has to be called again after [ErrHeld].
func Recover(ctx context.Context, db pgdb.DB, ended id.Epoch) error {
	var left int64
	if err := db.QueryRow(ctx, "SELECT quota_recover($1)", [16]byte(ended)).Scan(&left); err != nil {
		return pgdb.Wrap("recover slices", err)
	}
	if left > 0 {
		return ErrHeld
	}
	return nil
}
