//go:build faulty

package incident

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"

	"bulkhead.dev/audit/receipt"
	"bulkhead.dev/internal/rig"
)

// traffic fills the pages of a platform with canaries and then asks what prefill
// rejects, among prompts of other tenants.
func (row *Row) traffic(ctx context.Context, r *rig.Rig, prompts int) error {
	if err := row.canaries(ctx, r); err != nil {
		return err
	}
	for i := range prompts {
		if i%2 == 0 {
			row.others(ctx, r, i)
		}
		// From the longest prompt that could be served at all down to the first
		// that does not fit: each leaves the pages in front of its own end as the
		// victims left them.
		n := Window - answerTokens - i*(Window-answerTokens-PoolSize-1)/max(prompts-1, 1)
		asker := firstAttacker + i%attackers
		ask := r.Ask
		if i%2 == 1 {
			ask = r.AskStream
		}
		a, err := ask(ctx, asker, question(asker, n, row.Cause == Other), answerTokens)
		if err != nil {
			return err
		}
		row.count(asker, a)
	}
	row.receipts(r.Receipts())
	return nil
}

// canaries has the victims fill the pages of decode, as far as the platform lets
// them.
func (row *Row) canaries(ctx context.Context, r *rig.Rig) error {
	const times = 39
	for k, end := range ends {
		if window := r.Registry.EffectiveContext(r.Digest); row.stands(Edge) {
			end = min(end, window)
		}
		prompt := strings.Repeat(canaries[k], times)
		row.normal(asMustBe(ctx, r, k, prompt, end-1-len(prompt)))
	}
	return ctx.Err()
}

// others has two of the others ask at the same time.
func (row *Row) others(ctx context.Context, r *rig.Rig, n int) {
	var asking sync.WaitGroup
	var right [2]bool
	for k := range right {
		asking.Go(func() {
			tenant := firstOther + (n+k)%(tenants-firstOther)
			right[k] = asMustBe(ctx, r, tenant, ordinary(tenant, n), 34)
		})
	}
	asking.Wait()
	for _, ok := range right {
		row.normal(ok)
	}
}

func (row *Row) normal(right bool) {
	row.Normal++
	if right {
		row.Golden++
	}
}

// asMustBe reports whether a prompt is answered as the copy model must.
func asMustBe(ctx context.Context, r *rig.Rig, tenant int, prompt string, tokens int) bool {
	a, err := r.Ask(ctx, tenant, prompt, tokens)
	return err == nil && a.Status == http.StatusOK && a.Text == rig.Copied(prompt, tokens)
}

func (row *Row) count(asker int, a rig.Answer) {
	row.Rejected++
	if a.Status == http.StatusOK && a.Code == "" {
		row.Answered++
	} else {
		row.Refused[fmt.Sprintf("%d %s", a.Status, a.Code)]++
		if a.Text != "" {
			row.Partial++
		}
	}
	if n, of := leaked(a.Text, asker); n > 0 {
		row.Leaks++
		row.Bytes += n
		for _, v := range of {
			row.Whose[v] = true
		}
		row.Leak = Leak{Asker: asker, Victim: of[0], Text: a.Text}
	}
}

// receipts reads what was recorded, as one would after the fact.
func (row *Row) receipts(all []receipt.Receipt) {
	for _, rec := range all {
		switch {
		case rec.Refusal != nil:
			row.Stopped[rec.Refusal.Reason]++
		case *rec.EdgeTokens != *rec.Prefill.Tokens || *rec.EdgeTokens != *rec.Decode.Tokens:
			row.Found++
		}
	}
}
