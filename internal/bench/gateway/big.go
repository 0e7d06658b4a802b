package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	keysOfTenant = 10
	// goalBig is how much more a request may cost in the big one.
	goalBig = 1.2
	// explained is how many requests are made to see the plans of.
	explained = 2 * benchTenants * keysPerTenant
)

// fill makes tenants, projects, keys that nobody has, and limits.
const fill = `
SET session_replication_role = replica;
CREATE TEMP TABLE made AS SELECT gen_random_uuid() AS tenant, gen_random_uuid() AS project, n FROM generate_series(1, %[1]d) n;
INSERT INTO bulkhead.tenant (id, name, created_at) SELECT tenant, 'made ' || n, now() FROM made;
INSERT INTO bulkhead.project (id, tenant, name, created_at) SELECT project, tenant, 'default', now() FROM made;
INSERT INTO bulkhead.api_key (id, tenant, project, name, prefix, hmac, pepper_id, scopes, created_at)
	SELECT gen_random_uuid(), tenant, project, 'made', lpad(to_hex(n * %[2]d + k), 12, '0'), sha256(int8send(n * %[2]d + k)), 'none', '{inference}', now()
	FROM made, generate_series(0, %[2]d - 1) k;
INSERT INTO bulkhead.quota_limit (id, tenant, meter, period, amount, platform, created_at)
	SELECT gen_random_uuid(), tenant, meter, period, 100000000000, true, now()
	FROM made, (VALUES ('requests', 'minute'), ('tokens', 'minute'), ('concurrent', 'none'), ('tokens', 'day'), ('tokens', 'month'), ('money', 'month')) AS d (meter, period);
`

// compareBig measures the same requests on a small and on a big database, in
// turns, and compares the plans of their statements.
func (b *bench) compareBig(ctx context.Context, _ *database) (err error) {
	var targets []*target
	var seen []plans
	for i, name := range []string{"bench_small", "bench_big"} {
		d, err := b.makeDatabase(ctx, name)
		if err != nil {
			return err
		}
		if err := b.fill(ctx, name, b.sizes[i]); err != nil {
			return fmt.Errorf("fill %s: %w", name, err)
		}
		got, err := b.explain(ctx, d)
		if err != nil {
			return err
		}
		seen = append(seen, got)
		p, err := b.start(ctx, d, 0)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, p.stop()) }()
		targets = append(targets, p.target())
	}
	var all [][]*window
	for i := range b.rounds {
		order := slices.Clone(targets)
		if i%2 == 1 { // neither is always first
			slices.Reverse(order)
		}
		r, err := b.round(ctx, load{tokens: plainTokens, conns: b.conns}, order...)
		if err != nil {
			return err
		}
		if i%2 == 1 {
			slices.Reverse(r)
		}
		all = append(all, r)
	}
	cost := func(w *window) float64 { return w.per(gatewayProc) + w.per(postgresProc) }
	ratio := over(all, func(r []*window) float64 { return cost(r[1]) / cost(r[0]) })
	what := fmt.Sprintf("%d keys of %d tenants against %d of %d", b.sizes[1]*keysOfTenant, b.sizes[1], b.sizes[0]*keysOfTenant, b.sizes[0])
	b.table.judge(what+": CPU of a request", fmt.Sprintf("<= %.1f times", goalBig), ratio <= goalBig, "%.2f times (%.3f ms against %.3f)", ratio,
		over(all, func(r []*window) float64 { return cost(r[1]) }), over(all, func(r []*window) float64 { return cost(r[0]) }))
	slower := over(all, func(r []*window) float64 { return quantile(r[1].whole, 0.5) / quantile(r[0].whole, 0.5) })
	b.table.judge("- p50 of answers", fmt.Sprintf("<= %.1f times", goalBig), slower <= goalBig, "%.2f times", slower)
	different := seen[0].differences(seen[1])
	for _, d := range different {
		fmt.Fprintln(os.Stderr, d)
	}
	b.table.judge("- plans of the statements of a request", "the same", len(different) == 0, "%d statements, %d differ", len(seen[1]), len(different))
	return nil
}

func (b *bench) fill(ctx context.Context, name string, tenants int) error {
	if err := b.exec(ctx, name, fmt.Sprintf(fill, tenants, keysOfTenant)); err != nil {
		return err
	}
	return b.exec(ctx, name, "VACUUM (ANALYZE)")
}

// explain makes the server write down the plan of every statement of some
// requests, the statements within functions too.
func (b *bench) explain(ctx context.Context, d *database) (plans, error) {
	set := func(settings ...string) error {
		return b.query(ctx, "postgres", func(c *pgx.Conn) error {
			var errs []error
			for _, s := range settings {
				_, err := c.Exec(ctx, "ALTER DATABASE "+d.name+" "+s)
				errs = append(errs, err)
			}
			return errors.Join(errs...)
		})
	}
	if err := b.exec(ctx, "postgres", "LOAD 'auto_explain'"); err != nil {
		return nil, fmt.Errorf("PostgreSQL lacks its extension auto_explain: %w", err)
	}
	if err := set("SET session_preload_libraries = 'auto_explain'", "SET auto_explain.log_min_duration = 0", "SET auto_explain.log_nested_statements = on",
		"SET auto_explain.log_format = 'json'"); err != nil {
		return nil, err
	}
	var text []byte
	err := b.with(ctx, d, 0, func(p *platform) error {
		before, err := os.Stat(b.postgres.Log())
		if err != nil {
			return err
		}
		t, l := p.target(), load{tokens: plainTokens}
		bodies := l.bodies(t.model)
		for range explained {
			if a := t.ask(ctx, l, bodies, time.Now()); a.kind != "" {
				return fmt.Errorf("%s: %s", a.kind, a.detail)
			}
		}
		all, err := os.ReadFile(b.postgres.Log())
		if err == nil {
			text = all[before.Size():]
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return readPlans(text), set("RESET ALL")
}
