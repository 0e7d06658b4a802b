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

const insertIntents = `
INSERT INTO intent (request_id, tenant, project, api_key, replica, reserved_tokens, created_at)
SELECT * FROM unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::uuid[], $5::uuid[], $6::bigint[], $7::timestamptz[])
ON CONFLICT DO NOTHING`

const insertUsage = `
INSERT INTO usage (request_id, tenant, project, api_key, model, model_digest, surface, streamed, outcome, withheld,
    finish_reason, input_tokens, cached_tokens, output_tokens, prefill_tokens, decode_tokens,
    received_at, admitted_at, first_byte_at, finished_at, receipt_digest)
SELECT * FROM unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::uuid[], $5::text[], $6::bytea[], $7::text[], $8::boolean[],
    $9::text[], $10::boolean[], $11::text[], $12::bigint[], $13::bigint[], $14::bigint[], $15::bigint[], $16::bigint[],
    $17::timestamptz[], $18::timestamptz[], $19::timestamptz[], $20::timestamptz[], $21::bytea[])
ON CONFLICT DO NOTHING`

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
		queueUsage(b, ids, facts)
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
		request, tenant, project = make([][16]byte, n), make([][16]byte, n), make([][16]byte, n)
		key, replicas            = make([][16]byte, n), make([][16]byte, n)
		reserved                 = make([]int64, n)
		created                  = make([]time.Time, n)
	)
	for i, in := range intents {
		request[i], tenant[i], project[i], key[i] = in.Request, in.Tenant, in.Project, in.Key
		replicas[i], reserved[i], created[i] = replica, in.Reserved, in.Created
	}
	b.Queue(insertIntents, request, tenant, project, key, replicas, reserved, created)
}

func queueUsage(b *pgx.Batch, ids [][16]byte, facts []rows) {
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
	b.Queue(insertUsage, ids, tenant, project, key, model, modelDigest, surface, streamed, outcome, withheld, finish,
		in, cached, out, prefill, decode, received, admitted, first, finished, digest)
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
