package rpc

import (
	"context"
	"errors"
	"io"
	"strings"

	"connectrpc.com/connect"

	"bulkhead.dev/engine/model/chat"
	"bulkhead.dev/engine/sample"
	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/services/gateway"
	inferencev1 "bulkhead.dev/services/gen/bulkhead/inference/v1"
	"bulkhead.dev/services/httpx"
)

// receiptHeader names the receipt of a response, as on the OpenAI surface.
const receiptHeader = "X-Bulkhead-Receipt"

const (
	maxStops     = 4
	maxStopBytes = 256
	maxOutput    = 1 << 30
)

type inference struct{ Options }

// asked is what both requests have.
type asked interface {
	GetModel() string
	GetMessages() []*inferencev1.Message
	GetPrompt() string
	GetParameters() *inferencev1.Parameters
}

// Generate implements the inference service.
func (s *inference) Generate(ctx context.Context, in *inferencev1.GenerateRequest) (*inferencev1.GenerateResponse, error) {
	stream, err := s.start(ctx, in, false)
	if err != nil {
		return nil, err
	}
	defer stream.Close()
	var text strings.Builder
	if err := each(ctx, stream, func(piece string) error { text.WriteString(piece); return nil }); err != nil {
		return nil, err
	}
	final, err := stream.Finish(ctx)
	if err != nil {
		return nil, err
	}
	if call, ok := connect.CallInfoForHandlerContext(ctx); ok {
		call.ResponseHeader().Set(receiptHeader, final.Receipt.String())
	}
	f := s.final(ctx, stream, final)
	return &inferencev1.GenerateResponse{RequestId: f.GetRequestId(), ReceiptId: f.GetReceiptId(), Model: f.GetModel(),
		Text: text.String(), FinishReason: f.GetFinishReason(), Usage: f.GetUsage()}, nil
}

// GenerateStream implements the inference service.
func (s *inference) GenerateStream(ctx context.Context, in *inferencev1.GenerateStreamRequest, out *connect.ServerStream[inferencev1.GenerateStreamResponse]) error {
	stream, err := s.start(ctx, in, true)
	if err != nil {
		return err
	}
	defer stream.Close()
	out.ResponseHeader().Set(receiptHeader, stream.ReceiptID().String())
	err = each(ctx, stream, func(piece string) error {
		return out.Send(&inferencev1.GenerateStreamResponse{Text: piece})
	})
	if err != nil {
		return err
	}
	final, err := stream.Finish(ctx)
	if err != nil {
		return err
	}
	return out.Send(&inferencev1.GenerateStreamResponse{Final: s.final(ctx, stream, final)})
}

// each passes the pieces of an answer on until the text is complete.
func each(ctx context.Context, stream Stream, f func(string) error) error {
	for {
		piece, err := stream.Next(ctx)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := f(piece); err != nil {
			return apperr.Wrap(err, apperr.Canceled, "request_canceled", "The request was canceled.")
		}
	}
}

func (s *inference) start(ctx context.Context, in asked, streamed bool) (Stream, error) {
	r, err := request(in)
	if err != nil {
		return nil, err
	}
	info := httpx.InfoFrom(ctx)
	r.ID, r.Received, r.Streamed, r.Surface = info.ID, info.Received, streamed, "connect"
	info.Streamed = streamed
	stream, err := s.Backend.Generate(ctx, info.Principal, r)
	if err != nil {
		return nil, err
	}
	info.Model, info.PromptTokens = stream.Model(), stream.PromptTokens()
	return stream, nil
}

func (s *inference) final(ctx context.Context, stream Stream, f gateway.Final) *inferencev1.Final {
	info := httpx.InfoFrom(ctx)
	info.OutputTokens = f.CompletionTokens
	return &inferencev1.Final{RequestId: info.ID.String(), ReceiptId: f.Receipt.String(), Model: stream.Model(), FinishReason: f.FinishReason,
		Usage: &inferencev1.Usage{PromptTokens: uint32(f.PromptTokens), CompletionTokens: uint32(f.CompletionTokens), CachedTokens: uint32(f.CachedTokens)}}
}

func invalid(param, format string, args ...any) error {
	return apperr.New(apperr.Invalid, "invalid_value", format, args...).WithParam(param)
}

// request makes the gateway's request out of a message.
func request(in asked) (r gateway.Request, err error) {
	p := in.GetParameters()
	r = gateway.Request{Model: in.GetModel(), Text: in.GetPrompt(), Params: sample.Params{Temperature: 1, TopP: 1}, Stop: p.GetStop()}
	switch {
	case r.Model == "":
		return r, invalid("model", "model is missing.")
	case len(in.GetMessages()) > 0 && r.Text != "":
		return r, invalid("prompt", "Give either messages or prompt.")
	case len(in.GetMessages()) == 0 && r.Text == "":
		return r, invalid("messages", "Give messages or prompt.")
	case len(r.Stop) > maxStops:
		return r, invalid("parameters.stop", "parameters.stop has more than %d strings.", maxStops)
	}
	for _, m := range in.GetMessages() {
		switch m.GetRole() {
		case "system", "user", "assistant":
		default:
			return r, invalid("messages.role", "The role of a message must be system, user or assistant.")
		}
		r.Messages = append(r.Messages, chat.Message{Role: m.GetRole(), Content: m.GetContent()})
	}
	for _, s := range r.Stop {
		if s == "" || len(s) > maxStopBytes {
			return r, invalid("parameters.stop", "A stop string must have 1 to %d bytes.", maxStopBytes)
		}
	}
	if p == nil {
		return r, nil
	}
	if p.MaxOutputTokens != nil {
		if *p.MaxOutputTokens < 1 || *p.MaxOutputTokens > maxOutput {
			return r, invalid("parameters.max_output_tokens", "parameters.max_output_tokens must be from 1 to %d.", maxOutput)
		}
		r.MaxTokens = int(*p.MaxOutputTokens)
	}
	for _, f := range []struct {
		from, into *float32
	}{
		{p.Temperature, &r.Params.Temperature}, {p.TopP, &r.Params.TopP}, {p.MinP, &r.Params.MinP},
		{p.FrequencyPenalty, &r.Params.FrequencyPenalty}, {p.PresencePenalty, &r.Params.PresencePenalty},
	} {
		if f.from != nil {
			*f.into = *f.from
		}
	}
	if p.TopK != nil {
		r.Params.TopK = int(min(*p.TopK, 1<<20))
	}
	if p.Seed != nil {
		r.Params.Seed, r.SeedSet = *p.Seed, true
	}
	return r, nil // ranges of the sampling parameters are the sampler's to check
}
