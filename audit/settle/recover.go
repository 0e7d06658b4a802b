package settle

import (
	"context"
	"errors"
	"fmt"
	"time"

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
//
// ended is asked about each intent, and returns nil when no worker computes anything
// for the request any more. An intent for which it returns an error is left, and
// Recover returns the error when it has dealt with the others.
func (s *Settler) Recover(ctx context.Context, replica id.Epoch, ended func(context.Context, Intent) error) (recovered int, err error) {
	if replica == s.opt.Replica {
		return 0, ErrOwnReplica
	}
	var left error
	for after := (id.Request{}); ; {
		page, err := settledb.New(s.opt.DB).IntentsOf(ctx, settledb.IntentsOfParams{Replica: replica, After: after, Page: int32(s.opt.MaxBatch)})
		if err != nil {
			return recovered, pgdb.Wrap("read intents", err)
		}
		if len(page) == 0 {
			return recovered, left
		}
		after = page[len(page)-1].RequestID
		var facts []rows
		for _, row := range page {
			in := intentOf(row)
			if err := ended(ctx, in); err != nil {
				left = err
				continue
			}
			f, err := encode(lost(in, replica, s.opt.Now()))
			if err != nil {
				return recovered, fmt.Errorf("make receipt of a lost request: %w", err)
			}
			facts = append(facts, f)
		}
		if len(facts) == 0 {
			continue
		}
		stored, err := write(ctx, s.opt.DB, replica, facts, nil)
		if err != nil {
			return recovered, err
		}
		// A request that had a receipt keeps it; its intent is gone now.
		recovered += len(facts) - len(stored)
	}
}

func intentOf(row settledb.IntentsOfRow) Intent {
	in := Intent{Request: row.RequestID, Tenant: row.Tenant, Project: row.Project, Key: row.ApiKey, Reserved: row.ReservedTokens, Created: row.CreatedAt}
	// Null where a replica of an earlier version wrote it: nobody can be asked.
	if row.Transfer != nil && row.PrefillEpoch != nil && row.DecodeEpoch != nil {
		in.Transfer, in.Prefill, in.Decode = *row.Transfer, *row.PrefillEpoch, *row.DecodeEpoch
	}
	return in
}

func lost(in Intent, replica id.Epoch, now time.Time) Facts {
	created := receipt.At(in.Created)
	return Facts{Receipt: receipt.Receipt{
		Request: in.Request, Tenant: in.Tenant, Project: in.Project, Key: in.Key,
		Received: created, Admitted: created, Finished: max(receipt.At(now), created),
		Outcome: receipt.Lost, Replica: replica,
	}}
}
