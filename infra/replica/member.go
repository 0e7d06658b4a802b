package replica

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"bulkhead.dev/infra/id"
	"bulkhead.dev/infra/pgdb"
)

const (
	// RenewEvery is how often a lease is renewed.
	RenewEvery = 2 * time.Second
	// FenceAfter is how long after its last renewal a replica may use what it
	// holds.
	FenceAfter = 10 * time.Second
	// LeaseFor is how long after its last renewal nobody else may take it.
	LeaseFor = 12 * time.Second

	// lookEvery is how often a replica looks for ended ones.
	lookEvery = time.Second
	// claimFor is how long a claim to recover a replica lasts.
	claimFor = 30 * time.Second
	// askFor bounds a statement of a lease.
	askFor = 2 * time.Second
)

// ErrEnded means that this replica was declared dead by another. It must not
// serve any more.
var ErrEnded = errors.New("this replica was declared dead by another, because it did not renew its lease; it must be started again")

// Options of a Member. DB, Epoch and Now are required.
type Options struct {
	DB      pgdb.DB // a pool of the role bulkhead_settle
	Epoch   id.Epoch
	Address string // where other replicas reach this one; "" is nowhere
	Build   string
	Log     *slog.Logger
	Now     func() time.Time // with a monotonic reading
	// Recover gives back what an ended replica held. It may be called again for
	// the same one, by this process or another, and must come to the same end. nil:
	// this member recovers nobody.
	Recover func(ctx context.Context, ended id.Epoch) error
}

// Member is this process among the replicas. It is safe for concurrent use.
type Member struct {
	opt Options

	mu      sync.Mutex
	renewed time.Time // under mu; when the last renewal that succeeded began
	steady  time.Time // under mu; since when no renewal was late
	ended   bool      // under mu
}

// Join enters this process among the replicas.
func Join(ctx context.Context, o Options) (*Member, error) {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	m := &Member{opt: o}
	began := o.Now()
	_, err := o.DB.Exec(ctx, `INSERT INTO replica (epoch, address, build, started_at, lease_until)
		VALUES ($1, $2, $3, now(), now() + $4)`, [16]byte(o.Epoch), o.Address, o.Build, LeaseFor)
	if err != nil {
		return nil, pgdb.Wrap("join the replicas", err)
	}
	m.renewed, m.steady = began, began
	return m, nil
}

// Epoch returns the epoch of this replica.
func (m *Member) Epoch() id.Epoch { return m.opt.Epoch }

// Fenced reports whether the lease may be over, so that nothing that is held
// under it may be used.
func (m *Member) Fenced() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.ended || m.opt.Now().Sub(m.renewed) >= FenceAfter
}

// Run renews the lease and recovers ended replicas until ctx ends, with the
// error nil, or the lease is lost, with [ErrEnded].
func (m *Member) Run(ctx context.Context) error {
	var recovery sync.WaitGroup
	defer recovery.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if m.opt.Recover != nil {
		recovery.Go(func() { m.lookAfterEnded(ctx) })
	}
	tick := time.NewTicker(RenewEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		if err := m.Renew(ctx); errors.Is(err, ErrEnded) {
			return err
		} else if err != nil && ctx.Err() == nil {
			m.opt.Log.WarnContext(ctx, "the lease of this replica was not renewed", "error", err.Error())
		}
	}
}

// Renew renews the lease once.
func (m *Member) Renew(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, askFor)
	defer cancel()
	began := m.opt.Now()
	tag, err := m.opt.DB.Exec(ctx, `UPDATE replica SET lease_until = now() + $2 WHERE epoch = $1 AND ended_at IS NULL`, [16]byte(m.opt.Epoch), LeaseFor)
	if err != nil {
		return pgdb.Wrap("renew lease", err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if tag.RowsAffected() == 0 {
		m.ended = true
		return ErrEnded
	}
	if began.Sub(m.renewed) >= FenceAfter {
		m.steady = began
	}
	m.renewed = began
	return nil
}

// Leave ends this replica. Another may recover what it still holds at once.
func (m *Member) Leave(ctx context.Context) error {
	m.mu.Lock()
	m.ended = true
	m.mu.Unlock()
	_, err := m.opt.DB.Exec(ctx, `UPDATE replica SET ended_at = now(), lease_until = now() WHERE epoch = $1 AND ended_at IS NULL`, [16]byte(m.opt.Epoch))
	return pgdb.Wrap("leave the replicas", err)
}

// EndOthers declares every other replica dead. The caller has proof: it holds
// the lock of the only data folder that they could run from. What they held is
// recovered before it returns.
func (m *Member) EndOthers(ctx context.Context) error {
	_, err := m.opt.DB.Exec(ctx, `UPDATE replica SET ended_at = now(), lease_until = now(), claimed_until = NULL
		WHERE epoch <> $1 AND recovered_at IS NULL`, [16]byte(m.opt.Epoch))
	if err != nil {
		return pgdb.Wrap("end other replicas", err)
	}
	for {
		found, err := m.recoverOne(ctx)
		if err != nil || !found {
			return err
		}
	}
}

// Live returns the replicas whose lease lasts, this one included.
func (m *Member) Live(ctx context.Context) ([]id.Epoch, error) {
	rows, err := m.opt.DB.Query(ctx, `SELECT epoch FROM replica WHERE ended_at IS NULL AND lease_until > now() ORDER BY epoch`)
	if err != nil {
		return nil, pgdb.Wrap("list replicas", err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowTo[[16]byte])
	if err != nil {
		return nil, pgdb.Wrap("list replicas", err)
	}
	out := make([]id.Epoch, len(list))
	for i, e := range list {
		out[i] = e
	}
	return out, nil
}

// lookAfterEnded recovers ended replicas until ctx ends.
func (m *Member) lookAfterEnded(ctx context.Context) {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if !m.mayRecover() {
			continue
		}
		if _, err := m.recoverOne(ctx); err != nil && ctx.Err() == nil {
			m.opt.Log.WarnContext(ctx, "an ended replica is not recovered yet", "error", err.Error())
		}
	}
}

// mayRecover reports whether every living replica has had the time to renew.
func (m *Member) mayRecover() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.opt.Now()
	return !m.ended && now.Sub(m.steady) >= LeaseFor && now.Sub(m.renewed) < FenceAfter
}

// recoverOne recovers one ended replica if there is one that nobody else has
// claimed.
func (m *Member) recoverOne(ctx context.Context) (bool, error) {
	var ended [16]byte
	err := m.opt.DB.QueryRow(ctx, `
		UPDATE replica SET ended_at = coalesce(ended_at, now()), claimed_by = $1, claimed_until = now() + $2
		WHERE epoch = (SELECT epoch FROM replica
			WHERE recovered_at IS NULL AND epoch <> $1 AND (ended_at IS NOT NULL OR lease_until < now()) AND coalesce(claimed_until < now(), true)
			ORDER BY lease_until LIMIT 1 FOR UPDATE SKIP LOCKED)
		RETURNING epoch`, [16]byte(m.opt.Epoch), claimFor).Scan(&ended)
	if errors.Is(err, pgx.ErrNoRows) {
		return false, nil
	}
	if err != nil {
		return false, pgdb.Wrap("look for ended replicas", err)
	}
	within, cancel := context.WithTimeout(ctx, claimFor)
	defer cancel()
	if err := m.opt.Recover(within, ended); err != nil {
		// Somebody tries again, soon.
		_, giveUp := m.opt.DB.Exec(ctx, `UPDATE replica SET claimed_until = now() + $3 WHERE epoch = $1 AND claimed_by = $2`, ended, [16]byte(m.opt.Epoch), lookEvery)
		return true, errors.Join(fmt.Errorf("recover %s: %w", id.Epoch(ended), err), pgdb.Wrap("give up claim", giveUp))
	}
	_, err = m.opt.DB.Exec(ctx, `UPDATE replica SET recovered_at = now() WHERE epoch = $1`, ended)
	m.opt.Log.InfoContext(ctx, "recovered a replica that ended", "replica", id.Epoch(ended).String())
	return true, pgdb.Wrap("close replica", err)
}
