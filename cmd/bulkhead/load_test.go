package main_test

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"bulkhead.dev/infra/assert"
)

// Many clients at once, some of whom leave in the middle: equal requests get
// equal answers, each request has one receipt, and every page comes back.
func TestManyClients(t *testing.T) {
	t.Parallel()
	data := scratch(t)
	r := start(t, data, randomModel(t, data))
	body := func(i int, stream bool) string {
		return fmt.Sprintf(`{"model":%q,"messages":[{"role":"user","content":"question %d"}],"max_tokens":40,"seed":%d,"stream":%v}`, r.Model, i%5, i%5, stream)
	}
	var want [5]string
	for i := range want {
		res, text := r.ask(t, "/v1/chat/completions", body(i, false))
		assert.Equal(t, res.StatusCode, 200)
		want[i] = content(text)
	}
	const clients, requests = 12, 20
	var mu sync.Mutex
	var answered, left []*http.Response
	var wg sync.WaitGroup
	for c := range clients {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(1, uint64(c)))
			for range requests {
				i, leave := rng.IntN(5), rng.IntN(4) == 0
				ctx, cancel := context.WithCancel(t.Context())
				res := r.request(ctx, t, "/v1/chat/completions", body(i, leave))
				if leave {
					_, _ = io.ReadFull(res.Body, make([]byte, 1+rng.IntN(2000)))
					cancel()
				}
				b, err := io.ReadAll(res.Body)
				_ = res.Body.Close()
				cancel()
				mu.Lock()
				if leave {
					left = append(left, res)
				} else {
					answered = append(answered, res)
					if err != nil || res.StatusCode != http.StatusOK || content(string(b)) != want[i] {
						t.Errorf("question %d under load: status %d, %v, another answer than alone: %v", i, res.StatusCode, err, content(string(b)) != want[i])
					}
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	assert.True(t, len(answered) > 100 && len(left) > 20)
	for _, res := range append(left, answered[:10]...) {
		got := r.receipt(t, res)
		assert.True(t, got.Outcome == "completed" || got.Outcome == "canceled")
	}
	eventually(t, "all pages are back", func() bool {
		for _, role := range []string{"prefill", "decode"} {
			for _, state := range []string{"granted", "filling", "reading", "quarantined"} {
				if r.metric(t, fmt.Sprintf("bulkhead_kv_pages{role=%q,state=%q}", role, state)) != "0" {
					return false
				}
			}
			// All that is sealed is remembered.
			if r.metric(t, fmt.Sprintf("bulkhead_kv_pages{role=%q,state=\"sealed\"}", role)) != r.metric(t, fmt.Sprintf("bulkhead_kv_cached_pages{role=%q}", role)) {
				return false
			}
		}
		return r.metric(t, "bulkhead_requests_in_flight") == "0"
	})
	time.Sleep(100 * time.Millisecond)
	assert.Equal(t, r.metric(t, "bulkhead_settle_duration_seconds_count"), fmt.Sprint(5+clients*requests))
}

// content cuts the text out of an answer.
func content(body string) string {
	_, rest, _ := strings.Cut(body, `"content":`)
	text, _, _ := strings.Cut(rest, `,"refusal"`)
	return text
}
