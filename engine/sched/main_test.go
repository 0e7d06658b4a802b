package sched

import (
	"testing"
	"time"

	"bulkhead.dev/engine/kv"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
	"github.com/google/go-cmp/cmp/cmpopts"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// geometry is a small page: one layer, one head of two numbers.
var geometry = kv.Geometry{Layers: 1, KVHeads: 1, HeadDim: 2, PageTokens: kv.PageTokens, DType: kv.F32, Layout: kv.Layout1}

func newPool(t testing.TB, pages int) *kv.Pool {
	t.Helper()
	p, err := kv.New(kv.Config{Geometry: geometry, Pages: pages, Pattern: kv.NaN})
	assert.NoError(t, err)
	t.Cleanup(func() {
		// Everything was given back, whatever the test did.
		st := p.Stats()
		assert.Equal(t, st.Free, st.Pages)
		assert.NoError(t, p.Close())
	})
	return p
}

var equateEmpty = cmpopts.EquateEmpty()

func owner(n byte) id.Owner { return id.Owner{15: n, 0: 1} }

func clock() time.Time { return time.Unix(0, 0) }
