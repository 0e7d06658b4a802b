package settle

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"bulkhead.dev/audit/receipt"
	"bulkhead.dev/audit/settle/settledb"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/infra/pgdb"
)

// The holds of an intent are flat arrays with the number of the intent that each
// belongs to, because arrays of arrays have to be rectangular.
const insertIntents = `
INSERT INTO intent (request_id, tenant, project, api_key, replica, reserved_tokens, created_at, transfer, prefill_epoch, decode_epoch, limits, amounts)
SELECT i.request_id, i.tenant, i.project, i.api_key, $5, i.reserved, i.created, i.transfer, i.prefill, i.decode, coalesce(h.limits, '{}'), coalesce(h.amounts, '{}')
FROM unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::uuid[], $6::bigint[], $7::timestamptz[], $8::uuid[], $9::uuid[], $10::uuid[])
    WITH ORDINALITY AS i (request_id, tenant, project, api_key, reserved, created, transfer, prefill, decode, n)
LEFT JOIN (SELECT n, array_agg(limit_id) AS limits, array_agg(amount) AS amounts
    FROM unnest($11::bigint[], $12::uuid[], $13::bigint[]) AS h (n, limit_id, amount) GROUP BY n) h USING (n)
ON CONFLICT DO NOTHING`

const insertUsage = `
INSERT INTO usage (request_id, tenant, project, api_key, model, model_digest, surface, streamed, outcome, withheld,
    finish_reason, input_tokens, cached_tokens, output_tokens, prefill_tokens, decode_tokens,
    received_at, admitted_at, first_byte_at, finished_at, receipt_digest)
SELECT * FROM unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::uuid[], $5::text[], $6::bytea[], $7::text[], $8::boolean[],
    $9::text[], $10::boolean[], $11::text[], $12::bigint[], $13::bigint[], $14::bigint[], $15::bigint[], $16::bigint[],
    $17::timestamptz[], $18::timestamptz[], $19::timestamptz[], $20::timestamptz[], $21::bytea[])
ON CONFLICT DO NOTHING`

// insertCharges counts what requests spent out of the slices of this replica,
// once for each: only of those whose usage is written now.
const insertCharges = `
WITH written AS (` + insertUsage + ` RETURNING request_id)
INSERT INTO quota_spend AS s (replica, limit_id, window_start, tenant, amount)
SELECT $22, limit_id, window_start, tenant, sum(amount)
FROM unnest($23::uuid[], $24::uuid[], $25::timestamptz[], $26::uuid[], $27::bigint[]) AS c (request_id, limit_id, window_start, tenant, amount)
JOIN written USING (request_id) GROUP BY limit_id, window_start, tenant
ON CONFLICT (replica, limit_id, window_start) DO UPDATE SET amount = s.amount + EXCLUDED.amount`

const insertReceipts = `
INSERT INTO receipt (request_id, tenant, body, digest, model_digest, prefill_epoch, decode_epoch,
    edge_tokens, prefill_tokens, decode_tokens, output_tokens, outcome, withheld)
SELECT * FROM unnest($1::uuid[], $2::uuid[], $3::bytea[], $4::bytea[], $5::bytea[], $6::uuid[], $7::uuid[],
    $8::bigint[], $9::bigint[], $10::bigint[], $11::bigint[], $12::text[], $13::boolean[])
ON CONFLICT DO NOTHING
RETURNING request_id`

const deleteIntents = `DELETE FROM intent WHERE request_id = ANY ($1::uuid[])`

// write commits facts and intents in one transaction and one round trip: a
// pipeline of statements with one sync at its end is one transaction. It returns
// the stored digest of each request that had a receipt already.
func write(ctx context.Context, db pgdb.DB, replica id.Epoch, facts []rows, intents []Intent) (map[id.Request]receipt.Digest, error) {
	b := &pgx.Batch{}
	if len(intents) > 0 {
		queueIntents(b, replica, intents)
	}
	fresh := make(map[id.Request]bool, len(facts))
	if len(facts) > 0 {
		ids := make([][16]byte, len(facts))
		for i, r := range facts {
			ids[i] = r.facts.Receipt.Request
		}
		queueUsage(b, replica, ids, facts)
		queueReceipts(b, ids, facts).Query(func(rows pgx.Rows) error {
			for rows.Next() {
				var one [16]byte
				if err := rows.Scan(&one); err != nil {
					return err
				}
				fresh[one] = true
			}
			return rows.Err()
		})
		b.Queue(deleteIntents, ids)
	}
	// Close ends the pipeline and runs the function above; an error of the
	// commit itself comes out here too.
	if err := db.SendBatch(ctx, b).Close(); err != nil {
		return nil, pgdb.Wrap("settle", err)
	}
	if len(fresh) == len(facts) {
		return nil, nil
	}
	var missing [][16]byte
	for _, r := range facts {
		if !fresh[r.facts.Receipt.Request] {
			missing = append(missing, r.facts.Receipt.Request)
		}
	}
	stored, err := settledb.New(db).Digests(ctx, missing)
	if err != nil {
		return nil, pgdb.Wrap("compare with stored receipts", err)
	}
	known := make(map[id.Request]receipt.Digest, len(stored))
	for _, s := range stored {
		known[s.RequestID] = receipt.Digest(s.Digest) // the schema holds it to 32 bytes
	}
	return known, nil
}

func queueIntents(b *pgx.Batch, replica id.Epoch, intents []Intent) {
	n := len(intents)
	var (
		request, tenant, project  = make([][16]byte, n), make([][16]byte, n), make([][16]byte, n)
		key                       = make([][16]byte, n)
		reserved                  = make([]int64, n)
		created                   = make([]time.Time, n)
		transfer, prefill, decode = make([][16]byte, n), make([][16]byte, n), make([][16]byte, n)
		of, amounts               []int64
		limits                    [][16]byte
	)
	for i, in := range intents {
		request[i], tenant[i], project[i], key[i] = in.Request, in.Tenant, in.Project, in.Key
		reserved[i], created[i] = in.Reserved, in.Created
		transfer[i], prefill[i], decode[i] = in.Transfer, in.Prefill, in.Decode
		for _, h := range in.Holds {
			of, limits, amounts = append(of, int64(i+1)), append(limits, h.Limit), append(amounts, h.Amount)
		}
	}
	b.Queue(insertIntents, request, tenant, project, key, [16]byte(replica), reserved, created, transfer, prefill, decode, of, limits, amounts)
}

func queueUsage(b *pgx.Batch, replica id.Epoch, ids [][16]byte, facts []rows) {
	n := len(facts)
	var (
		tenant, project, key    = make([][16]byte, n), make([][16]byte, n), make([][16]byte, n)
		model, surface, outcome = make([]string, n), make([]string, n), make([]string, n)
		finish                  = make([]string, n)
		modelDigest, digest     = make([][]byte, n), make([][]byte, n)
		streamed, withheld      = make([]bool, n), make([]bool, n)
		in, cached, out         = make([]int64, n), make([]int64, n), make([]int64, n)
		prefill, decode         = make([]int64, n), make([]int64, n)
		received, finished      = make([]time.Time, n), make([]time.Time, n)
		admitted, first         = make([]*time.Time, n), make([]*time.Time, n)
	)
	for i, f := range facts {
		r := f.facts.Receipt
		tenant[i], project[i], key[i] = r.Tenant, r.Project, r.Key
		model[i], surface[i], outcome[i], finish[i] = r.Model, r.Surface, string(r.Outcome), r.Finish
		modelDigest[i], digest[i] = r.ModelDigest[:], f.digest[:]
		streamed[i], withheld[i] = r.Streamed, r.Withheld
		in[i], cached[i], out[i] = input(r), f.facts.Usage.CachedTokens, int64(r.Output)
		prefill[i], decode[i] = orZero(measured(r.Prefill)), f.facts.Usage.DecodeTokens
		received[i], finished[i] = r.Received.Time(), r.Finished.Time()
		admitted[i], first[i] = orNull(r.Admitted), orNull(r.FirstByte)
	}
	args := []any{ids, tenant, project, key, model, modelDigest, surface, streamed, outcome, withheld, finish,
		in, cached, out, prefill, decode, received, admitted, first, finished, digest}
	var (
		charged, limits, payers [][16]byte
		windows                 []time.Time
		amounts                 []int64
	)
	for _, f := range facts {
		for _, c := range f.facts.Charges {
			charged, limits, payers = append(charged, f.facts.Receipt.Request), append(limits, c.Limit), append(payers, f.facts.Receipt.Tenant)
			windows, amounts = append(windows, c.Window), append(amounts, c.Amount)
		}
	}
	if len(charged) == 0 {
		b.Queue(insertUsage, args...)
		return
	}
	b.Queue(insertCharges, append(args, [16]byte(replica), charged, limits, windows, payers, amounts)...)
}

func queueReceipts(b *pgx.Batch, ids [][16]byte, facts []rows) *pgx.QueuedQuery {
	n := len(facts)
	var (
		tenant                = make([][16]byte, n)
		body, digest, model   = make([][]byte, n), make([][]byte, n), make([][]byte, n)
		prefillAt, decodeAt   = make([]*[16]byte, n), make([]*[16]byte, n)
		edge, prefill, decode = make([]*int64, n), make([]*int64, n), make([]*int64, n)
		output                = make([]int64, n)
		outcome               = make([]string, n)
		withheld              = make([]bool, n)
	)
	for i, f := range facts {
		r := f.facts.Receipt
		tenant[i], body[i], digest[i], model[i] = r.Tenant, f.body, f.digest[:], r.ModelDigest[:]
		prefillAt[i], decodeAt[i] = worker(r.Prefill), worker(r.Decode)
		if r.EdgeTokens != nil {
			edge[i] = new(int64(*r.EdgeTokens))
		}
		prefill[i], decode[i] = measured(r.Prefill), measured(r.Decode)
		output[i], outcome[i], withheld[i] = int64(r.Output), string(r.Outcome), r.Withheld
	}
	return b.Queue(insertReceipts, ids, tenant, body, digest, model, prefillAt, decodeAt, edge, prefill, decode, output, outcome, withheld)
}

func orNull(m receipt.Micros) *time.Time {
	if m == 0 {
		return nil
	}
	return new(m.Time())
}
