package quota_test

import (
	"testing"
	"time"

	"pgregory.net/rapid"

	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/tenancy/quota"
)

// running is a request of the model.
type running struct {
	node     *node
	r        *quota.Reservation
	request  id.Request
	in, out  int
	at       time.Time // by the clock of the database
	finished bool
	spent    int64
}

// tokens is what the request counts now: what it may use, or did.
func (q *running) tokens() int64 {
	if q.finished {
		return q.spent
	}
	return int64(q.in + q.out)
}

// Replicas reserve, finish, die and are recovered, and the clock steps to and
// fro, in any order: what is reserved and spent never exceeds a limit, and in the
// end exactly what was not spent is left.
func TestAnySchedule(t *testing.T) {
	t.Parallel()
	b := setup(t)
	at := b.freeze(t)
	clock := time.Date(2026, 4, 1, 23, 58, 0, 0, time.UTC)
	at(clock)
	nodes := []*node{b.node(t), b.node(t), b.node(t)}
	rapid.Check(t, func(rt *rapid.T) {
		b.exec(t, "DELETE FROM quota_limit")
		slots := rapid.Int64Range(1, 6).Draw(rt, "slots")
		day := rapid.Int64Range(50, 600).Draw(rt, "day")
		minute := rapid.Int64Range(50, 600).Draw(rt, "minute")
		slotLimit := b.limit(t, quota.Limit{Meter: quota.Concurrent, Period: quota.None, Amount: slots})
		dayLimit := b.limit(t, quota.Limit{Meter: quota.Tokens, Period: quota.Day, Amount: day})
		b.limit(t, quota.Limit{Meter: quota.Tokens, Period: quota.Minute, Amount: minute})
		var all []*running
		latest := clock // the clock of a bucket never steps back
		dead := map[*node]bool{}
		check := func() {
			var now, today int64
			since := latest.Truncate(24 * time.Hour)
			for i, q := range all {
				if !q.finished {
					now++
				}
				if !q.at.Before(since) {
					today += q.tokens()
				}
				var burst int64 // from this one on
				for _, p := range all[i:] {
					burst += p.tokens()
				}
				if most := minute + int64(latest.Sub(q.at).Seconds()*float64(minute)/60); burst > most {
					rt.Fatalf("%d tokens since %s, and the limit allows %d", burst, latest.Sub(q.at), most)
				}
			}
			if now > slots || today > day {
				rt.Fatalf("%d of %d slots, %d of %d tokens", now, slots, today, day)
			}
		}
		pick := func() *running {
			var open []*running
			for _, q := range all {
				if !q.finished && !dead[q.node] {
					open = append(open, q)
				}
			}
			if len(open) == 0 {
				rt.Skip("nothing runs")
			}
			return rapid.SampledFrom(open).Draw(rt, "request")
		}
		end := func(q *running, in, out int) {
			b.spend(t, q.node, q.r, in, out)
			b.exec(t, "DELETE FROM intent WHERE request_id = $1", [16]byte(q.request))
			q.finished, q.spent = true, int64(in+out)
		}
		recovered := func(n *node, settled bool) {
			if settled {
				for _, q := range all {
					if q.node == n && !q.finished {
						q.finished = true // lost, and charged to nobody
					}
				}
				b.exec(t, "DELETE FROM intent WHERE replica = $1", [16]byte(n.epoch))
			}
			if err := quota.Recover(t.Context(), b.Pools.Quota, n.epoch); settled {
				assert.NoError(t, err)
				delete(dead, n)
			}
		}
		rt.Repeat(map[string]func(*rapid.T){
			"": func(*rapid.T) { check() },
			"reserve": func(rt *rapid.T) {
				q := &running{node: rapid.SampledFrom(nodes).Draw(rt, "node"), in: rapid.IntRange(1, 60).Draw(rt, "in"), out: rapid.IntRange(1, 60).Draw(rt, "out"), at: latest}
				a := b.ask
				a.Input, a.Output = q.in, q.out
				var err error
				if q.r, err = q.node.Reserve(t.Context(), a); err != nil {
					if k := apperr.From(err).Kind; k != apperr.TooMany && k != apperr.Unavailable {
						rt.Fatal(err)
					}
					return
				}
				q.request = b.intend(t, q.node, q.r)
				all = append(all, q)
			},
			"finish": func(rt *rapid.T) {
				q := pick()
				end(q, rapid.IntRange(0, q.in).Draw(rt, "used in"), rapid.IntRange(0, q.out).Draw(rt, "used out"))
			},
			"die": func(rt *rapid.T) {
				i := rapid.IntRange(0, len(nodes)-1).Draw(rt, "node")
				b.die(t, nodes[i])
				dead[nodes[i]] = true
				nodes[i] = b.node(t)
			},
			"recover": func(rt *rapid.T) {
				for n := range dead {
					recovered(n, rapid.Bool().Draw(rt, "settled"))
					return
				}
			},
			"clock": func(rt *rapid.T) {
				clock = clock.Add(time.Duration(rapid.IntRange(-3000, 8000).Draw(rt, "ms")) * time.Millisecond)
				at(clock)
				if clock.After(latest) {
					latest = clock
				}
			},
		})
		for _, q := range all {
			if !q.finished && !dead[q.node] {
				end(q, q.in, q.out)
			}
		}
		for n := range dead {
			recovered(n, true)
		}
		check()
		var today int64
		for _, q := range all {
			if !q.at.Before(latest.Truncate(24 * time.Hour)) {
				today += q.tokens()
			}
		}
		at(latest)
		clock = latest
		// Slices go back when nobody uses them.
		for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(20 * time.Millisecond) {
			remaining, held := b.left(t, dayLimit)
			free, taken := b.left(t, slotLimit)
			if remaining == day-today && held == 0 && free == slots && taken == 0 {
				break
			}
			if time.Now().After(deadline) {
				rt.Fatalf("%d of %d tokens are left, %d held; %d of %d slots, %d held; %d were spent", remaining, day, held, free, slots, taken, today)
			}
			latest = latest.Add(100 * time.Millisecond)
			clock = latest
			at(clock)
		}
	})
}
