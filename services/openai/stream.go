package openai

import (
	"context"
	"crypto/rand"
	"errors"
	"io"
	"net/http"
	"time"

	"github.com/go-json-experiment/json"

	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/services/httpx"
)

// chunk is one event of a stream. Usage is left out unless it was asked for;
// then it is null in every chunk but the last.
type chunk struct {
	ID          string      `json:"id"`
	Object      string      `json:"object"`
	Created     int64       `json:"created"`
	Model       string      `json:"model"`
	Choices     []any       `json:"choices"`
	Usage       nullableUse `json:"usage,omitzero"`
	Obfuscation string      `json:"obfuscation,omitempty"`
}

// nullableUse is absent, null or a usage.
type nullableUse struct {
	present bool
	usage   *usage
}

// IsZero implements the test of omitzero.
func (n nullableUse) IsZero() bool { return !n.present }

// MarshalJSON implements json.Marshaler.
func (n nullableUse) MarshalJSON() ([]byte, error) { return json.Marshal(n.usage) }

type chunkChoice struct {
	Index        int       `json:"index"`
	Delta        delta     `json:"delta"`
	Logprobs     *struct{} `json:"logprobs"`
	FinishReason *string   `json:"finish_reason"`
}

type delta struct {
	Role    string  `json:"role,omitempty"`
	Content *string `json:"content,omitzero"`
}

type textChunk struct {
	Text         string    `json:"text"`
	Index        int       `json:"index"`
	Logprobs     *struct{} `json:"logprobs"`
	FinishReason *string   `json:"finish_reason"`
}

// padTo is the multiple to which obfuscation pads the text of a chunk, bytes.
const padTo = 32

// pieceOrEnd is what the reader of a stream passes on.
type pieceOrEnd struct {
	text string
	err  error
}

// stream writes an answer as server-sent events. Whatever goes wrong from here
// on is told inside the stream.
func (s *server) stream(w http.ResponseWriter, r *http.Request, stream Stream, so *streamOptions, f face) {
	info := httpx.InfoFrom(r.Context())
	out := &events{w: w, rc: http.NewResponseController(w)}
	withUsage := so != nil && so.IncludeUsage != nil && *so.IncludeUsage
	padded := so != nil && so.IncludeObfuscation != nil && *so.IncludeObfuscation
	send := func(choices []any, use *usage, text string) bool {
		c := chunk{ID: responseID(f.prefix, info.ID), Object: f.chunkObject, Created: stream.Created().Unix(), Model: stream.Model(),
			Choices: choices, Usage: nullableUse{present: withUsage, usage: use}}
		if padded {
			c.Obfuscation = padding(len(text))
		}
		return out.json(c)
	}
	h := w.Header()
	h.Set("Content-Type", "text/event-stream; charset=utf-8")
	h.Set("X-Accel-Buffering", "no") // nginx would hold the events back
	processing(w, info, s.Edge.Now())
	w.WriteHeader(http.StatusOK)
	if f.first != nil && !send([]any{f.first()}, nil, "") {
		return
	}
	// One goroutine reads the stream, so that silence can be filled; it ends
	// with the stream, which ends with ctx.
	ctx, cancel := context.WithCancel(r.Context())
	pieces := make(chan pieceOrEnd)
	done := make(chan struct{})
	defer func() { cancel(); <-done }()
	go func() {
		defer close(done)
		for {
			text, err := stream.Next(ctx)
			select {
			case pieces <- pieceOrEnd{text, err}:
			case <-ctx.Done():
				return
			}
			if err != nil {
				return
			}
		}
	}()
	beat := time.NewTicker(s.keepAlive)
	defer beat.Stop()
	for {
		select {
		case <-beat.C:
			if !out.raw(": keep-alive\n\n") {
				return
			}
			continue
		case <-ctx.Done():
			return
		case p := <-pieces:
			if errors.Is(p.err, io.EOF) {
				<-done // the stream is ours again
				s.finish(r, stream, out, send, withUsage, f)
				return
			}
			if p.err != nil {
				out.fail(info, p.err)
				return
			}
			if !send([]any{f.piece(p.text)}, nil, p.text) {
				return
			}
			beat.Reset(s.keepAlive)
		}
	}
}

// finish waits for the receipt and ends the stream.
func (s *server) finish(r *http.Request, stream Stream, out *events, send func([]any, *usage, string) bool, withUsage bool, f face) {
	info := httpx.InfoFrom(r.Context())
	final, err := stream.Finish(r.Context())
	if err != nil {
		out.fail(info, err)
		return
	}
	info.OutputTokens = final.CompletionTokens
	if !send([]any{f.last(final.FinishReason)}, nil, "") {
		return
	}
	if withUsage && !send([]any{}, usageOf(final), "") {
		return
	}
	out.raw("data: [DONE]\n\n")
}

// events writes server-sent events. Its methods report whether the client is
// still there.
type events struct {
	w  http.ResponseWriter
	rc *http.ResponseController
}

func (e *events) json(v any) bool {
	b, err := json.Marshal(v, json.Deterministic(true))
	if err != nil { // only types of this package, which always encode
		panic(err)
	}
	return e.raw("data: " + string(b) + "\n\n")
}

func (e *events) raw(s string) bool {
	// A client that does not read would otherwise hold pages for ever. Not
	// every writer has deadlines (tests); the others do.
	_ = e.rc.SetWriteDeadline(time.Now().Add(writeTimeout))
	if _, err := io.WriteString(e.w, s); err != nil {
		return false
	}
	return e.rc.Flush() == nil
}

// fail ends a stream with an error frame. There is no [DONE] after it.
func (e *events) fail(info *httpx.Info, err error) {
	a := apperr.From(err)
	info.Code = a.Code
	e.json(errorBody{object(a)})
}

// padding returns random letters that bring a text of n bytes to the next
// multiple of padTo, at least one.
func padding(n int) string {
	const letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
	b := make([]byte, padTo-n%padTo)
	rand.Read(b)
	for i := range b {
		b[i] = letters[b[i]%64]
	}
	return string(b)
}
