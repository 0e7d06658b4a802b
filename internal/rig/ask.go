package rig

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"

	"bulkhead.dev/engine/model/synth"
)

// Answer is what a client of the OpenAI surface gets.
type Answer struct {
	Status int
	Code   string // of the error; "" with status 200
	Text   string
}

// Ask asks for a chat completion, as the n-th tenant, greedily. The error says
// that there was no answer.
func (r *Rig) Ask(ctx context.Context, tenant int, text string, maxTokens int) (a Answer, err error) {
	res, err := r.post(ctx, tenant, text, maxTokens, false)
	if err != nil {
		return a, err
	}
	defer res.Body.Close()
	return readAnswer(res)
}

func (r *Rig) post(ctx context.Context, tenant int, text string, maxTokens int, stream bool) (*http.Response, error) {
	body, err := json.Marshal(map[string]any{
		"model": Model, "max_tokens": maxTokens, "temperature": 0, "stream": stream,
		"messages": []any{map[string]string{"role": "user", "content": text}},
	})
	if err != nil {
		return nil, fmt.Errorf("encode a question: %w", err)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.URL+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		return nil, fmt.Errorf("ask: %w", err)
	}
	req.Header.Set("Authorization", "Bearer "+Key(tenant))
	req.Header.Set("Content-Type", "application/json")
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, fmt.Errorf("ask: %w", err)
	}
	return res, nil
}

// readAnswer reads an answer that is not streamed, or an error.
func readAnswer(res *http.Response) (a Answer, err error) {
	b, err := io.ReadAll(res.Body)
	if err != nil {
		return a, fmt.Errorf("read an answer: %w", err)
	}
	var answer struct {
		Choices []struct {
			Message struct{ Content string }
		}
		Error struct{ Code string }
	}
	if err := json.Unmarshal(b, &answer); err != nil {
		return a, fmt.Errorf("read an answer: %w", err)
	}
	a = Answer{Status: res.StatusCode, Code: answer.Error.Code}
	if len(answer.Choices) == 1 {
		a.Text = answer.Choices[0].Message.Content
	}
	return a, nil
}

// Copied is the answer of the copy model to a text of at least as many bytes as
// it copies over.
func Copied(text string, tokens int) string {
	out := []byte(text)
	for range tokens {
		out = append(out, out[len(out)-synth.CopyDistance])
	}
	return string(out[len(text):])
}
