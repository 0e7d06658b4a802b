package quota

import (
	"context"
	"encoding/hex"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"bulkhead.dev/infra/id"
	"bulkhead.dev/infra/pgdb"
)

const (
	channel = "bulkhead_quota"
	// pingEvery is how often the connection that hears of changes is proved to
	// be alive.
	pingEvery = time.Second
	// listenAgain is the pause after it broke.
	listenAgain = 250 * time.Millisecond
)

// listen hears of changes of limits and prices and of recalls until ctx ends.
// What is remembered is forgotten whenever something may have been missed.
func (b *Book) listen(ctx context.Context) {
	var first sync.Once
	for ctx.Err() == nil {
		err := b.hear(ctx, &first)
		b.rules.lost()
		if err != nil && ctx.Err() == nil {
			b.opt.Log.WarnContext(ctx, "changes of limits are not heard", "error", err.Error())
		}
		select {
		case <-ctx.Done():
		case <-time.After(listenAgain):
		}
	}
}

func (b *Book) hear(ctx context.Context, first *sync.Once) error {
	pooled, err := b.opt.DB.Acquire(ctx)
	if err != nil {
		return pgdb.Wrap("get a connection to listen on", err)
	}
	// It is not given back: its subscription would go with it.
	conn := pooled.Hijack()
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	if _, err := conn.Exec(ctx, "LISTEN "+channel); err != nil {
		return pgdb.Wrap("listen", err)
	}
	b.rules.forgetAll()
	for {
		// Everything that was sent before the answer to a ping comes before it.
		began := b.opt.Now()
		within, cancel := context.WithTimeout(ctx, askFor)
		err := conn.Ping(within)
		cancel()
		if err != nil {
			return pgdb.Wrap("listen", err)
		}
		if err := b.takeIn(ctx, conn, time.Millisecond); err != nil {
			return err
		}
		b.rules.alive(began)
		first.Do(func() { close(b.hears) })
		if err := b.takeIn(ctx, conn, pingEvery); err != nil {
			return err
		}
	}
}

// takeIn handles notifications for so long.
func (b *Book) takeIn(ctx context.Context, conn *pgx.Conn, d time.Duration) error {
	within, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	for {
		n, err := conn.WaitForNotification(within)
		if err != nil {
			if within.Err() != nil && !conn.IsClosed() {
				return ctx.Err()
			}
			return pgdb.Wrap("listen", err)
		}
		b.handle(n.Payload)
	}
}

func (b *Book) handle(payload string) {
	what, which, _ := strings.Cut(payload, " ")
	raw, err := hex.DecodeString(strings.ReplaceAll(which, "-", ""))
	if err != nil || (what != "prices" && len(raw) != 16) {
		return // of another version
	}
	switch what {
	case "prices":
		b.rules.forgetPrices()
	case "limits":
		b.rules.forget(id.Tenant(raw))
	case "free":
		b.mu.Lock()
		defer b.mu.Unlock()
		for _, w := range b.waiters {
			if slices.ContainsFunc(w.needs, func(n need) bool { return n.limit.ID == id.Limit(raw) }) {
				w.notYet = time.Time{}
				b.poke()
			}
		}
	case "recall":
		b.mu.Lock()
		defer b.mu.Unlock()
		s := b.slices[id.Limit(raw)]
		if s == nil {
			return
		}
		s.owed = b.opt.Now().Add(owedFor)
		if s.avail > 0 {
			s.recall = true
			b.urge(s)
		}
	}
}
