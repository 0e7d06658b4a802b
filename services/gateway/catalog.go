package gateway

import (
	"context"
	"sync"
	"time"

	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/tenancy"
)

const (
	// catalogFresh is how long a model that was looked up is used without
	// asking again: a request does not cost a query.
	catalogFresh = time.Second
	// catalogStale is how long it is used while the database cannot be asked,
	// the same time that a key is.
	catalogStale = 10 * time.Second
	// maxCachedModels bounds the memory; there are far fewer models.
	maxCachedModels = 1024
)

// CachedCatalog remembers models for a short time. Unknown names are not
// remembered: a client must not be able to fill it.
type CachedCatalog struct {
	From Catalog
	Now  func() time.Time

	mu     sync.Mutex
	models map[string]cachedModel
}

type cachedModel struct {
	model tenancy.Model
	at    time.Time
}

// Models implements Catalog; lists are always read.
func (c *CachedCatalog) Models(ctx context.Context) ([]tenancy.Model, error) {
	return c.From.Models(ctx)
}

// ModelByName implements Catalog.
func (c *CachedCatalog) ModelByName(ctx context.Context, name string) (tenancy.Model, error) {
	c.mu.Lock()
	got, ok := c.models[name]
	c.mu.Unlock()
	age := c.Now().Sub(got.at)
	if ok && age < catalogFresh {
		return got.model, nil
	}
	m, err := c.From.ModelByName(ctx, name)
	if err != nil {
		if ok && age < catalogStale && apperr.From(err).Kind == apperr.Unavailable {
			return got.model, nil
		}
		return tenancy.Model{}, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.models == nil || len(c.models) >= maxCachedModels {
		c.models = map[string]cachedModel{}
	}
	c.models[name] = cachedModel{m, c.Now()}
	return m, nil
}
