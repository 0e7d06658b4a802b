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
	"bulkhead.dev/tenancy"
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

// Ticket is an intent on its way to be durable; *settle.Ticket.
type Ticket interface {
	Wait(ctx context.Context) error
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
	if err := g.Evidence.Ready(); err != nil {
		return nil, apperr.From(err)
	}
	pair, err := g.Pool.Pick(prep.model.Digest)
	if err != nil {
		return nil, apperr.From(err)
	}
	s := g.admit(ctx, p, r, prep, pair)
	if err := s.open(); err != nil {
		return nil, s.end(err)
	}
	return s, nil
}

// admit makes the stream. From here on the request leaves exactly one receipt.
func (g *Gateway) admit(ctx context.Context, p tenancy.Principal, r Request, prep *prepared, pair pool.Pair) *Stream {
	now := g.Now()
	keyID, key := g.DigestKey(p.Tenant)
	s := &Stream{g: g, pair: pair, req: r, prep: prep, owner: p.Owner, ids: newIDs(), out: g.Observer.Admitted(),
		rec: &record{principal: p, req: r, prep: prep, pair: pair, replica: g.Replica, admitted: now, hasher: receipt.NewHasher(keyID, key)}}
	s.ctx, s.cancel = context.WithCancelCause(ctx)
	s.ticket = g.Evidence.Intend(settle.Intent{
		Request: r.ID, Tenant: p.Tenant, Project: p.Project, Key: p.Key,
		Reserved: int64(len(prep.ids) + prep.maxOutput), Created: now,
	})
	// A reaped worker ends its requests at once, whatever the sockets say.
	stopped := make(chan struct{})
	s.unwatch = sync.OnceFunc(func() { close(stopped) })
	g.background.Go(func() {
		select {
		case <-pair.Prefill.Gone():
			// After the commit prefill has nothing left to give.
			if !s.committed.Load() {
				s.cancel(&failure{leg: legPrefill, reason: reasonLost, cause: errWorkerLost})
			}
		case <-pair.Decode.Gone():
			s.cancel(&failure{leg: legDecode, reason: reasonLost, cause: errWorkerLost})
		case <-stopped:
		}
	})
	return s
}

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
