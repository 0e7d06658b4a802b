package worker

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"go.uber.org/goleak"

	"bulkhead.dev/engine/handoff"
	"bulkhead.dev/engine/sched"
	"bulkhead.dev/engine/worker/peer"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
	workerv1 "bulkhead.dev/services/gen/bulkhead/worker/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestCheckCapacity(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		pages, pageTokens, window int
		ok                        bool
	}{
		{128, 16, 2048, true},
		{127, 16, 2048, false},
		{128, 16, 2049, false}, // rounded up to a page
		{129, 16, 2049, true},
		{1, 16, 1, true},
		{0, 16, 1, false},
		{42_580, 16, 1_048_576, false}, // the pool and the window of the incident
		{1 << 40, 16, 1 << 44, true},
		{1, 0, 1, false},
		{1, 16, 0, false},
		{1, 16, int(^uint(0) >> 1), false},
	} {
		err := CheckCapacity(peer.Prefill, c.pages, c.pageTokens, c.window)
		if (err == nil) != c.ok {
			t.Errorf("%+v: %v", c, err)
		}
	}
	e := assert.ErrorAs[*CapacityError](t, CheckCapacity(peer.Prefill, 42_580, 16, 1_048_576))
	assert.Equal(t, e.Need(), 65_536)
	for _, part := range []string{"prefill", "681280", "1048576", "65536 pages"} {
		if !strings.Contains(e.Error(), part) {
			t.Errorf("%q is not in: %v", part, e)
		}
	}
}

// Every reason has a code, and every reason of the hand-off is in the list.
func TestReasonsAreClosed(t *testing.T) {
	t.Parallel()
	for _, r := range handoff.Reasons() {
		if _, ok := codes[Reason(r)]; !ok {
			t.Errorf("reason %s of the hand-off has no code", r)
		}
		assert.Equal(t, reasonOf(fmt.Errorf("x: %w", &handoff.Refusal{Reason: r})), Reason(r))
	}
	for _, m := range reasons {
		assert.Equal(t, reasonOf(fmt.Errorf("x: %w", m.err)), m.reason)
		if _, ok := codes[m.reason]; !ok {
			t.Errorf("reason %s has no code", m.reason)
		}
	}
	assert.Equal(t, reasonOf(&sched.TooLargeError{}), Exhausted)
	assert.Equal(t, reasonOf(refuse(OfferTimeout, "x")), OfferTimeout)
	assert.Equal(t, reasonOf(errors.New("x")), Internal)
	// The text of a model that gave a NaN is not taken for a bad request.
	assert.Equal(t, reasonOf(fmt.Errorf("%w: %w", sched.ErrNotFinite, context.Canceled)), NotFinite)
	assert.Equal(t, Reason("never heard of").Code(), connect.CodeInternal)
}

func TestRefusalTravels(t *testing.T) {
	t.Parallel()
	err, reason := asError(refuse(QueueFull, "12 wait"), &workerv1.LegFacts{Tokens: 7})
	assert.Equal(t, reason, QueueFull)
	assert.Equal(t, connect.CodeOf(err), connect.CodeResourceExhausted)
	r, ok := RefusalOf(fmt.Errorf("outer: %w", err))
	assert.True(t, ok)
	assert.Equal(t, r.GetReason(), "queue_full")
	assert.Equal(t, r.GetFacts().GetTokens(), uint32(7))
	_, ok = RefusalOf(errors.New("x"))
	assert.False(t, ok)
}

// boot returns a boot document that can be served, but for the files.
func boot(t *testing.T, a *peer.Authority, role peer.Role) Boot {
	t.Helper()
	epoch := id.NewEpoch(time.Now())
	creds, err := a.Issue(peer.Worker(role, epoch))
	assert.NoError(t, err)
	b := Boot{
		Role: role, Epoch: epoch.String(), ModelDigest: "sha256:" + strings.Repeat("0", 64),
		Credentials: creds, Pages: 64, KVType: "f32", MaxRunning: 4, Queue: 4, PerTenant: 8, Debug: true,
	}
	if role == peer.Prefill {
		b.Chunk, b.FabricListen = 16, "unix:/fabric"
	}
	return b
}

func authority(t *testing.T) *peer.Authority {
	t.Helper()
	a, err := peer.NewAuthority(time.Now)
	assert.NoError(t, err)
	return a
}

func TestBootIsChecked(t *testing.T) {
	t.Parallel()
	a := authority(t)
	for _, role := range []peer.Role{peer.Prefill, peer.Decode} {
		_, err := boot(t, a, role).check()
		assert.NoError(t, err)
	}
	other := boot(t, a, peer.Prefill)
	for name, change := range map[string]func(*Boot){
		"epoch":            func(b *Boot) { b.Epoch = "wrk_x" },
		"role":             func(b *Boot) { b.Role = "judge" },
		"other role":       func(b *Boot) { b.Role, b.FabricListen, b.Chunk = peer.Prefill, "unix:/f", 1 },
		"other epoch":      func(b *Boot) { b.Epoch = other.Epoch },
		"other's identity": func(b *Boot) { b.Credentials = other.Credentials },
		"no credentials":   func(b *Boot) { b.Credentials = peer.Credentials{} },
		"digest":           func(b *Boot) { b.ModelDigest = "md5:0" },
		"pages":            func(b *Boot) { b.Pages = 0 },
		"running":          func(b *Boot) { b.MaxRunning = 0 },
		"queue":            func(b *Boot) { b.Queue = -1 },
		"per tenant":       func(b *Boot) { b.PerTenant = 0 },
		"kv type":          func(b *Boot) { b.KVType = "f8" },
		"scrub":            func(b *Boot) { b.Scrub = "never" },
		"pattern":          func(b *Boot) { b.ScrubWith = "ones" },
		"page server":      func(b *Boot) { b.FabricListen = "unix:/f" },
		"span":             func(b *Boot) { b.DrainFor = -1 },
	} {
		b := boot(t, a, peer.Decode)
		change(&b)
		if _, err := b.check(); !errors.Is(err, ErrBoot) {
			t.Errorf("%s: %v", name, err)
		}
	}
	b := boot(t, a, peer.Prefill)
	b.Chunk = 0
	_, err := b.check()
	assert.ErrorIs(t, err, ErrBoot)
	s, err := boot(t, a, peer.Decode).check()
	assert.NoError(t, err)
	assert.Equal(t, s.OfferWait, DefaultOfferWait)
	assert.Equal(t, s.Threads, 1)
}
