package openai

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"bulkhead.dev/infra/assert"
)

// A piece put between what is encoded once is what encoding all of it gives.
func TestEventText(t *testing.T) {
	t.Parallel()
	w := httptest.NewRecorder()
	e := &events{w: w, rc: http.NewResponseController(w)}
	make := func(text string) chunk {
		return chunk{ID: anyText, Model: anyText, Choices: []any{chunkChoice{Delta: delta{Content: &text}}}, Usage: nullableUse{present: true}}
	}
	e.add(make(anyText))
	head, tail := e.around(anyText)
	for _, text := range []string{"", "word", `"quoted" \ back`, "tab\tline\nnul\x00", "<b>&amp;</b>", "é 🦊 \u2028 \ufffd", anyText} {
		e.text(head, text, tail)
		got := string(e.buffer)
		e.buffer = e.buffer[:0]
		e.add(make(text))
		assert.Equal(t, got, string(e.buffer))
		assert.True(t, e.send())
		assert.Equal(t, w.Body.String(), got)
		w.Body.Reset()
		for _, b := range e.buffer[:cap(e.buffer)][:len(got)] { // texts of clients do not stay
			assert.Equal(t, b, 0)
		}
	}
}
