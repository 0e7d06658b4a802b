package rig

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
)

// AskStream is Ask with a streamed answer. An error inside of the stream has its
// code in the answer, beside the status 200 and the text that came before it.
func (r *Rig) AskStream(ctx context.Context, tenant int, text string, maxTokens int) (a Answer, err error) {
	res, err := r.post(ctx, tenant, text, maxTokens, true)
	if err != nil {
		return a, err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return readAnswer(res)
	}
	a.Status = res.StatusCode
	done := false
	lines := bufio.NewScanner(res.Body)
	for lines.Scan() {
		data, ok := bytes.CutPrefix(lines.Bytes(), []byte("data: "))
		if !ok {
			continue
		}
		if string(data) == "[DONE]" {
			done = true
			continue
		}
		var chunk struct {
			Choices []struct {
				Delta struct{ Content string }
			}
			Error struct{ Code string }
		}
		if err := json.Unmarshal(data, &chunk); err != nil {
			return a, fmt.Errorf("read a piece of an answer: %w", err)
		}
		if a.Code == "" {
			a.Code = chunk.Error.Code
		}
		for _, c := range chunk.Choices {
			a.Text += c.Delta.Content
		}
	}
	if err := lines.Err(); err != nil {
		return a, fmt.Errorf("read an answer: %w", err)
	}
	if done == (a.Code != "") {
		return a, fmt.Errorf("a stream with the error %q ended, %t", a.Code, done)
	}
	return a, nil
}
