package worker

import (
	"context"
	"slices"
	"sync"

	"bulkhead.dev/infra/id"
	workerv1 "bulkhead.dev/services/gen/bulkhead/worker/v1"
)

// maxEnded is how many ended calls are remembered for a gateway that asks.
const maxEnded = 1 << 12

// calls knows which transfers are being served, and how the last ones ended. A
// gateway that gave a request up asks whether its leg has let go of everything.
type calls struct {
	mu    sync.Mutex
	known map[id.Transfer]*call
	order []id.Transfer // oldest first
}

type call struct {
	done  chan struct{}
	facts *workerv1.LegFacts // set before done closes; nil for a call that never came
}

// begin notes that a transfer is being served; the caller says when it is no
// more, once. It refuses a transfer that was given up before it came.
func (c *calls) begin(t id.Transfer) (end func(*workerv1.LegFacts), err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if old := c.known[t]; old != nil {
		select {
		case <-old.done:
			if old.facts == nil {
				return nil, refuse(Canceled, "the gateway gave the transfer up before")
			}
		default:
		}
		return func(*workerv1.LegFacts) {}, nil // a duplicate, which others refuse
	}
	x := &call{done: make(chan struct{})}
	c.note(t, x)
	return func(f *workerv1.LegFacts) { x.facts = f; close(x.done) }, nil
}

// note remembers a call, and forgets the oldest of those that have ended beyond
// maxEnded. Callers hold mu.
func (c *calls) note(t id.Transfer, x *call) {
	if c.known == nil {
		c.known = map[id.Transfer]*call{}
	}
	c.known[t] = x
	c.order = append(c.order, t)
	for at := 0; len(c.order) > maxEnded && at < len(c.order); {
		select {
		case <-c.known[c.order[at]].done:
			delete(c.known, c.order[at])
			c.order = slices.Delete(c.order, at, at+1)
		default:
			at++ // it runs still
		}
	}
}

// wait returns when a transfer is not served any more, with what was measured.
// A transfer that is not known is never served from here on; its facts are nil.
func (c *calls) wait(ctx context.Context, t id.Transfer) (*workerv1.LegFacts, error) {
	c.mu.Lock()
	x := c.known[t]
	if x == nil {
		x = &call{done: make(chan struct{})}
		close(x.done)
		c.note(t, x)
	}
	c.mu.Unlock()
	select {
	case <-x.done:
		return x.facts, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}
