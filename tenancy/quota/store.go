package quota

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/infra/pgdb"
)

const limitColumns = `id, tenant, project, api_key, coalesce(model, ''), meter, period, amount, coalesce(soft, 0),
	input_weight, output_weight, platform, created_at, version`

func scanLimit(row pgx.CollectableRow) (*Limit, error) {
	l := &Limit{}
	return l, row.Scan(l.columns()...)
}

// columns are where limitColumns are scanned to.
func (l *Limit) columns() []any {
	return []any{(*[16]byte)(&l.ID), (*[16]byte)(&l.Tenant), (*nullID)(&l.Project), (*nullID)(&l.Key), &l.Model, &l.Meter, &l.Period,
		&l.Amount, &l.Soft, &l.InputWeight, &l.OutputWeight, &l.Platform, &l.Created, &l.Version}
}

// nullID is a uuid whose null is the zero id.
type nullID [16]byte

// ScanUUID implements pgtype.UUIDScanner.
func (n *nullID) ScanUUID(v pgtype.UUID) error {
	*n = v.Bytes // zero where it is null
	return nil
}

func orNull[T ~[16]byte](v T) *[16]byte {
	if v == *new(T) {
		return nil
	}
	return new([16]byte(v))
}

// Validate returns an *apperr.Error of kind Invalid that says what is wrong with
// a limit that somebody wants to set.
func (l *Limit) Validate() error {
	bad := func(param, format string, args ...any) error {
		return apperr.New(apperr.Invalid, "invalid_limit", format, args...).WithParam(param)
	}
	switch l.Meter {
	case Requests, Concurrent, Tokens, Money:
	default:
		return bad("meter", "There is no such meter; the meters are requests, concurrent, tokens and money.")
	}
	switch l.Period {
	case None, Minute, Day, Month:
	default:
		return bad("period", "There is no such period; the periods are none, minute, day and month.")
	}
	const most, mostRate = 100_000_000_000_000, 100_000_000_000
	switch {
	case (l.Meter == Concurrent) != (l.Period == None):
		return bad("period", "Concurrent requests have the period none, and nothing else has.")
	case l.Meter == Money && l.Period == Minute:
		return bad("period", "Money is limited by the day or the month.")
	case l.Amount < 0 || l.Amount > most || (l.Period == Minute && l.Amount > mostRate):
		return bad("amount", "A limit is between 0 and %d, by the minute between 0 and %d.", int64(most), int64(mostRate))
	case l.Soft < 0 || l.Soft > l.Amount:
		return bad("soft", "A warning is somewhere between 0 and the limit.")
	case l.InputWeight < 0 || l.InputWeight > 1000 || l.OutputWeight < 0 || l.OutputWeight > 1000:
		return bad("input_weight", "Weights are between 0 and 1,000.")
	case l.Meter != Tokens && (l.InputWeight != 1 || l.OutputWeight != 1):
		return bad("input_weight", "Only tokens have weights.")
	case l.Project != id.Project{} && l.Key != id.Key{}:
		return bad("project", "A limit is for a project or for a key, not for both.")
	}
	return nil
}

// Set writes a limit within a transaction that is bound to the tenant, or to the
// platform. A limit for the same thing (tenant, project, key, model, meter, period,
// weights, and whose it is) is changed, otherwise one is made with the id of l. It
// returns the limit as it was, nil for a new one, and as it is.
func Set(ctx context.Context, tx pgx.Tx, l Limit) (before, after *Limit, err error) {
	if err := l.Validate(); err != nil {
		return nil, nil, err
	}
	rows, err := tx.Query(ctx, `SELECT `+limitColumns+` FROM quota_limit WHERE tenant = $1 AND project IS NOT DISTINCT FROM $2
		AND api_key IS NOT DISTINCT FROM $3 AND model IS NOT DISTINCT FROM nullif($4, '') AND meter = $5 AND period = $6
		AND input_weight = $7 AND output_weight = $8 AND platform = $9 FOR UPDATE`,
		[16]byte(l.Tenant), orNull(l.Project), orNull(l.Key), l.Model, l.Meter, l.Period, l.InputWeight, l.OutputWeight, l.Platform)
	if err == nil {
		before, err = pgx.CollectExactlyOneRow(rows, scanLimit)
	}
	soft := &l.Soft
	if l.Soft == 0 {
		soft = nil
	}
	switch {
	case err == nil:
		rows, err = tx.Query(ctx, `UPDATE quota_limit SET amount = $2, soft = $3, version = version + 1 WHERE id = $1 RETURNING `+limitColumns,
			[16]byte(before.ID), l.Amount, soft)
	case errors.Is(err, pgx.ErrNoRows):
		before = nil
		rows, err = tx.Query(ctx, `INSERT INTO quota_limit (id, tenant, project, api_key, model, meter, period, amount, soft, input_weight, output_weight, platform, created_at)
			VALUES ($1, $2, $3, $4, nullif($5, ''), $6, $7, $8, $9, $10, $11, $12, $13) RETURNING `+limitColumns,
			[16]byte(l.ID), [16]byte(l.Tenant), orNull(l.Project), orNull(l.Key), l.Model, l.Meter, l.Period, l.Amount, soft,
			l.InputWeight, l.OutputWeight, l.Platform, l.Created.UTC().Truncate(time.Microsecond))
	}
	if err == nil {
		after, err = pgx.CollectExactlyOneRow(rows, scanLimit)
	}
	switch {
	case pgdb.State(err) == pgdb.StateForeignKey:
		return nil, nil, apperr.New(apperr.NotFound, "not_found", "There is no such tenant, project or key.")
	case pgdb.State(err) == "42501", errors.Is(err, pgx.ErrNoRows):
		return nil, nil, errNotYours()
	case err != nil:
		return nil, nil, pgdb.Wrap("set limit", err)
	}
	return before, after, nil
}

func errNotYours() error {
	return apperr.New(apperr.Forbidden, "limit_of_the_platform", "This limit is the operator's; a tenant can only set limits of its own beside it.")
}

// Remove deletes a limit within a transaction that is bound to the tenant, or to
// the platform, and returns it.
func Remove(ctx context.Context, tx pgx.Tx, limit id.Limit) (*Limit, error) {
	rows, err := tx.Query(ctx, `DELETE FROM quota_limit WHERE id = $1 RETURNING `+limitColumns, [16]byte(limit))
	if err != nil {
		return nil, pgdb.Wrap("delete limit", err)
	}
	l, err := pgx.CollectExactlyOneRow(rows, scanLimit)
	if errors.Is(err, pgx.ErrNoRows) {
		var seen bool
		if err := tx.QueryRow(ctx, `SELECT EXISTS (SELECT FROM quota_limit WHERE id = $1)`, [16]byte(limit)).Scan(&seen); err == nil && seen {
			return nil, errNotYours()
		}
		return nil, apperr.New(apperr.NotFound, "limit_not_found", "There is no such limit.")
	}
	return l, pgdb.Wrap("delete limit", err)
}

// Usage is a limit and what is taken of it now.
type Usage struct {
	Limit
	// Spent is gone: until it flows back, or until the end of the window.
	Spent int64
	// Held is in the slices of replicas: reserved by requests that run, or
	// about to be reserved.
	Held int64
	// Remaining can be taken by anybody.
	Remaining int64
	// Ends is when the window ends; zero: there is none.
	Ends time.Time
}

// Usages returns all limits of a tenant with what is taken of them, within a
// transaction that is bound to the tenant, or to the platform.
func Usages(ctx context.Context, tx pgx.Tx, tenant id.Tenant) ([]Usage, error) {
	rows, err := tx.Query(ctx, `
		SELECT `+limitColumns+`, coalesce((a).used, 0), coalesce((a).held, 0), coalesce(s.left, 0), nullif((quota_window(period, t)).ends, 'infinity')
		FROM (SELECT quota_now() AS t) clock, quota_limit l
		LEFT JOIN LATERAL (SELECT quota_advance(b, l, t) AS a FROM quota_bucket b WHERE b.limit_id = l.id) b ON true
		LEFT JOIN LATERAL (SELECT (sum(s.held) - coalesce(sum(p.amount), 0))::bigint AS left FROM quota_slice s
			LEFT JOIN quota_spend p USING (replica, limit_id, window_start) WHERE s.limit_id = l.id AND s.window_start = (a).window_start) s ON true
		WHERE tenant = $1 ORDER BY l.id`, [16]byte(tenant))
	if err != nil {
		return nil, pgdb.Wrap("read limits", err)
	}
	list, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (u Usage, err error) {
		var used, held, left int64
		var ends *time.Time
		if err := row.Scan(append(u.columns(), &used, &held, &left, &ends)...); err != nil {
			return u, err
		}
		// In windows, what was spent out of slices is still in what they hold.
		u.Held = left
		u.Spent = used + held - left
		u.Remaining = max(u.Amount-used-held, 0)
		if ends != nil {
			u.Ends = *ends
		}
		return u, nil
	})
	return list, pgdb.Wrap("read limits", err)
}

// Effective is how a limit binds a request.
type Effective struct {
	Usage
	// Fits is how many requests like the one asked about still fit.
	Fits int64
	// Binds is true for the limit of which the fewest fit.
	Binds bool
}

// Binding returns the limits that bind a request like a, and which of them
// binds first. Of limits that bind alike it is the narrowest.
func Binding(all []Usage, a Ask, list []Price, now time.Time) []Effective {
	cost := priceOf(list, a, now)
	var out []Effective
	least := -1
	for _, u := range all {
		l := u.Limit
		if (l.Model != "" && l.Model != a.Model) || (l.Project != id.Project{} && l.Project != a.Project) || (l.Key != id.Key{} && l.Key != a.Key) {
			continue
		}
		n := l.amount(cost, a.Input, a.Output)
		if n == 0 {
			continue
		}
		out = append(out, Effective{Usage: u, Fits: u.Remaining / n})
		i := len(out) - 1
		if least < 0 || out[i].Fits < out[least].Fits {
			least = i
		}
	}
	if least >= 0 {
		out[least].Binds = true
	}
	return out
}

// querier is a pool or a transaction.
type querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// ListPrices returns the prices of a model, or of all for "", latest last.
func ListPrices(ctx context.Context, db querier, model string) ([]Price, error) {
	rows, err := db.Query(ctx, `SELECT id, model, model_digest, meter, effective_from, micros_per_million FROM price
		WHERE $1 = '' OR model = $1 ORDER BY model, meter, effective_from`, model)
	if err != nil {
		return nil, pgdb.Wrap("list prices", err)
	}
	list, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (p Price, err error) {
		var digest []byte
		err = row.Scan((*[16]byte)(&p.ID), &p.Model, &digest, &p.Meter, &p.From, &p.Micros)
		if digest != nil {
			p.Digest = new([32]byte(digest))
		}
		return p, err
	})
	return list, pgdb.Wrap("list prices", err)
}

// SetPrice adds a price within a transaction that is bound to the platform. Prices are
// never changed: a later one takes over from its moment on.
func SetPrice(ctx context.Context, tx pgx.Tx, p Price, now time.Time) error {
	switch {
	case p.Meter != "input" && p.Meter != "cached_input" && p.Meter != "output":
		return apperr.New(apperr.Invalid, "invalid_price", "There is no such meter; the meters are input, cached_input and output.").WithParam("meter")
	case p.Micros < 0 || p.Micros > 1_000_000_000_000:
		return apperr.New(apperr.Invalid, "invalid_price", "A price is between 0 and 1,000,000 of the currency for a million tokens.").WithParam("price")
	case p.From.Before(now.Add(-time.Minute)):
		return apperr.New(apperr.Invalid, "invalid_price", "A price cannot take effect in the past.").WithParam("from")
	}
	var digest []byte
	if p.Digest != nil {
		digest = p.Digest[:]
	}
	_, err := tx.Exec(ctx, `INSERT INTO price (id, model, model_digest, meter, effective_from, micros_per_million, created_at) VALUES ($1, $2, $3, $4, $5, $6, $7)`,
		[16]byte(p.ID), p.Model, digest, p.Meter, p.From.UTC(), p.Micros, now.UTC())
	switch pgdb.State(err) {
	case pgdb.StateUniqueViolation:
		return apperr.New(apperr.Conflict, "price_exists", "There is a price from that very moment on already.")
	case "42501":
		return apperr.New(apperr.Forbidden, "insufficient_scope", "Prices are set by the operator.")
	}
	return pgdb.Wrap("set price", err)
}
