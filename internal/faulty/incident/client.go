//go:build faulty

package incident

import (
	"context"
	"fmt"
	"net/http"
	"strings"

	"bulkhead.dev/engine/model/synth"
	"bulkhead.dev/internal/rig"
)

// canary is the text of the victim. It has the length over which the copy model
// copies, so that every position of its answer, too, is canary.
const canary = "victim-canary/7f3a9c1e-0b5d2468;"

// answerTokens is how long the attacker's answers are: what the copy model
// reads for them lies in front of the last position of the prompt.
const answerTokens = synth.CopyDistance - 1

// question is a prompt of the attacker of so many tokens, the one that begins
// every prompt included. It has no letter in common with the canary.
func question(tokens int) string {
	const words = "WHAT IS THE WEATHER LIKE? "
	return strings.Repeat(words, tokens/len(words)+1)[:tokens-1]
}

// leakedBytes counts the bytes of a text that are part of eight or more bytes in
// a row of the canary.
func leakedBytes(text string) (n int) {
	const run = 8
	whole := strings.Repeat(canary, 3)
	hit := make([]bool, len(text))
	for i := 0; i+run <= len(text); i++ {
		if strings.Contains(whole, text[i:i+run]) {
			for k := range run {
				hit[i+k] = true
			}
		}
	}
	for _, h := range hit {
		if h {
			n++
		}
	}
	return n
}

// normal asks for something short and reports whether the answer is what the
// copy model must say.
func normal(ctx context.Context, r *rig.Rig, tenant, n int) bool {
	text := fmt.Sprintf("tenant %02d asks question number %04d of many, and waits", tenant, n)
	const length = 48
	a, err := r.Ask(ctx, tenant, text, length)
	return err == nil && a.Status == http.StatusOK && a.Text == rig.Copied(text, length)
}
