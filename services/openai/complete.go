package openai

import (
	"errors"
	"io"
	"net/http"
	"strings"

	"bulkhead.dev/services/gateway"
	"bulkhead.dev/services/httpx"
	"bulkhead.dev/tenancy"
)

type usage struct {
	PromptTokens     int         `json:"prompt_tokens"`
	CompletionTokens int         `json:"completion_tokens"`
	TotalTokens      int         `json:"total_tokens"`
	PromptDetails    usageCached `json:"prompt_tokens_details"`
}

type usageCached struct {
	CachedTokens int `json:"cached_tokens"`
}

func usageOf(f gateway.Final) *usage {
	return &usage{
		PromptTokens: f.PromptTokens, CompletionTokens: f.CompletionTokens, TotalTokens: f.PromptTokens + f.CompletionTokens,
		PromptDetails: usageCached{f.CachedTokens},
	}
}

// completion is a whole answer; the two surfaces fill in different choices.
type completion struct {
	ID      string `json:"id"`
	Object  string `json:"object"`
	Created int64  `json:"created"`
	Model   string `json:"model"`
	Choices []any  `json:"choices"`
	Usage   *usage `json:"usage"`
}

type chatChoice struct {
	Index        int         `json:"index"`
	Message      chatMessage `json:"message"`
	Logprobs     *struct{}   `json:"logprobs"`
	FinishReason string      `json:"finish_reason"`
}

type chatMessage struct {
	Role    string  `json:"role"`
	Content string  `json:"content"`
	Refusal *string `json:"refusal"`
}

type textChoice struct {
	Text         string    `json:"text"`
	Index        int       `json:"index"`
	Logprobs     *struct{} `json:"logprobs"`
	FinishReason string    `json:"finish_reason"`
}

func (s *server) chat(w http.ResponseWriter, r *http.Request) error {
	if err := httpx.InfoFrom(r.Context()).Principal.Require(tenancy.ScopeInference); err != nil {
		return err
	}
	var b chatBody
	if err := decode(w, r, s.BodyLimit, &b); err != nil {
		return err
	}
	req, err := b.request()
	if err != nil {
		return err
	}
	return s.answer(w, r, req, b.StreamOptions, face{
		prefix: "chatcmpl-", object: "chat.completion", chunkObject: "chat.completion.chunk",
		whole: func(text, finish string) any {
			return chatChoice{Message: chatMessage{Role: "assistant", Content: text}, FinishReason: finish}
		},
		first: func() any { return chunkChoice{Delta: delta{Role: "assistant", Content: new("")}} },
		piece: func(text string) any { return chunkChoice{Delta: delta{Content: &text}} },
		last:  func(finish string) any { return chunkChoice{FinishReason: &finish} },
	})
}

func (s *server) completions(w http.ResponseWriter, r *http.Request) error {
	if err := httpx.InfoFrom(r.Context()).Principal.Require(tenancy.ScopeInference); err != nil {
		return err
	}
	var b completionBody
	if err := decode(w, r, s.BodyLimit, &b); err != nil {
		return err
	}
	req, err := b.request()
	if err != nil {
		return err
	}
	return s.answer(w, r, req, b.StreamOptions, face{
		prefix: "cmpl-", object: "text_completion", chunkObject: "text_completion",
		whole: func(text, finish string) any { return textChoice{Text: text, FinishReason: finish} },
		piece: func(text string) any { return textChunk{Text: text} },
		last:  func(finish string) any { return textChunk{FinishReason: &finish} },
	})
}

// face is what differs between the two surfaces.
type face struct {
	prefix, object, chunkObject string

	whole func(text, finish string) any
	first func() any // the chunk that opens a stream; nil for none
	piece func(text string) any
	last  func(finish string) any
}

// answer runs a request and writes what comes of it. An error that is returned
// has not been written yet.
func (s *server) answer(w http.ResponseWriter, r *http.Request, req gateway.Request, so *streamOptions, f face) error {
	info := httpx.InfoFrom(r.Context())
	req.ID, req.Received = info.ID, info.Received
	info.Streamed = req.Streamed
	stream, err := s.Backend.Generate(r.Context(), info.Principal, req)
	if err != nil {
		if gateway.LeftReceipt(err) {
			w.Header().Set(ReceiptHeader, req.ID.Receipt().String())
		}
		return err
	}
	defer stream.Close()
	info.Model, info.PromptTokens = stream.Model(), stream.PromptTokens()
	w.Header().Set(ReceiptHeader, stream.ReceiptID().String())
	rateLimits(w.Header(), stream.Limits())
	if req.Streamed {
		s.stream(w, r, stream, so, f)
		return nil
	}
	var text strings.Builder
	for {
		piece, err := stream.Next(r.Context())
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		text.WriteString(piece)
	}
	final, err := stream.Finish(r.Context())
	if err != nil {
		return err
	}
	info.OutputTokens = final.CompletionTokens
	processing(w, info, s.Edge.Now())
	writeJSON(w, http.StatusOK, completion{
		ID: responseID(f.prefix, info.ID), Object: f.object, Created: stream.Created().Unix(), Model: stream.Model(),
		Choices: []any{f.whole(text.String(), final.FinishReason)}, Usage: usageOf(final),
	})
	return nil
}
