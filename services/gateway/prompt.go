package gateway

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
	"unicode/utf8"

	"bulkhead.dev/engine/model"
	"bulkhead.dev/engine/model/chat"
	"bulkhead.dev/engine/model/gguf"
	"bulkhead.dev/engine/model/tokenizer"
	"bulkhead.dev/infra/apperr"
)

// Prompter turns the prompt of a request into token ids of one model. It is
// safe for concurrent use.
type Prompter struct {
	tok      *tokenizer.Tokenizer
	template *chat.Template // nil when the model has none that is supported
	why      error          // why template is nil
	longest  int            // bytes of the longest token
}

// AtLeast returns a number of tokens that the prompt of a request certainly
// has. It costs nothing, unlike tokenising megabytes that can never fit.
func (p *Prompter) AtLeast(r *Request) int {
	bytes := len(r.Text)
	for _, m := range r.Messages {
		bytes += len(m.Content)
	}
	return bytes / p.longest
}

// Encode renders and tokenises. Errors are *apperr.Error and hold nothing of
// the prompt.
func (p *Prompter) Encode(ctx context.Context, r *Request, now time.Time) ([]int32, error) {
	if r.Messages == nil {
		return chat.EncodeText(p.tok, r.Text), nil
	}
	if p.template == nil {
		return nil, apperr.Wrap(p.why, apperr.Invalid, "chat_not_supported", "This model has no chat template that is supported; use completions.").WithParam("model")
	}
	ids, err := p.template.Encode(ctx, r.Messages, now)
	if err == nil {
		return ids, nil
	}
	if ctx.Err() != nil {
		return nil, apperr.From(ctx.Err())
	}
	if refused, ok := errors.AsType[*chat.Refused](err); ok {
		return nil, apperr.Wrap(err, apperr.Invalid, "invalid_messages", "%s", refused.Reason).WithParam("messages")
	}
	return nil, apperr.Wrap(err, apperr.Invalid, "template_failed", "The chat template of the model refused these messages.").WithParam("messages")
}

// Chat reports whether conversations can be encoded.
func (p *Prompter) Chat() bool { return p.template != nil }

// Files is a set of prompters over model files, made when first asked for. The
// gateway needs tokenizer and template of a model, never its weights.
type Files struct {
	// Path returns the file of a model.
	Path func(digest [32]byte) (string, error)
	// ChatOptions are passed to every template.
	ChatOptions chat.Options

	mu     sync.Mutex
	loaded map[[32]byte]*Prompter
}

// Prompter implements Prompts.
func (f *Files) Prompter(ctx context.Context, digest [32]byte) (*Prompter, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if p := f.loaded[digest]; p != nil {
		return p, nil
	}
	path, err := f.Path(digest)
	if err != nil {
		return nil, err
	}
	p, err := LoadPrompter(ctx, path, f.ChatOptions)
	if err != nil {
		return nil, err
	}
	if f.loaded == nil {
		f.loaded = map[[32]byte]*Prompter{}
	}
	f.loaded[digest] = p
	return p, nil
}

// Close releases the templates.
func (f *Files) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	var errs []error
	for _, p := range f.loaded {
		if p.template != nil {
			errs = append(errs, p.template.Close())
		}
	}
	f.loaded = nil
	return errors.Join(errs...)
}

// LoadPrompter reads tokenizer and template out of a model file.
func LoadPrompter(ctx context.Context, path string, opts chat.Options) (*Prompter, error) {
	f, err := gguf.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open model: %w", err)
	}
	defer f.Close()
	p := &Prompter{}
	if p.tok, err = tokenizer.FromGGUF(f); err != nil {
		return nil, fmt.Errorf("load tokenizer: %w", err)
	}
	p.longest = utf8.UTFMax // an unknown character is one token too
	for i := range p.tok.Size() {
		p.longest = max(p.longest, len(p.tok.Piece(int32(i))))
	}
	src, ok := model.ChatTemplate(f)
	if !ok {
		p.why = errors.New("the file has no chat template")
		return p, nil
	}
	if p.template, err = chat.New(ctx, src, p.tok, opts); err != nil {
		if _, ok := errors.AsType[*chat.UnsupportedTemplate](err); !ok {
			return nil, fmt.Errorf("load chat template: %w", err)
		}
		p.why, p.template = err, nil
	}
	return p, nil
}

// WhyNoChat returns why conversations cannot be encoded, nil if they can.
func (p *Prompter) WhyNoChat() error { return p.why }
