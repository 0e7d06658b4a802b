package gateway

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"bulkhead.dev/audit/receipt"
	"bulkhead.dev/audit/settle"
	"bulkhead.dev/engine/pool"
	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/infra/replica"
	"bulkhead.dev/tenancy"
	"bulkhead.dev/tenancy/quota"
)

// Catalog says which models there are; *tenancy.Catalog.
type Catalog interface {
	// Models returns all of them by name.
	Models(ctx context.Context) ([]tenancy.Model, error)
	// ModelByName returns one, or an *apperr.Error of kind NotFound.
	ModelByName(ctx context.Context, name string) (tenancy.Model, error)
}

// Prompts makes token ids for a model.
type Prompts interface {
	Prompter(ctx context.Context, digest [32]byte) (*Prompter, error)
}

// Workers are the live workers; *pool.Registry.
type Workers interface {
	Pick(model [32]byte) (pool.Pair, error)
	EffectiveContext(model [32]byte) int
}

// Quota decides what tenants may use; a *quota.Book.
type Quota interface {
	// Reserve takes all that a request may use from every limit that applies,
	// or returns an *apperr.Error and takes nothing.
	Reserve(ctx context.Context, a quota.Ask) (*quota.Reservation, error)
}

// Ticket is an intent on its way to be durable; *settle.Ticket.
type Ticket interface {
	// Done is closed when the intent is durable or cannot become it.
	Done() <-chan struct{}
}

// Evidence makes usage and receipts durable; a *settle.Settler.
type Evidence interface {
	// Ready returns an *apperr.Error while no new request may be admitted.
	Ready() error
	// Intend records that a request was admitted.
	Intend(settle.Intent) Ticket
	// Settle returns when usage and receipt are durable, or with an
	// *apperr.Error when that took too long; the facts are then kept and
	// written later, marked as withheld.
	Settle(ctx context.Context, f settle.Facts) error
}

// Observer is told what happens; *telemetry.Metrics.
type Observer interface {
	Admitted() func()
	FirstToken(d time.Duration)
	NextToken(d time.Duration)
	Refused(leg, reason string)
	Settled(d time.Duration, prompt, output int)
	Withheld()
}

// Gateway is the pipeline. All fields are required; none changes after the
// first request.
type Gateway struct {
	Catalog  Catalog
	Prompts  Prompts
	Pool     Workers
	Quota    Quota
	Evidence Evidence
	Observer Observer
	Log      *slog.Logger
	Now      func() time.Time
	// Seed draws the seed of a request that names none.
	Seed func() uint64
	// DigestKey returns the key under which the digests of a tenant's
	// responses are made, and its name.
	DigestKey func(id.Tenant) (string, [32]byte)
	// Replica is the epoch of this gateway.
	Replica id.Epoch

	ackWithin  time.Duration  // 0 is ackTimeout
	background sync.WaitGroup // settlements that no caller waits for
}

// Models returns the models that the principal may use.
func (g *Gateway) Models(ctx context.Context, _ tenancy.Principal) ([]tenancy.Model, error) {
	return g.Catalog.Models(ctx)
}

// Model returns one model that the principal may use, or an *apperr.Error of
// kind NotFound.
func (g *Gateway) Model(ctx context.Context, _ tenancy.Principal, name string) (tenancy.Model, error) {
	return g.Catalog.ModelByName(ctx, name)
}

// Wait returns when every settlement that runs in the background is done.
func (g *Gateway) Wait() { g.background.Wait() }

// Generate admits a request and returns when both legs have proved that the
// answer will be computed from exactly this prompt. Until then nothing may be
// sent to the client; what may be sent after it comes out of the Stream. The
// error is an *apperr.Error. The caller must call Close.
func (g *Gateway) Generate(ctx context.Context, p tenancy.Principal, r Request) (*Stream, error) {
	if err := p.Require(tenancy.ScopeInference); err != nil {
		return nil, err
	}
	prep, err := g.prepare(ctx, p, &r)
	if err != nil {
		return nil, apperr.From(err)
	}
	held, err := g.Quota.Reserve(ctx, quota.Ask{Tenant: p.Tenant, Project: p.Project, Key: p.Key,
		Model: prep.model.Name, Digest: prep.model.Digest, Input: len(prep.ids), Output: prep.maxOutput})
	if err != nil {
		return nil, apperr.From(err)
	}
	pair, err := g.pick(prep.model.Digest)
	if err != nil {
		held.Close()
		return nil, apperr.From(err)
	}
	s := g.admit(ctx, p, r, prep, pair, held)
	if err := s.open(); err != nil {
		return nil, s.end(err)
	}
	return s, nil
}

// pick finds workers, if what they do can be recorded.
func (g *Gateway) pick(model [32]byte) (pool.Pair, error) {
	if err := g.Evidence.Ready(); err != nil {
		return pool.Pair{}, err
	}
	return g.Pool.Pick(model)
}

// admit makes the stream. From here on the request leaves exactly one receipt.
func (g *Gateway) admit(ctx context.Context, p tenancy.Principal, r Request, prep *prepared, pair pool.Pair, held *quota.Reservation) *Stream {
	now := g.Now()
	keyID, key := g.DigestKey(p.Tenant)
	s := &Stream{g: g, pair: pair, req: r, prep: prep, owner: p.Owner, held: held, ids: newIDs(), out: g.Observer.Admitted(),
		rec: &record{principal: p, req: r, prep: prep, pair: pair, replica: g.Replica, admitted: now, hasher: receipt.NewHasher(keyID, key)}}
	s.ctx, s.cancel = context.WithCancelCause(ctx)
	s.ticket = g.Evidence.Intend(settle.Intent{
		Request: r.ID, Tenant: p.Tenant, Project: p.Project, Key: p.Key,
		Reserved: int64(len(prep.ids) + prep.maxOutput), Created: now,
		Holds: held.Holds(), Transfer: s.ids.transfer, Prefill: pair.Prefill.Epoch, Decode: pair.Decode.Epoch,
	})
	// A reaped worker ends its requests at once, whatever the sockets say.
	stopped := make(chan struct{})
	s.unwatch = sync.OnceFunc(func() { close(stopped) })
	g.background.Go(func() {
		durable := s.ticket.Done()
		late := time.NewTimer(replica.FenceAfter)
		defer late.Stop()
		for {
			select {
			case <-pair.Prefill.Gone():
				// After the commit prefill has nothing left to give.
				if !s.committed.Load() {
					s.cancel(&failure{leg: legPrefill, reason: reasonLost, cause: errWorkerLost})
				}
			case <-pair.Decode.Gone():
				s.cancel(&failure{leg: legDecode, reason: reasonLost, cause: errWorkerLost})
			case <-durable:
				durable = nil
				late.Stop()
				continue
			case <-late.C:
				// Nobody else knows of the request, and the lease under which it
				// holds its part of the limits may end.
				s.cancel(&failure{leg: legGateway, reason: reasonNoEvidence, cause: errNoIntent})
			case <-stopped:
			}
			return
		}
	})
	return s
}

// errNoIntent means that the intent of a request did not become durable.
var errNoIntent = errors.New("the intent of the request could not be made durable")

// explain replaces the error of a canceled call by the reason of the
// cancellation, if the platform itself canceled.
func explain(ctx context.Context, err error) *failure {
	f := fail(legDecode, err)
	if ctx.Err() == nil {
		return f.notOurs()
	}
	if c, ok := errors.AsType[*failure](context.Cause(ctx)); ok && (f.canceled() || f.reason == reasonTransport) {
		if c.facts == nil && f.leg == c.leg {
			c.facts = f.facts
		}
		return c
	}
	if f.reason == reasonTransport || f.reason == reasonDeadline {
		if errors.Is(context.Cause(ctx), context.DeadlineExceeded) {
			f.reason = reasonDeadline
		} else {
			f.reason = reasonCanceled
		}
	}
	return f
}
