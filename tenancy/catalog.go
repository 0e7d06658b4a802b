package tenancy

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/pgdb"
	"bulkhead.dev/tenancy/tenancydb"
)

// Model is an entry of the catalogue.
type Model struct {
	Name                string
	Digest              [32]byte // SHA-256 of the model file
	Bytes               int64    // size of the file
	Architecture        string
	ContextWindow       int  // tokens, prompt and output together
	DefaultOutputTokens int  // tokens, for a request that names no maximum
	Chat                bool // the file has a chat template that is supported
	Source              string
	Licence             string
	Created             time.Time
}

// Catalog is the list of models. For now every tenant may use all of them. It
// is safe for concurrent use.
type Catalog struct{ db pgdb.DB }

// NewCatalog makes a catalogue over a pool of the role bulkhead_app.
func NewCatalog(db pgdb.DB) *Catalog { return &Catalog{db: db} }

// UpsertModel writes an entry. Writing a name again replaces everything but the
// time of creation.
func (c *Catalog) UpsertModel(ctx context.Context, m Model) error {
	err := tenancydb.New(c.db).UpsertModel(ctx, tenancydb.UpsertModelParams{
		Name: m.Name, Digest: m.Digest[:], Bytes: m.Bytes, Architecture: m.Architecture,
		ContextWindow: int32(m.ContextWindow), DefaultOutputTokens: int32(m.DefaultOutputTokens),
		Chat: m.Chat, Source: m.Source, Licence: m.Licence, CreatedAt: m.Created.UTC().Truncate(time.Microsecond),
	})
	return public("write model", err)
}

// Models returns all entries, by name.
func (c *Catalog) Models(ctx context.Context) ([]Model, error) {
	rows, err := tenancydb.New(c.db).Models(ctx)
	if err != nil {
		return nil, public("list models", err)
	}
	list := make([]Model, len(rows))
	for i, r := range rows {
		list[i] = modelOf(r)
	}
	return list, nil
}

// ModelByName returns one entry, or an *apperr.Error of kind NotFound with the
// code model_not_found.
func (c *Catalog) ModelByName(ctx context.Context, name string) (Model, error) {
	r, err := tenancydb.New(c.db).ModelByName(ctx, name)
	if errors.Is(err, pgx.ErrNoRows) || pgdb.IsData(err) { // a name that the database cannot hold is not there
		return Model{}, apperr.New(apperr.NotFound, "model_not_found", "There is no such model, or the key may not use it.").WithParam("model")
	}
	if err != nil {
		return Model{}, public("find model", err)
	}
	return modelOf(r), nil
}

func modelOf(r tenancydb.Model) Model {
	m := Model{Name: r.Name, Bytes: r.Bytes, Architecture: r.Architecture, ContextWindow: int(r.ContextWindow),
		DefaultOutputTokens: int(r.DefaultOutputTokens), Chat: r.Chat, Source: r.Source, Licence: r.Licence, Created: r.CreatedAt.UTC()}
	copy(m.Digest[:], r.Digest) // the schema holds it to 32 bytes
	return m
}
