package pool

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"bulkhead.dev/infra/pgdb"
)

// Execer runs one statement; a pool of database connections.
type Execer interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// Record keeps the row of a worker, so that an epoch in a receipt can be
// looked up when the process is long gone.
func Record(ctx context.Context, db Execer, w *Worker, gone bool, now time.Time) error {
	var ended *time.Time
	if gone {
		ended = &now
	}
	_, err := db.Exec(ctx, `
INSERT INTO worker (epoch, role, model_digest, geometry, address, fabric_address, build, cpu_level, pages, page_tokens, registered_at, ended_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)
ON CONFLICT (epoch) DO UPDATE SET ended_at = excluded.ended_at`,
		[16]byte(w.Epoch), string(w.Role), w.Model[:], w.Geometry[:], w.Address, w.FabricAddress, w.Build, w.CPULevel,
		w.Pages, w.PageTokens, w.Registered, ended)
	return pgdb.Wrap("record worker", err)
}
