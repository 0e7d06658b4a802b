package quota_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/infra/pgdb"
	"bulkhead.dev/infra/replica"
	"bulkhead.dev/infra/secret"
	"bulkhead.dev/tenancy/quota"
)

// intend writes the intent of a request that holds something.
func (b *bundle) intend(t testing.TB, n *node, r *quota.Reservation) id.Request {
	t.Helper()
	request := id.NewRequest(time.Now())
	var limits [][16]byte
	var amounts []int64
	for _, h := range r.Holds() {
		limits, amounts = append(limits, h.Limit), append(amounts, h.Amount)
	}
	b.exec(t, `INSERT INTO intent (request_id, tenant, project, api_key, replica, reserved_tokens, created_at, limits, amounts)
		VALUES ($1, $2, $3, $4, $5, 0, now(), $6, $7)`, [16]byte(request), [16]byte(b.ask.Tenant), [16]byte(b.ask.Project), [16]byte(b.ask.Key),
		[16]byte(n.epoch), limits, amounts)
	return request
}

// die ends a replica that says nothing: what it holds is as its last exchange
// left it.
func (b *bundle) die(t testing.TB, n *node) {
	t.Helper()
	b.exec(t, "UPDATE replica SET ended_at = now() WHERE epoch = $1", [16]byte(n.epoch))
	n.stop() // its last exchange is refused
}

// A replica dies with requests that run, others that are settled, and slices
// that nobody uses. What is settled stays spent, what runs stays held until the
// workers have let go of it, and the rest is free at once.
func TestDeadReplica(t *testing.T) {
	t.Parallel()
	b := setup(t)
	day := b.limit(t, quota.Limit{Meter: quota.Tokens, Period: quota.Day, Amount: 100_000})
	slots := b.limit(t, quota.Limit{Meter: quota.Concurrent, Period: quota.None, Amount: 40})
	n, other := b.node(t), b.node(t)
	for range 20 { // so that it holds more than it needs
		r, err := n.Reserve(t.Context(), b.ask)
		assert.NoError(t, err)
		b.spend(t, n, r, 10, 15)
	}
	var requests []id.Request
	for range 3 {
		r, err := n.Reserve(t.Context(), b.ask)
		assert.NoError(t, err)
		requests = append(requests, b.intend(t, n, r))
	}
	_, err := b.Pools.Quota.Exec(t.Context(), "SELECT quota_recover($1)", [16]byte(n.epoch))
	assert.Equal(t, pgdb.State(err), "BH002") // a living replica keeps what it has
	b.die(t, n)
	_, err = n.Reserve(t.Context(), b.ask)
	assert.True(t, err != nil)

	assert.ErrorIs(t, quota.Recover(t.Context(), b.Pools.Quota, n.epoch), quota.ErrHeld)
	remaining, held := b.left(t, day)
	assert.Equal(t, []int64{remaining, held}, []int64{100_000 - 20*25 - 3*100, 3 * 100})
	remaining, held = b.left(t, slots)
	assert.Equal(t, []int64{remaining, held}, []int64{37, 3})
	got, _ := gather(60, func(int) (*quota.Reservation, error) { return other.Reserve(t.Context(), b.ask) })
	assert.Equal(t, len(got), 37)
	for _, r := range got {
		r.Close()
	}
	b.exec(t, "DELETE FROM intent WHERE request_id = $1", [16]byte(requests[0]))
	assert.ErrorIs(t, quota.Recover(t.Context(), b.Pools.Quota, n.epoch), quota.ErrHeld)
	b.exec(t, "DELETE FROM intent")
	assert.NoError(t, quota.Recover(t.Context(), b.Pools.Quota, n.epoch))
	assert.NoError(t, quota.Recover(t.Context(), b.Pools.Quota, n.epoch))
	other.stop()
	remaining, held = b.left(t, day)
	assert.Equal(t, []int64{remaining, held}, []int64{100_000 - 20*25, 0})
	remaining, held = b.left(t, slots)
	assert.Equal(t, []int64{remaining, held}, []int64{40, 0})
}

// An exchange that was given up does not come true after the next.
func TestLateExchange(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.limit(t, quota.Limit{Meter: quota.Concurrent, Period: quota.None, Amount: 5})
	n := b.node(t)
	r, err := n.Reserve(t.Context(), b.ask)
	assert.NoError(t, err)
	defer r.Close()
	_, err = b.Pools.Quota.Exec(t.Context(), "SELECT quota_exchange($1, 1, '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}')", [16]byte(n.epoch))
	assert.Equal(t, pgdb.State(err), "BH001")
}

const processEnv = "BULKHEAD_QUOTA_PROCESS"

// process is what one process of TestOneOfThreeIsKilled is told.
type process struct {
	DSN      string
	Ask      quota.Ask
	Counters string // a file with a counter for each process and one for the highest sum
	Number   int
	Limit    int64
}

// counters are shared by the processes: how many reservations each holds now,
// and the most that all held.
type counters struct {
	held [3]atomic.Int64
	most atomic.Int64
}

func mapCounters(path string) (*counters, error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	m, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, err
	}
	return (*counters)(unsafe.Pointer(unsafe.SliceData(m))), nil
}

func (c *counters) add(i int) {
	c.held[i].Add(1)
	sum := c.held[0].Load() + c.held[1].Load() + c.held[2].Load()
	for most := c.most.Load(); sum > most && !c.most.CompareAndSwap(most, sum); {
		most = c.most.Load()
	}
}

// runProcess is a replica with 67 clients that all want something all the time.
func runProcess(p process) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	pools, err := pgdb.Open(ctx, pgdb.Source{DSN: secret.New(p.DSN), RoleSecret: secret.New("0000000000000000000000000000000000000000000000000000000000000000")}, pgdb.DefaultSizes)
	if err != nil {
		return err
	}
	defer pools.Close()
	c, err := mapCounters(p.Counters)
	if err != nil {
		return err
	}
	epoch := id.NewEpoch(time.Now())
	m, err := replica.Join(ctx, replica.Options{DB: pools.Quota, Epoch: epoch, Now: time.Now, Recover: func(ctx context.Context, dead id.Epoch) error {
		return quota.Recover(ctx, pools.Quota, dead)
	}})
	if err != nil {
		return err
	}
	book := quota.New(quota.Options{DB: pools.Quota, Replica: epoch, Fenced: m.Fenced, Now: time.Now})
	var all sync.WaitGroup
	all.Go(func() { _ = m.Run(ctx) })
	all.Go(func() { _ = book.Run(ctx) })
	for range 67 {
		all.Go(func() {
			for ctx.Err() == nil {
				r, err := book.Reserve(ctx, p.Ask)
				if err != nil {
					time.Sleep(20 * time.Millisecond)
					continue
				}
				c.add(p.Number)
				time.Sleep(10 * time.Millisecond)
				c.held[p.Number].Add(-1)
				r.Close()
			}
		})
	}
	_, _ = os.Stdin.Read(make([]byte, 1)) // until the test ends
	cancel()
	all.Wait()
	return nil
}

// Three replicas are processes of their own, 200 clients want one limit of 20, and
// one replica is killed: at no instant are there more than 20, and 15 seconds
// later the two others have all 20.
func TestOneOfThreeIsKilled(t *testing.T) {
	t.Parallel()
	b := setup(t)
	limit := b.limit(t, quota.Limit{Meter: quota.Concurrent, Period: quota.None, Amount: 20})
	path := filepath.Join(t.TempDir(), "counters")
	assert.NoError(t, os.WriteFile(path, make([]byte, 4096), 0o600))
	c, err := mapCounters(path)
	assert.NoError(t, err)
	config := b.Pools.Quota.Config().ConnConfig
	var killed *exec.Cmd
	for i := range 3 {
		p := process{Ask: b.ask, Counters: path, Number: i,
			DSN: fmt.Sprintf("host=%s port=%d dbname=%s", config.Host, config.Port, config.Database)}
		conf, err := json.Marshal(p)
		assert.NoError(t, err)
		exe, err := os.Executable()
		assert.NoError(t, err)
		cmd := exec.Command(exe)
		cmd.Env = append(os.Environ(), processEnv+"="+string(conf))
		cmd.Stderr = os.Stderr
		in, err := cmd.StdinPipe()
		assert.NoError(t, err)
		assert.NoError(t, cmd.Start())
		if i == 0 {
			killed = cmd
			continue
		}
		t.Cleanup(func() {
			_ = in.Close()
			assert.NoError(t, cmd.Wait())
		})
	}
	full := func() bool { return c.held[0].Load()+c.held[1].Load()+c.held[2].Load() == 20 }
	within := func(d time.Duration, what string, ok func() bool) {
		t.Helper()
		for end := time.Now().Add(d); !ok(); time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("%s: not within %s", what, d)
			}
		}
	}
	within(30*time.Second, "all of the limit is used", func() bool {
		return full() && c.held[0].Load() > 0
	})
	assert.NoError(t, killed.Process.Kill())
	_ = killed.Wait()
	died := time.Now()
	c.held[0].Store(0) // its requests went with it
	within(15*time.Second, "all of the limit is used again", full)
	t.Logf("all of the limit was used %s after the death", time.Since(died).Round(100*time.Millisecond))
	assert.Equal(t, c.most.Load(), 20)
	remaining, held := b.left(t, limit)
	assert.Equal(t, remaining+held, 20)
}
