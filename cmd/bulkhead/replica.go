package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"bulkhead.dev/audit/settle"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/infra/replica"
	workerv1 "bulkhead.dev/services/gen/bulkhead/worker/v1"
	"bulkhead.dev/tenancy/quota"
)

// openReplica enters this front among the replicas of the database, and begins
// to share the limits of tenants with them.
func (p *platform) openReplica(ctx context.Context) (err error) {
	p.member, err = replica.Join(ctx, replica.Options{DB: p.pools.Quota, Epoch: p.replica, Build: buildText(), Log: p.log, Now: time.Now, Recover: p.recoverReplica})
	if err != nil {
		return err
	}
	p.onClose(func() error {
		ctx, cancel := context.WithTimeout(context.Background(), leaveWithin)
		defer cancel()
		return p.member.Leave(ctx)
	})
	p.quota = quota.New(quota.Options{DB: p.pools.Quota, Replica: p.replica, Fenced: p.member.Fenced, Log: p.log, Now: time.Now})
	running, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- p.quota.Run(running) }()
	p.onClose(func() error { stop(); return <-ended })
	if err := p.quota.WaitReady(ctx); err != nil {
		return fmt.Errorf("learn the limits of tenants: %w", err)
	}
	return nil
}

// endOthers recovers what processes held that died. With a database of our own,
// whoever was here before us held the lock of this data folder and is dead; with
// one that is shared, leases tell.
func (p *platform) endOthers(ctx context.Context) error {
	if p.postgres == nil {
		return nil
	}
	if err := p.member.EndOthers(ctx); err != nil {
		return fmt.Errorf("recover what processes held that died: %w", err)
	}
	// Versions before replicas had leases left intents and nothing else.
	left, err := p.settler.Replicas(ctx)
	if err != nil {
		return fmt.Errorf("look for unfinished requests: %w", err)
	}
	for _, r := range left {
		if r == p.replica {
			continue
		}
		if _, err := p.settler.Recover(ctx, r, p.requestEnded); err != nil {
			return fmt.Errorf("settle unfinished requests: %w", err)
		}
	}
	return nil
}

// leaveWithin bounds the goodbye. Without one the lease ends by itself.
const leaveWithin = 2 * time.Second

// recoverReplica gives every request that a dead replica had admitted the
// receipt that says so, and gives back what the replica held of limits.
func (p *platform) recoverReplica(ctx context.Context, dead id.Epoch) error {
	n, err := p.settler.Recover(ctx, dead, p.requestEnded)
	if n > 0 {
		p.log.InfoContext(ctx, "settled requests of a replica that died", "replica", dead.String(), "requests", n)
	}
	// Also when a worker did not say that it is done: what other requests held
	// is free.
	return errors.Join(err, quota.Recover(ctx, p.pools.Quota, dead))
}

// requestEnded asks the workers of a request of a dead replica whether they are done
// with it. A worker that is gone is.
func (p *platform) requestEnded(ctx context.Context, in settle.Intent) error {
	if p.registry == nil {
		return nil // before there are workers; those of before died with their front
	}
	for _, epoch := range []id.Epoch{in.Prefill, in.Decode} {
		w := p.registry.Worker(epoch)
		if w == nil {
			continue
		}
		ctx, cancel := context.WithTimeout(ctx, endWithin)
		_, err := w.ControlClient.End(ctx, &workerv1.EndRequest{TransferId: in.Transfer[:]})
		cancel()
		if err != nil {
			return fmt.Errorf("worker %s did not say that it is done with a request: %w", epoch, err)
		}
	}
	return nil
}

// endWithin is far above what a step or a chunk takes.
const endWithin = 5 * time.Second
