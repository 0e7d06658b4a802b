//go:build faulty

package incident

import (
	"fmt"
	"slices"
	"strings"

	"bulkhead.dev/engine/model/synth"
)

// Tenants: those whose text must not leak, those whose prompts prefill rejects,
// and the others.
const (
	victims   = 3
	attackers = 3
	tenants   = 14

	firstAttacker = victims
	firstOther    = victims + attackers
)

// canaries are the texts of the victims. Each has the length over which the copy
// model copies, so that every position of the answer, too, is canary.
var canaries = [victims]string{
	"victim-canary/7f3a9c1e-0b5d2468;",
	"second-secret:c41b77d0+9e8f1a35;",
	"third-payroll=5ae0d2c9*6417bb83;",
}

// ends are the tokens of prompt and answer of each victim. They run in this
// order, and each takes the pages at the front of what the one before left, so
// that the pool then holds text of all.
var ends = [victims]int{Window - 15, PoolSize + (Window-PoolSize)*2/3, PoolSize + (Window-PoolSize)/3}

// victimAt returns the victim whose text a position of the pool holds.
func victimAt(position int) int {
	for k := victims - 1; k > 0; k-- {
		if position < ends[k]-1 { // the last token of an answer is not computed
			return k
		}
	}
	return 0
}

// questions are what the attackers ask, over and over. They have no letter in
// common with a canary.
var questions = [attackers]string{"WHAT IS THE WEATHER LIKE? ", "HOW LONG MAY A RIVER BE, OR A SNAKE? ", "NAME ALL SEABIRDS, PLEASE. "}

// answerTokens is how long the attackers' answers are: what the copy model
// reads for them lies in front of the last position of the prompt.
const answerTokens = synth.CopyDistance - 1

// mark begins a prompt that prefill rejects for a reason of its own; markToken
// is its id.
const (
	mark      = '~'
	markToken = synth.FirstByte + mark
)

// question is a prompt of so many tokens, the one that begins every prompt
// included. The attacker is lucky: it ends in the letter that stands at that
// position of the pages it is about to get.
func question(attacker, tokens int, marked bool) string {
	words := questions[attacker-firstAttacker]
	text := []byte(strings.Repeat(words, tokens/len(words)+1)[:tokens-1])
	if marked {
		text[0] = mark
	}
	canary := canaries[victimAt(tokens-1)]
	text[len(text)-1] = canary[(tokens-2)%len(canary)]
	return string(text)
}

// ordinary is a short prompt of one of the others, of one of several lengths.
func ordinary(tenant, n int) string {
	return fmt.Sprintf("%stenant %02d asks question number %04d of many, and waits", strings.Repeat("well, then; ", n/2%5*4), tenant, n)
}

// text is what everything that a tenant says is made of.
func text(tenant int) string {
	switch {
	case tenant < firstAttacker:
		return strings.Repeat(canaries[tenant], 3)
	case tenant < firstOther:
		return strings.Repeat(questions[tenant-firstAttacker], 3)
	}
	return ordinary(tenant, 9999)
}

// run is how many bytes in a row have to be those of another tenant to count as
// leaked.
const run = 8

// leaked returns how many bytes of an answer are part of a run of another
// tenant's text, and whose they are.
func leaked(answer string, asker int) (bytes int, of []int) {
	hit := make([]bool, len(answer))
	for tenant := range tenants {
		if tenant == asker {
			continue
		}
		whole := text(tenant)
		for i := 0; i+run <= len(answer); i++ {
			if !strings.Contains(whole, answer[i:i+run]) {
				continue
			}
			for k := range run {
				hit[i+k] = true
			}
			if !slices.Contains(of, tenant) {
				of = append(of, tenant)
			}
		}
	}
	for _, h := range hit {
		if h {
			bytes++
		}
	}
	return bytes, of
}
