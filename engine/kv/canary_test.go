package kv_test

import (
	"math/rand/v2"
	"sync"
	"testing"

	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/kv/kvtest"
	"bulkhead.dev/infra/id"
)

// Many tenants at once, each writing its own byte everywhere, giving up at odd
// moments, handing over. No tenant ever sees the byte of another, in whatever
// it can resolve.
func TestNoCanaryCrossesTenants(t *testing.T) {
	t.Parallel()
	p := kvtest.Pool(t, kv.Config{Pages: 24})
	loadTenants(t, p, func(b, mark byte) bool { return b == 0 || b == mark })
	if st := p.Stats(); st.ScrubbedPages == 0 || st.Quarantined != 0 {
		t.Errorf("nothing was scrubbed or something is stuck: %+v", st)
	}
}

// loadTenants runs six tenants at once, each of which writes its mark. ok says
// whether a tenant may find a byte in a page that was granted to it.
func loadTenants(t *testing.T, p *kv.Pool, ok func(b, mark byte) bool) {
	g := p.Geometry()
	var wg sync.WaitGroup
	for tenant := range 6 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(1, uint64(tenant)))
			mark := byte(tenant + 1)
			for range 400 {
				life(t, p, g, kvtest.Owner(uint64(tenant+1)), mark, rng, ok)
			}
		})
	}
	wg.Wait()
	if err := p.Audit(); err != nil {
		t.Error(err)
	}
}

func life(t *testing.T, p *kv.Pool, g kv.Geometry, owner id.Owner, mark byte, rng *rand.Rand, ok func(b, mark byte) bool) {
	pages := 1 + rng.IntN(4)
	c, err := p.Reserve(owner, pages)
	if err != nil {
		return
	}
	f, err := c.Fill(id.NewLease())
	if err != nil {
		t.Error(err)
		return
	}
	defer f.Abort()
	if err := f.Grant(pages); err != nil {
		t.Error(err)
		return
	}
	table, err := f.Table(0, pages*16)
	if err != nil {
		t.Error(err)
		return
	}
	mem := kvtest.Pages(t, g, table, pages*16)
	for _, page := range mem {
		for _, b := range page {
			if !ok(b, mark) {
				t.Errorf("owner %d sees a byte of owner %d", mark, b)
				table.Close()
				return
			}
		}
	}
	var racing sync.WaitGroup
	if rng.IntN(3) == 0 {
		racing.Go(f.Abort) // while the "kernel" below still writes
	}
	for _, page := range mem {
		for i := range page {
			page[i] = mark
		}
	}
	_ = table.Advance(pages * 16)
	table.Close()
	racing.Wait()
	s, err := f.Seal(pages * 16)
	if err != nil {
		return
	}
	defer s.Release()
	c2, err := p.Reserve(owner, pages)
	if err != nil {
		return
	}
	l, err := c2.Land(id.NewLease())
	if err != nil {
		t.Error(err)
		return
	}
	defer l.Abort()
	if err := l.Grant(pages); err != nil {
		t.Error(err)
		return
	}
	if rng.IntN(3) == 0 {
		racing.Go(l.Abort)
	}
	err = kvtest.Land(s, l, nil)
	if err == nil {
		if seq, err := l.Commit(kvtest.Claim(t, s, key)); err == nil {
			seq.Release()
		}
	}
	racing.Wait()
}
