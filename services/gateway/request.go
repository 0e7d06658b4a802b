package gateway

import (
	"context"
	"errors"
	"time"

	"bulkhead.dev/engine/model/chat"
	"bulkhead.dev/engine/sample"
	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/tenancy"
)

// Request is what a surface asks for, parsed into our own types.
type Request struct {
	// ID was minted by the edge when the request came in.
	ID id.Request
	// Received is when that was.
	Received time.Time
	Model    string
	// Messages is a conversation; nil for a completion of Text.
	Messages []chat.Message
	Text     string
	// MaxTokens bounds the output; 0 is the model's default, capped by what the
	// context window leaves.
	MaxTokens int
	Params    sample.Params
	// SeedSet says that Params.Seed is the client's; otherwise a fresh one is
	// drawn.
	SeedSet bool
	Stop    []string
	// Surface names the way in, for usage and receipt: "openai.chat",
	// "openai.completions" or "connect".
	Surface  string
	Streamed bool
}

// Final is how a completed answer ended.
type Final struct {
	FinishReason     string // "stop" or "length"
	PromptTokens     int
	CachedTokens     int // of the prompt, not computed again
	CompletionTokens int
	Receipt          id.Receipt
}

// prepared is a request that could be served: its token ids are known and fit.
type prepared struct {
	model     tenancy.Model
	ids       []int32
	maxOutput int
}

// prepare does everything that needs no worker. Nothing is granted or recorded
// when it fails.
func (g *Gateway) prepare(ctx context.Context, p tenancy.Principal, r *Request) (*prepared, error) {
	if err := r.Params.Validate(); err != nil {
		if e, ok := errors.AsType[*sample.ParamError](err); ok {
			return nil, apperr.Wrap(err, apperr.Invalid, "invalid_value", "%s must be %s.", e.Param, e.Want).WithParam(e.Param)
		}
		return nil, err
	}
	m, err := g.Model(ctx, p, r.Model)
	if err != nil {
		return nil, err
	}
	prompter, err := g.Prompts.Prompter(ctx, m.Digest)
	if err != nil {
		return nil, apperr.Wrap(err, apperr.Unavailable, "model_unavailable", "The model cannot be served now.").WithRetryAfter(retryBusy)
	}
	if n, window := prompter.AtLeast(r), g.window(m); n > window {
		return nil, tooLong("This model's maximum context length is %d tokens, but the prompt has at least %d tokens. Shorten the prompt.", window, n)
	}
	ids, err := prompter.Encode(ctx, r, g.Now())
	if err != nil {
		return nil, err
	}
	if len(ids) == 0 {
		return nil, apperr.New(apperr.Invalid, "empty_prompt", "The prompt is empty.")
	}
	out, err := fit(len(ids), r.MaxTokens, m.DefaultOutputTokens, g.window(m))
	if err != nil {
		return nil, err
	}
	if !r.SeedSet {
		r.Params.Seed = g.Seed()
	}
	return &prepared{model: m, ids: ids, maxOutput: out}, nil
}

// window is the effective context of a model: what its file allows, and what
// every live worker can hold. With no live worker the file decides, so that a
// prompt which can never fit is told so.
func (g *Gateway) window(m tenancy.Model) int {
	if live := g.Pool.EffectiveContext(m.Digest); live > 0 {
		return min(live, m.ContextWindow)
	}
	return m.ContextWindow
}

// fit returns how many tokens the answer may have. want is 0 when the client
// named no maximum.
func fit(prompt, want, standard, window int) (int, error) {
	switch {
	case prompt >= window:
		return 0, tooLong("This model's maximum context length is %d tokens, but the prompt has %d tokens. Shorten the prompt.", window, prompt)
	case want == 0:
		return min(standard, window-prompt), nil
	case want > window-prompt: // no overflow, unlike prompt+want
		return 0, tooLong("This model's maximum context length is %d tokens, but the request asks for %d: %d in the prompt and %d in the answer. Shorten the prompt or ask for a shorter answer.",
			window, int64(prompt)+int64(want), prompt, want)
	}
	return want, nil
}

func tooLong(format string, args ...any) error {
	return apperr.New(apperr.Invalid, "context_length_exceeded", format, args...).WithParam("messages")
}
