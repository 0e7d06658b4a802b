package openai

import (
	"strings"
	"unicode/utf8"

	"github.com/go-json-experiment/json/jsontext"

	"bulkhead.dev/engine/model/chat"
	"bulkhead.dev/engine/sample"
	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/services/gateway"
)

const (
	maxStops     = 4   // of one request, as OpenAI has it
	maxStopBytes = 256 // of one stop string; the longest bounds what is held back
	maxMessages  = 4096
	maxModelName = 128
)

// common are the fields that both kinds of completion share.
type common struct {
	Model            string         `json:"model"`
	MaxTokens        *int64         `json:"max_tokens"`
	Temperature      *float64       `json:"temperature"`
	TopP             *float64       `json:"top_p"`
	TopK             *int64         `json:"top_k"` // an extension, as min_p
	MinP             *float64       `json:"min_p"`
	FrequencyPenalty *float64       `json:"frequency_penalty"`
	PresencePenalty  *float64       `json:"presence_penalty"`
	Seed             *int64         `json:"seed"`
	Stop             jsontext.Value `json:"stop"`
	Stream           *bool          `json:"stream"`
	StreamOptions    *streamOptions `json:"stream_options"`
	N                *int64         `json:"n"`
	LogitBias        jsontext.Value `json:"logit_bias"`
	Logprobs         jsontext.Value `json:"logprobs"`
}

type streamOptions struct {
	IncludeUsage       *bool `json:"include_usage"`
	IncludeObfuscation *bool `json:"include_obfuscation"`
}

type chatBody struct {
	common
	Messages            []message      `json:"messages"`
	MaxCompletionTokens *int64         `json:"max_completion_tokens"`
	TopLogprobs         jsontext.Value `json:"top_logprobs"`
	Tools               jsontext.Value `json:"tools"`
	ToolChoice          jsontext.Value `json:"tool_choice"`
	Functions           jsontext.Value `json:"functions"`
	FunctionCall        jsontext.Value `json:"function_call"`
	ResponseFormat      jsontext.Value `json:"response_format"`
	Modalities          jsontext.Value `json:"modalities"`
	Audio               jsontext.Value `json:"audio"`
	Prediction          jsontext.Value `json:"prediction"`
	WebSearchOptions    jsontext.Value `json:"web_search_options"`
	ReasoningEffort     jsontext.Value `json:"reasoning_effort"`
	Store               *bool          `json:"store"`
}

type message struct {
	Role         string         `json:"role"`
	Content      jsontext.Value `json:"content"`
	ToolCalls    jsontext.Value `json:"tool_calls"`
	FunctionCall jsontext.Value `json:"function_call"`
	Audio        jsontext.Value `json:"audio"`
}

type part struct {
	Type string  `json:"type"`
	Text *string `json:"text"`
}

type completionBody struct {
	common
	Prompt jsontext.Value `json:"prompt"`
	BestOf *int64         `json:"best_of"`
	Echo   *bool          `json:"echo"`
	Suffix jsontext.Value `json:"suffix"`
}

func invalid(param, code, format string, args ...any) error {
	return apperr.New(apperr.Invalid, code, format, args...).WithParam(param)
}

// unsupported refuses a field that OpenAI documents and that would change the
// answer. Its default, null and the empty forms are let through, since SDKs
// send them.
func unsupported(param string, v jsontext.Value, defaults ...string) error {
	s := strings.TrimSpace(string(v))
	for _, d := range append(defaults, "", "null", "[]", "{}") {
		if s == d {
			return nil
		}
	}
	return invalid(param, "unsupported_parameter", "%s is not supported.", param)
}

func firstError(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// request makes the gateway's request out of a chat body.
func (b *chatBody) request() (gateway.Request, error) {
	r, err := b.common.request()
	if err != nil {
		return r, err
	}
	err = firstError(
		unsupported("top_logprobs", b.TopLogprobs, "0"),
		unsupported("tools", b.Tools),
		unsupported("tool_choice", b.ToolChoice, `"none"`, `"auto"`),
		unsupported("functions", b.Functions),
		unsupported("function_call", b.FunctionCall, `"none"`, `"auto"`),
		unsupported("modalities", b.Modalities, `["text"]`),
		unsupported("audio", b.Audio),
		unsupported("prediction", b.Prediction),
		unsupported("web_search_options", b.WebSearchOptions),
		unsupported("reasoning_effort", b.ReasoningEffort, `"none"`),
		b.responseFormat(),
	)
	if err == nil && b.Store != nil && *b.Store {
		err = invalid("store", "unsupported_parameter", "store is not supported: nothing of a request is stored but its usage and its receipt, which hold no text.")
	}
	if err != nil {
		return r, err
	}
	if b.MaxCompletionTokens != nil {
		if r.MaxTokens, err = positive("max_completion_tokens", b.MaxCompletionTokens); err != nil {
			return r, err
		}
	}
	r.Surface = "openai.chat"
	r.Messages, err = messages(b.Messages)
	return r, err
}

func (b *chatBody) responseFormat() error {
	if b.ResponseFormat == nil || string(b.ResponseFormat) == "null" {
		return nil
	}
	var f struct {
		Type string `json:"type"`
	}
	if err := unmarshal(b.ResponseFormat, &f); err != nil || f.Type != "text" {
		return invalid("response_format", "unsupported_parameter", "response_format is not supported, except for text.")
	}
	return nil
}

func messages(in []message) ([]chat.Message, error) {
	if len(in) == 0 {
		return nil, invalid("messages", "missing_required_parameter", "messages needs at least one message.")
	}
	if len(in) > maxMessages {
		return nil, invalid("messages", "too_many_messages", "messages has %d messages, more than %d.", len(in), maxMessages)
	}
	out := make([]chat.Message, 0, len(in))
	for i, m := range in {
		at := func(field string) string { return indexed("messages", i) + "." + field }
		switch m.Role {
		case "system", "developer", "user", "assistant":
		case "tool", "function":
			return nil, invalid(at("role"), "unsupported_value", "%s: tool calls are not supported.", at("role"))
		default:
			return nil, invalid(at("role"), "invalid_value", "%s must be system, developer, user or assistant.", at("role"))
		}
		if err := firstError(unsupported(at("tool_calls"), m.ToolCalls), unsupported(at("function_call"), m.FunctionCall), unsupported(at("audio"), m.Audio)); err != nil {
			return nil, err
		}
		text, err := content(at("content"), m.Content)
		if err != nil {
			return nil, err
		}
		out = append(out, chat.Message{Role: m.Role, Content: text})
	}
	return out, nil
}

func indexed(name string, i int) string { return name + "[" + itoa(i) + "]" }

// content reads a string, or an array of text parts, which are joined.
func content(at string, v jsontext.Value) (string, error) {
	switch v.Kind() {
	case '"':
		var s string
		return s, unmarshalAt(at, v, &s)
	case '[':
		var parts []part
		if err := unmarshalAt(at, v, &parts); err != nil {
			return "", err
		}
		var b strings.Builder
		for i, p := range parts {
			if p.Type != "text" {
				return "", invalid(indexed(at, i)+".type", "unsupported_value", "%s: only parts of type text are supported.", indexed(at, i))
			}
			if p.Text == nil {
				return "", invalid(indexed(at, i)+".text", "missing_required_parameter", "%s.text is missing.", indexed(at, i))
			}
			b.WriteString(*p.Text)
		}
		return b.String(), nil
	}
	return "", invalid(at, "invalid_type", "%s must be a string or an array of text parts.", at)
}

// unmarshalAt decodes a value whose place in the body the caller knows.
func unmarshalAt(at string, v jsontext.Value, into any) error {
	if err := unmarshal(v, into); err != nil {
		return apperr.Wrap(err, apperr.Invalid, "invalid_type", "%s has the wrong type.", at).WithParam(at)
	}
	return nil
}

// request makes the gateway's request out of a completion body.
func (b *completionBody) request() (gateway.Request, error) {
	r, err := b.common.request()
	if err != nil {
		return r, err
	}
	if err := unsupported("suffix", b.Suffix, `""`); err != nil {
		return r, err
	}
	if b.Echo != nil && *b.Echo {
		return r, invalid("echo", "unsupported_parameter", "echo is not supported.")
	}
	if b.BestOf != nil && *b.BestOf != 1 {
		return r, invalid("best_of", "unsupported_parameter", "best_of is not supported, except for 1.")
	}
	r.Surface = "openai.completions"
	switch b.Prompt.Kind() {
	case '"':
		return r, unmarshalAt("prompt", b.Prompt, &r.Text)
	case '[':
		var list []jsontext.Value
		if err := unmarshalAt("prompt", b.Prompt, &list); err != nil {
			return r, err
		}
		if len(list) == 1 && list[0].Kind() == '"' {
			return r, unmarshalAt("prompt", list[0], &r.Text)
		}
		return r, invalid("prompt", "unsupported_value", "prompt must be one string; token ids and several prompts are not supported.")
	case 0:
		return r, invalid("prompt", "missing_required_parameter", "prompt is missing.")
	}
	return r, invalid("prompt", "invalid_type", "prompt must be a string.")
}

func (c *common) request() (r gateway.Request, err error) {
	switch {
	case c.Model == "":
		return r, invalid("model", "missing_required_parameter", "model is missing.")
	case len(c.Model) > maxModelName:
		return r, apperr.New(apperr.NotFound, "model_not_found", "There is no such model.").WithParam("model")
	case c.N != nil && *c.N != 1:
		return r, invalid("n", "unsupported_parameter", "n is not supported, except for 1.")
	case c.StreamOptions != nil && (c.Stream == nil || !*c.Stream):
		return r, invalid("stream_options", "invalid_value", "stream_options needs stream to be true.")
	}
	if err := firstError(unsupported("logit_bias", c.LogitBias), unsupported("logprobs", c.Logprobs, "false")); err != nil {
		return r, err
	}
	r.Model = c.Model
	r.Streamed = c.Stream != nil && *c.Stream
	r.Params = sample.Params{Temperature: 1, TopP: 1}
	for _, f := range []struct {
		name   string
		value  *float64
		lo, hi float64
		into   *float32
	}{
		{"temperature", c.Temperature, 0, 2, &r.Params.Temperature},
		{"top_p", c.TopP, 0, 1, &r.Params.TopP},
		{"min_p", c.MinP, 0, 1, &r.Params.MinP},
		{"frequency_penalty", c.FrequencyPenalty, -2, 2, &r.Params.FrequencyPenalty},
		{"presence_penalty", c.PresencePenalty, -2, 2, &r.Params.PresencePenalty},
	} {
		if f.value == nil {
			continue
		}
		if !(*f.value >= f.lo && *f.value <= f.hi) {
			return r, invalid(f.name, "invalid_value", "%s must be from %g to %g.", f.name, f.lo, f.hi)
		}
		*f.into = float32(*f.value)
	}
	if c.TopK != nil {
		if *c.TopK < 0 || *c.TopK > 1<<20 {
			return r, invalid("top_k", "invalid_value", "top_k must be from 0 to %d.", 1<<20)
		}
		r.Params.TopK = int(*c.TopK)
	}
	if c.Seed != nil {
		r.Params.Seed, r.SeedSet = uint64(*c.Seed), true
	}
	if c.MaxTokens != nil {
		if r.MaxTokens, err = positive("max_tokens", c.MaxTokens); err != nil {
			return r, err
		}
	}
	r.Stop, err = stops(c.Stop)
	return r, err
}

func positive(name string, v *int64) (int, error) {
	if *v < 1 || *v > 1<<30 {
		return 0, invalid(name, "invalid_value", "%s must be from 1 to %d.", name, 1<<30)
	}
	return int(*v), nil
}

func stops(v jsontext.Value) ([]string, error) {
	var list []string
	switch v.Kind() {
	case 0, 'n':
		return nil, nil
	case '"':
		list = make([]string, 1)
		if err := unmarshalAt("stop", v, &list[0]); err != nil {
			return nil, err
		}
	case '[':
		if err := unmarshalAt("stop", v, &list); err != nil {
			return nil, err
		}
	default:
		return nil, invalid("stop", "invalid_type", "stop must be a string or an array of strings.")
	}
	if len(list) > maxStops {
		return nil, invalid("stop", "invalid_value", "stop has %d strings, more than %d.", len(list), maxStops)
	}
	for i, s := range list {
		if s == "" || len(s) > maxStopBytes || !utf8.ValidString(s) {
			return nil, invalid(indexed("stop", i), "invalid_value", "A stop string must have 1 to %d bytes.", maxStopBytes)
		}
	}
	return list, nil
}
