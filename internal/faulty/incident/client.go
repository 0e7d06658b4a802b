//go:build faulty

package incident

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
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

type client struct{ url string }

type result struct {
	status int
	code   string
	text   string
}

// ask asks for a completion, as a tenant.
func (c client) ask(ctx context.Context, tenant int, text string, maxTokens int) (r result, err error) {
	body, err := json.Marshal(map[string]any{
		"model": rig.Model, "max_tokens": maxTokens, "temperature": 0, "messages": []any{map[string]string{"role": "user", "content": text}},
	})
	if err != nil {
		return r, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		return r, err
	}
	req.Header.Set("Authorization", "Bearer "+rig.Key(tenant))
	req.Header.Set("Content-Type", "application/json")
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return r, err
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		return r, err
	}
	var answer struct {
		Choices []struct {
			Message struct{ Content string }
		}
		Error struct{ Code string }
	}
	if err := json.Unmarshal(b, &answer); err != nil {
		return r, fmt.Errorf("answer %q: %w", b, err)
	}
	r = result{status: res.StatusCode, code: answer.Error.Code}
	if len(answer.Choices) == 1 {
		r.text = answer.Choices[0].Message.Content
	}
	return r, nil
}

// normal asks for something short and reports whether the answer is what the
// copy model must say.
func (c client) normal(ctx context.Context, tenant, n int) bool {
	text := fmt.Sprintf("tenant %02d asks question number %04d of many, and waits", tenant, n)
	const length = 48
	want := ""
	for i := range length {
		want += string(text[len(text)-synth.CopyDistance+i%synth.CopyDistance])
	}
	res, err := c.ask(ctx, tenant, text, length)
	return err == nil && res.status == http.StatusOK && res.text == want
}
