package openai

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"net/http"
	"sync"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

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

// stream writes an answer as server-sent events. Whatever goes wrong from here
// on is told inside the stream.
func (s *server) stream(w http.ResponseWriter, r *http.Request, stream Stream, so *streamOptions, f face) {
	info := httpx.InfoFrom(r.Context())
	out := &events{w: w, rc: http.NewResponseController(w)}
	withUsage := so != nil && so.IncludeUsage != nil && *so.IncludeUsage
	padded := so != nil && so.IncludeObfuscation != nil && *so.IncludeObfuscation
	add := func(choices []any, use *usage, text string) {
		c := chunk{ID: responseID(f.prefix, info.ID), Object: f.chunkObject, Created: stream.Created().Unix(), Model: stream.Model(),
			Choices: choices, Usage: nullableUse{present: withUsage, usage: use}}
		if padded {
			c.Obfuscation = padding(len(text))
		}
		out.add(c)
	}
	h := w.Header()
	h.Set("Content-Type", "text/event-stream; charset=utf-8")
	h.Set("X-Accel-Buffering", "no") // nginx would hold the events back
	processing(w, info, s.Edge.Now())
	w.WriteHeader(http.StatusOK)
	if f.first != nil {
		if add([]any{f.first()}, nil, ""); !out.send() {
			return
		}
	}
	// All but the text of a piece is encoded once.
	add([]any{f.piece(anyText)}, nil, "")
	head, tail := out.around(anyText)
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	// Silence is filled, and a client that is gone is found by it.
	defer out.keepAlive(s.keepAlive, cancel)()
	for {
		text, err := stream.Next(ctx)
		switch {
		case errors.Is(err, io.EOF):
			s.finish(r, stream, out, add, withUsage, f)
			return
		case err != nil:
			if ctx.Err() == nil {
				out.fail(info, err)
			}
			return
		}
		out.mu.Lock()
		if padded {
			add([]any{f.piece(text)}, nil, text)
		} else {
			out.text(head, text, tail)
		}
		there := out.send()
		out.mu.Unlock()
		if !there {
			return
		}
	}
}

// finish waits for the receipt and ends the stream.
func (s *server) finish(r *http.Request, stream Stream, out *events, add func([]any, *usage, string), withUsage bool, f face) {
	info := httpx.InfoFrom(r.Context())
	final, err := stream.Finish(r.Context())
	if err != nil {
		out.fail(info, err)
		return
	}
	info.OutputTokens = final.CompletionTokens
	out.mu.Lock()
	defer out.mu.Unlock()
	add([]any{f.last(final.FinishReason)}, nil, "")
	if withUsage {
		add([]any{}, usageOf(final), "")
	}
	out.raw("data: [DONE]\n\n")
	out.send()
}

// events writes server-sent events: they are added to a buffer and sent together.
type events struct {
	w  http.ResponseWriter
	rc *http.ResponseController

	// mu is held from adding to sending once keepAlive was called.
	mu     sync.Mutex
	buffer []byte
	silent *time.Timer // nil without keepAlive
	every  time.Duration
	ended  bool
}

// keepAlive sends a comment whenever nothing was sent for so long, and calls gone if
// the client does not take it. The function returned ends that.
func (e *events) keepAlive(every time.Duration, gone func()) (stop func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.every = every
	e.silent = time.AfterFunc(every, func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		if e.ended { // the writer is no longer ours
			return
		}
		if e.raw(": keep-alive\n\n"); !e.send() {
			gone()
		}
	})
	return func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.ended = true
		e.silent.Stop()
	}
}

func (e *events) add(v any) {
	b, err := json.Marshal(v, json.Deterministic(true))
	if err != nil { // only types of this package, which always encode
		panic(err)
	}
	e.buffer = append(append(append(e.buffer, "data: "...), b...), "\n\n"...)
}

func (e *events) raw(s string) { e.buffer = append(e.buffer, s...) }

// anyText stands for the text of a piece where what is around it is encoded.
const anyText = "\x00text"

// around empties the buffer and returns what it has before and after a text, as
// JSON writes it. Names that clients see come before.
func (e *events) around(text string) (head, tail string) {
	quoted, err := jsontext.AppendQuote(nil, text)
	at := bytes.LastIndex(e.buffer, quoted)
	if err != nil || at < 0 { // a piece has its text
		panic("openai: a chunk without its text")
	}
	head, tail = string(e.buffer[:at]), string(e.buffer[at+len(quoted):])
	e.buffer = e.buffer[:0]
	return head, tail
}

// text adds a piece.
func (e *events) text(head, text, tail string) {
	b, err := jsontext.AppendQuote(append(e.buffer, head...), text)
	if err != nil { // pieces are whole characters
		panic(err)
	}
	e.buffer = append(b, tail...)
}

// send reports whether the client is still there.
func (e *events) send() bool {
	// A client that does not read would otherwise hold pages for ever. Not
	// every writer has deadlines (tests); the others do.
	_ = e.rc.SetWriteDeadline(time.Now().Add(writeTimeout))
	_, err := e.w.Write(e.buffer)
	clear(e.buffer)
	e.buffer = e.buffer[:0]
	if e.silent != nil {
		e.silent.Reset(e.every)
	}
	return err == nil && e.rc.Flush() == nil
}

// fail ends a stream with an error frame. There is no [DONE] after it.
func (e *events) fail(info *httpx.Info, err error) {
	a := apperr.From(err)
	info.Code = a.Code
	e.mu.Lock()
	defer e.mu.Unlock()
	e.add(errorBody{object(a)})
	e.send()
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
