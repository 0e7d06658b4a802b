package pool_test

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"go.uber.org/goleak"

	"bulkhead.dev/engine/history"
	"bulkhead.dev/engine/pool"
	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
	poolv1 "bulkhead.dev/services/gen/bulkhead/pool/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type identity struct {
	epoch id.Epoch
	role  pool.Role
}

type identityKey struct{}

// bundle is a registry whose clock the test turns.
type bundle struct {
	*pool.Registry
	mu   sync.Mutex
	now  time.Time
	came []string
	// What the store of page history was asked for, and what it says.
	stored  []id.Epoch
	history error
}

func (b *bundle) advance(d time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.now = b.now.Add(d)
}

func setup(t *testing.T) *bundle {
	t.Helper()
	b := &bundle{now: time.UnixMilli(1_800_000_000_000)}
	b.Registry = pool.NewRegistry(pool.Options{
		Now: func() time.Time {
			b.mu.Lock()
			defer b.mu.Unlock()
			return b.now
		},
		Client: func(string, pool.Role, id.Epoch) (*http.Client, string, error) {
			return http.DefaultClient, "http://worker", nil
		},
		Identity: func(ctx context.Context) (id.Epoch, pool.Role, bool) {
			i, ok := ctx.Value(identityKey{}).(identity)
			return i.epoch, i.role, ok
		},
		CheckCapacity: func(_ pool.Role, pages, pageTokens, window int) error {
			if pages*pageTokens < window {
				return errors.New("the pool is smaller than the window")
			}
			return nil
		},
		History: func(_ context.Context, e id.Epoch, blocks [][]byte) (uint64, error) {
			b.stored = append(b.stored, e)
			return uint64(len(blocks)), b.history
		},
		Changed: func(w *pool.Worker, gone bool) {
			b.mu.Lock()
			defer b.mu.Unlock()
			b.came = append(b.came, string(w.Role)+map[bool]string{false: " came", true: " went"}[gone])
		},
	})
	return b
}

func as(e id.Epoch, r pool.Role) context.Context {
	return context.WithValue(context.Background(), identityKey{}, identity{e, r})
}

func request(e id.Epoch, r pool.Role, pages int) *poolv1.RegisterRequest {
	role, fabric := poolv1.Role_ROLE_DECODE, ""
	if r == pool.Prefill {
		role, fabric = poolv1.Role_ROLE_PREFILL, "unix:/f"
	}
	return &poolv1.RegisterRequest{Epoch: e[:], Role: role, Address: "unix:/x", FabricAddress: fabric,
		ModelDigest: make([]byte, 32), Geometry: make([]byte, 32), PageTokens: 16, Pages: uint32(pages), ContextWindow: 1024}
}

func (b *bundle) register(t *testing.T, r pool.Role, pages int) id.Epoch {
	t.Helper()
	e := id.NewEpoch(time.Now())
	_, err := b.Register(as(e, r), request(e, r, pages))
	assert.NoError(t, err)
	return e
}

func TestPickNeedsBothLegs(t *testing.T) {
	t.Parallel()
	b := setup(t)
	_, err := b.Pick([32]byte{})
	assert.Equal(t, assert.ErrorAs[*apperr.Error](t, err).Kind, apperr.Unavailable)
	b.register(t, pool.Prefill, 64)
	_, err = b.Pick([32]byte{})
	assert.True(t, err != nil)
	d := b.register(t, pool.Decode, 64)
	pair, err := b.Pick([32]byte{})
	assert.NoError(t, err)
	pair.Release()
	_, err = b.Pick([32]byte{1})
	assert.True(t, err != nil)

	b.Lost(d)
	_, err = b.Pick([32]byte{})
	assert.True(t, err != nil)
	select {
	case <-pair.Decode.Gone():
	default:
		t.Fatal("a request on a lost worker is not told")
	}
	assert.Equal(t, b.came, []string{"prefill came", "decode came", "decode went"})
}

func TestPickTakesTheLeastLoaded(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.register(t, pool.Prefill, 64)
	b.register(t, pool.Decode, 64)
	b.register(t, pool.Decode, 64)
	one, err := b.Pick([32]byte{})
	assert.NoError(t, err)
	two, err := b.Pick([32]byte{})
	assert.NoError(t, err)
	assert.True(t, one.Decode.Epoch != two.Decode.Epoch)
	one.Release()
	three, err := b.Pick([32]byte{})
	assert.NoError(t, err)
	assert.True(t, three.Decode.Epoch == one.Decode.Epoch)
}

func TestSilentWorkerGetsNothing(t *testing.T) {
	t.Parallel()
	b := setup(t)
	p := b.register(t, pool.Prefill, 64)
	d := b.register(t, pool.Decode, 64)
	b.advance(pool.StaleAfter)
	_, err := b.Pick([32]byte{})
	assert.True(t, err != nil)
	assert.Equal(t, b.EffectiveContext([32]byte{}), 0)
	for e, r := range map[id.Epoch]pool.Role{p: pool.Prefill, d: pool.Decode} {
		res, err := b.Heartbeat(as(e, r), &poolv1.HeartbeatRequest{Epoch: e[:]})
		assert.NoError(t, err)
		assert.True(t, res.GetKnown())
	}
	assert.NoError(t, b.WaitReady(t.Context(), [32]byte{}))
	res, err := b.Heartbeat(as(d, pool.Decode), &poolv1.HeartbeatRequest{Epoch: d[:], Draining: true})
	assert.NoError(t, err)
	assert.True(t, res.GetKnown())
	_, err = b.Pick([32]byte{})
	assert.True(t, err != nil)
}

// Whichever leg it is and in whatever order they are asked: the least decides.
func TestEffectiveContextIsTheLeast(t *testing.T) {
	t.Parallel()
	for _, least := range []pool.Role{pool.Prefill, pool.Decode} {
		b := setup(t)
		b.register(t, pool.Prefill, 64)
		b.register(t, pool.Decode, 1000)
		assert.Equal(t, b.EffectiveContext([32]byte{}), 1024)
		e := id.NewEpoch(time.Now())
		r := request(e, least, 64)
		r.ContextWindow = 512
		_, err := b.Register(as(e, least), r)
		assert.NoError(t, err)
		for range 20 { // workers are asked in any order
			assert.Equal(t, b.EffectiveContext([32]byte{}), 512)
		}
		b.Lost(e)
		assert.Equal(t, b.EffectiveContext([32]byte{}), 1024)
	}
}

func TestRegisterRefuses(t *testing.T) {
	t.Parallel()
	b := setup(t)
	e, other := id.NewEpoch(time.Now()), id.NewEpoch(time.Now())
	code := func(ctx context.Context, r *poolv1.RegisterRequest) connect.Code {
		_, err := b.Register(ctx, r)
		return connect.CodeOf(err)
	}
	assert.Equal(t, code(context.Background(), request(e, pool.Decode, 64)), connect.CodePermissionDenied)
	assert.Equal(t, code(as(other, pool.Decode), request(e, pool.Decode, 64)), connect.CodePermissionDenied)
	assert.Equal(t, code(as(e, pool.Prefill), request(e, pool.Decode, 64)), connect.CodePermissionDenied)
	assert.Equal(t, code(as(e, pool.Decode), request(e, pool.Decode, 63)), connect.CodeFailedPrecondition)
	bad := request(e, pool.Decode, 64)
	bad.ModelDigest = bad.ModelDigest[:31]
	assert.Equal(t, code(as(e, pool.Decode), bad), connect.CodeInvalidArgument)
	bad = request(e, pool.Prefill, 64)
	bad.FabricAddress = ""
	assert.Equal(t, code(as(e, pool.Prefill), bad), connect.CodeInvalidArgument)

	// An epoch that is over does not come back.
	b.Lost(e)
	_, err := b.Register(as(e, pool.Decode), request(e, pool.Decode, 64))
	assert.Equal(t, connect.CodeOf(err), connect.CodeFailedPrecondition)
	assert.True(t, strings.Contains(err.Error(), "is over"))
	_, err = b.Heartbeat(as(other, pool.Decode), &poolv1.HeartbeatRequest{Epoch: e[:]})
	assert.Equal(t, connect.CodeOf(err), connect.CodePermissionDenied)
}

func TestWaitReadyEnds(t *testing.T) {
	t.Parallel()
	b := setup(t)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	assert.ErrorIs(t, b.WaitReady(ctx, [32]byte{}), context.DeadlineExceeded)
	done := make(chan error, 1)
	go func() { done <- b.WaitReady(t.Context(), [32]byte{}) }()
	b.register(t, pool.Prefill, 64)
	b.register(t, pool.Decode, 64)
	assert.NoError(t, <-done)
}

// A worker writes its own history and no other; what does not fit is not the same
// as what cannot be stored now, and neither tells why to a worker.
func TestAppendHistory(t *testing.T) {
	t.Parallel()
	b := setup(t)
	mine, other := id.NewEpoch(time.Now()), id.NewEpoch(time.Now())
	ask := func(ctx context.Context, epoch []byte, blocks int) (uint64, connect.Code) {
		resp, err := b.AppendHistory(ctx, &poolv1.AppendHistoryRequest{Epoch: epoch, Blocks: make([][]byte, blocks)})
		if err != nil {
			assert.False(t, strings.Contains(err.Error(), "SECRET"))
			return 0, connect.CodeOf(err)
		}
		return resp.GetStored(), 0
	}
	for name, c := range map[string]struct {
		ctx   context.Context
		epoch []byte
	}{
		"of another worker": {as(mine, pool.Decode), other[:]},
		"by nobody":         {t.Context(), mine[:]},
		"of no epoch":       {as(mine, pool.Decode), mine[:15]},
		"of none at all":    {as(mine, pool.Decode), nil},
	} {
		if _, code := ask(c.ctx, c.epoch, 1); code != connect.CodePermissionDenied {
			t.Errorf("%s: %v", name, code)
		}
	}
	_, code := ask(as(mine, pool.Decode), mine[:], history.MaxPending+1)
	assert.Equal(t, code, connect.CodeInvalidArgument)
	assert.Equal(t, len(b.stored), 0)

	n, code := ask(as(mine, pool.Decode), mine[:], history.MaxPending)
	assert.Equal(t, code, 0)
	assert.Equal(t, n, uint64(history.MaxPending))
	assert.Equal(t, b.stored, []id.Epoch{mine})
	b.history = errors.New("SECRET")
	_, code = ask(as(mine, pool.Decode), mine[:], 1)
	assert.Equal(t, code, connect.CodeUnavailable)
	b.history = history.ErrBlock
	_, code = ask(as(mine, pool.Decode), mine[:], 1)
	assert.Equal(t, code, connect.CodeFailedPrecondition)
}
