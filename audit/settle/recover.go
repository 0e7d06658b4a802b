package settle

import (
	"context"
	"errors"
	"fmt"

	"bulkhead.dev/audit/receipt"
	"bulkhead.dev/audit/settle/settledb"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/infra/pgdb"
)

// ErrOwnReplica means that a replica was asked to declare itself dead.
var ErrOwnReplica = errors.New("a replica cannot recover its own intents")

// Replicas returns the epochs of replicas that have intents without a receipt:
// live ones, and dead ones that [Settler.Recover] is for.
func (s *Settler) Replicas(ctx context.Context) ([]id.Epoch, error) {
	list, err := settledb.New(s.opt.DB).Replicas(ctx)
	if err != nil {
		return nil, pgdb.Wrap("list replicas with intents", err)
	}
	out := make([]id.Epoch, len(list))
	for i, e := range list {
		out[i] = e
	}
	return out, nil
}

// Recover turns the intents that a dead replica left into receipts with the
// outcome lost and a usage of nothing, and returns how many. The caller has
// proof that the replica is dead; a live one would find its own receipts taken.
func (s *Settler) Recover(ctx context.Context, replica id.Epoch) (int, error) {
	if replica == s.opt.Replica {
		return 0, ErrOwnReplica
	}
	recovered := 0
	for {
		intents, err := settledb.New(s.opt.DB).IntentsOf(ctx, settledb.IntentsOfParams{Replica: replica, Page: int32(s.opt.MaxBatch)})
		if err != nil {
			return recovered, pgdb.Wrap("read intents", err)
		}
		if len(intents) == 0 {
			return recovered, nil
		}
		now := receipt.At(s.opt.Now())
		facts := make([]rows, len(intents))
		for i, in := range intents {
			created := receipt.At(in.CreatedAt)
			facts[i], err = encode(Facts{Receipt: receipt.Receipt{
				Request: in.RequestID, Tenant: in.Tenant, Project: in.Project, Key: in.ApiKey,
				Received: created, Admitted: created, Finished: max(now, created),
				Outcome: receipt.Lost, Replica: replica,
			}})
			if err != nil {
				return recovered, fmt.Errorf("make receipt of a lost request: %w", err)
			}
		}
		stored, err := write(ctx, s.opt.DB, replica, facts, nil)
		if err != nil {
			return recovered, err
		}
		// A request that had a receipt keeps it; its intent is gone now.
		recovered += len(facts) - len(stored)
	}
}
