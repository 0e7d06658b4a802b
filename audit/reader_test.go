package audit_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"bulkhead.dev/audit"
	"bulkhead.dev/audit/receipt"
	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/infra/pgdb/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

func TestGet(t *testing.T) {
	t.Parallel()
	b := pgtest.New(t)
	admin := b.Admin(t)
	mine, theirs := id.NewTenant(time.Now()), id.NewTenant(time.Now())
	put := func(tenant id.Tenant, body string, digest receipt.Digest) id.Request {
		r := id.NewRequest(time.Now())
		_, err := admin.Exec(t.Context(), `INSERT INTO receipt (request_id, tenant, body, digest, model_digest, output_tokens, outcome, withheld)
			VALUES ($1, $2, $3, $4, ''::bytea, 0, 'lost', false)`, [16]byte(r), [16]byte(tenant), []byte(body), digest[:])
		assert.NoError(t, err)
		return r
	}
	good := put(mine, "body", receipt.DigestOf([]byte("body")))
	foreign := put(theirs, "secret", receipt.DigestOf([]byte("secret")))
	damaged := put(mine, "changed", receipt.DigestOf([]byte("body")))
	reader := audit.NewReader(b.Pools.App)

	s, err := reader.Get(t.Context(), mine, good)
	assert.NoError(t, err)
	assert.Equal(t, string(s.Body), "body")
	assert.Equal(t, s.Digest, receipt.DigestOf([]byte("body")))

	// Somebody else's receipt and none at all give the same answer.
	_, errForeign := reader.Get(t.Context(), mine, foreign)
	_, errNone := reader.Get(t.Context(), mine, id.NewRequest(time.Now()))
	for _, err := range []error{errForeign, errNone} {
		e := assert.ErrorAs[*apperr.Error](t, err)
		assert.Equal(t, e.Kind, apperr.NotFound)
		assert.Equal(t, e.Code, "receipt_not_found")
	}
	assert.Equal(t, errForeign.Error(), errNone.Error())
	_, err = reader.Get(t.Context(), id.Tenant{}, good) // nobody's tenant
	assert.Equal(t, assert.ErrorAs[*apperr.Error](t, err).Kind, apperr.NotFound)

	got, err := reader.Get(t.Context(), mine, damaged)
	assert.ErrorIs(t, err, audit.ErrDamaged)
	assert.Equal(t, assert.ErrorAs[*apperr.Error](t, err).Kind, apperr.Internal)
	assert.Equal(t, len(got.Body), 0)
	assert.False(t, strings.Contains(err.Error(), "changed"))
}

func TestGetWithoutDatabase(t *testing.T) {
	t.Parallel()
	b := pgtest.New(t)
	reader := audit.NewReader(b.Pools.App)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := reader.Get(ctx, id.Tenant{1}, id.Request{1})
	assert.Equal(t, assert.ErrorAs[*apperr.Error](t, err).Kind, apperr.Canceled)
	b.Pools.App.Close()
	_, err = reader.Get(t.Context(), id.Tenant{1}, id.Request{1})
	e := assert.ErrorAs[*apperr.Error](t, err)
	assert.Equal(t, e.Kind, apperr.Unavailable)
	assert.Equal(t, e.Code, "database_unavailable")
}
