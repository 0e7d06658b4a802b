package chat

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"time"
	"unicode/utf8"

	"bulkhead.dev/engine/model/tokenizer"
)

// Roles that a conversation may have.
const (
	RoleSystem    = "system"
	RoleDeveloper = "developer" // the same as system
	RoleUser      = "user"
	RoleAssistant = "assistant"
)

// Message is one turn of a conversation. Both texts come from a client.
type Message struct{ Role, Content string }

// Options says how a template is served.
type Options struct {
	// AllowUnlisted admits a template that is not on the list of this package.
	// It runs in the same sandbox and must pass the same probes, but nobody
	// compared its renders with those of jinja2.
	AllowUnlisted bool
	// Engine is the sandbox; nil is the one of the process.
	Engine *Engine
	// Instances is how many renders may run at a time, each in about 0.6 MiB of
	// memory; 0 is 4.
	Instances int
}

// Template renders and encodes conversations for one model. It is safe for
// concurrent use.
type Template struct {
	tok    Vocabulary
	markup *markup
	vars   variables
	digest [sha256.Size]byte
	pool   *pool
	// reserved are the private use runes that renders may hold anyway.
	reserved map[rune]bool
	// literals are what the template looks for in messages, by role.
	literals map[string][]literal
}

// New compiles src, which is the chat template of a model with tokenizer tok,
// and probes it. It returns an *UnsupportedTemplate for a template that is not
// on the list, does not compile or does not pass the probes. The first New of a
// process compiles the sandbox, which takes about 1.3 s of one core.
func New(ctx context.Context, src string, tok Vocabulary, opts Options) (*Template, error) {
	t := &Template{tok: tok, digest: sha256.Sum256([]byte(src)), reserved: map[rune]bool{}}
	switch {
	case len(src) > maxSource:
		return nil, t.unsupported("it is too long", nil)
	case !utf8.ValidString(src):
		return nil, t.unsupported("it is not valid UTF-8", nil)
	case !opts.AllowUnlisted && Listed(src) == "":
		return nil, t.unsupported("it is not on the list of templates that were reviewed", nil)
	}
	var err error
	if t.markup, err = newMarkup(tok); err != nil {
		return nil, t.unsupported(err.Error(), nil)
	}
	if id, ok := tok.BOS(); ok {
		t.vars.bos = string(tok.Piece(id))
	}
	if id, ok := tok.EOS(); ok {
		t.vars.eos = string(tok.Piece(id))
	}
	if !utf8.ValidString(t.vars.bos) || !utf8.ValidString(t.vars.eos) {
		return nil, t.unsupported("the text of BOS or EOS is not valid UTF-8", nil)
	}
	for _, s := range append(tok.Specials(), src, t.vars.bos, t.vars.eos) {
		addPrivate(t.reserved, s)
	}
	engine, size := opts.Engine, opts.Instances
	if engine == nil {
		engine = shared()
	}
	if size <= 0 {
		size = defaultInstances
	}
	if err := t.compile(ctx, engine, src, size); err != nil {
		return nil, err
	}
	if err := t.probe(ctx, src); err != nil {
		return nil, errors.Join(err, t.pool.close())
	}
	return t, nil
}

func (t *Template) unsupported(reason string, cause error) error {
	return &UnsupportedTemplate{Digest: t.digest, Reason: reason, cause: cause}
}

// compile makes the image of the template and a pool with one instance.
func (t *Template) compile(ctx context.Context, engine *Engine, src string, size int) error {
	in, err := engine.newInstance(ctx)
	if err != nil {
		return err
	}
	st, out, err := in.call(ctx, "compile", compileTime, in.compile, []byte(src))
	if err == nil && st != statusOK {
		err = &Failed{Stage: "compile", Budget: st == statusLimit, cause: &Private{string(out)}}
	}
	if err != nil {
		if errors.Is(err, ErrTemplate) {
			err = t.unsupported("it does not compile", err)
		}
		return errors.Join(err, in.close())
	}
	img, err := in.image()
	if err != nil {
		return errors.Join(err, in.close())
	}
	t.pool = newPool(engine, img, size)
	t.pool.idle = append(t.pool.idle, in)
	return nil
}

// Digest returns the SHA-256 of the template's source.
func (t *Template) Digest() [sha256.Size]byte { return t.digest }

// Close waits for the renders that run and frees the template's instances.
func (t *Template) Close() error { return t.pool.close() }

// Encode renders msgs with the generation prompt of the assistant and returns
// the ids of the prompt. A template that asks for the time sees now, in its
// location. No id of a special token comes out of a message; see the package.
//
// Errors are a *Refused where the conversation is at fault, a *Failed where the
// template is, or wrap that of ctx.
func (t *Template) Encode(ctx context.Context, msgs []Message, now time.Time) ([]int32, error) {
	msgs, err := checked(msgs)
	if err != nil {
		return nil, err
	}
	m, err := t.maskOf(msgs)
	if err != nil {
		return nil, err
	}
	if open, tainted := t.open(msgs, m); open != nil {
		text, err := t.render(ctx, open, now)
		if err != nil {
			return nil, err
		}
		ids, clean := t.ids(text, m, tainted)
		if clean {
			return ids, nil
		}
	}
	text, err := t.render(ctx, masked(msgs, m), now)
	if err != nil {
		return nil, err
	}
	ids, _ := t.ids(text, m, nil)
	return ids, nil
}

// checked returns msgs as templates know them.
func checked(msgs []Message) ([]Message, error) {
	if len(msgs) == 0 {
		return nil, &Refused{Reason: ReasonEmpty, Message: -1}
	}
	if len(msgs) > MaxMessages {
		return nil, &Refused{Reason: ReasonMessages, Message: -1}
	}
	out := make([]Message, len(msgs))
	total := 0
	for i, m := range msgs {
		switch m.Role {
		case RoleSystem, RoleUser, RoleAssistant:
		case RoleDeveloper:
			m.Role = RoleSystem
		case "tool", "function":
			return nil, &Refused{Reason: ReasonTool, Message: i}
		default:
			return nil, &Refused{Reason: ReasonRole, Message: i}
		}
		if !utf8.ValidString(m.Content) {
			return nil, &Refused{Reason: ReasonUTF8, Message: i}
		}
		if total += len(m.Content); total > MaxContent {
			return nil, &Refused{Reason: ReasonContent, Message: -1}
		}
		out[i] = m
	}
	return out, nil
}

// maskOf returns a mask whose replacements are not in msgs.
func (t *Template) maskOf(msgs []Message) (*mask, error) {
	used := make(map[rune]bool, len(t.reserved))
	for r := range t.reserved {
		used[r] = true
	}
	for _, m := range msgs {
		addPrivate(used, m.Content)
	}
	m, ok := newMask(t.markup.protected, used)
	if !ok {
		return nil, &Refused{Reason: ReasonPrivate, Message: -1}
	}
	return m, nil
}

func masked(msgs []Message, m *mask) []Message {
	out := make([]Message, len(msgs))
	for i, msg := range msgs {
		out[i] = Message{Role: msg.Role, Content: m.apply(msg.Content)}
	}
	return out
}

// render runs the template over msgs as they are.
func (t *Template) render(ctx context.Context, msgs []Message, now time.Time) (string, error) {
	in, err := t.pool.get(ctx)
	if err != nil {
		return "", fmt.Errorf("render a chat template: %w", err)
	}
	defer t.pool.put(in)
	size := 0
	for _, m := range msgs {
		size += len(m.Content)
	}
	b := make([]byte, 0, size+size/16+64*len(msgs)+512)
	b = appendRequest(b, msgs, t.vars, now, renderFuel+renderFuelPerMessage*len(msgs), maxOutput+2*size)
	d := renderTime + renderTimePerKiB*time.Duration(size>>10)
	st, out, err := in.call(ctx, "render", d, in.render, b)
	clear(b)
	switch {
	case err != nil:
		return "", err
	case st == statusOK:
		return string(out), nil
	case st == statusRaised:
		return "", &Refused{Reason: ReasonTemplate, Message: -1, cause: &Private{string(out)}}
	default:
		return "", &Failed{Stage: "render", Budget: st == statusLimit, cause: &Private{string(out)}}
	}
}

// ids encodes rendered text whose messages were masked with m. It reports false,
// and no ids, if the text has a token of tainted.
func (t *Template) ids(text string, m *mask, tainted map[int32]bool) ([]int32, bool) {
	// A token of English has about four bytes.
	dst := make([]int32, 0, len(text)/4+16)
	bos, hasBOS := t.tok.BOS()
	for {
		s, at, ok := t.markup.next(text)
		if !ok {
			break
		}
		if tainted[s.id] {
			return nil, false
		}
		dst = t.plain(dst, m.revert(text[:at]))
		// A template that writes BOS itself must not double it.
		if !hasBOS || s.id != bos || !t.tok.AddBOS() || len(dst) != 1 || dst[0] != bos {
			dst = append(dst, s.id)
		}
		text = text[at+len(s.text):]
	}
	dst = t.plain(dst, m.revert(text))
	if t.tok.AddBOS() && (len(dst) == 0 || dst[0] != bos) {
		dst = append([]int32{bos}, dst...)
	}
	return dst, true
}

func (t *Template) plain(dst []int32, text string) []int32 {
	if text == "" {
		return dst
	}
	return t.tok.Encode(dst, text, tokenizer.Plain)
}

// EncodeText returns the ids of a prompt that no template is applied to: text
// only, after BOS where the model wants it.
func EncodeText(tok Vocabulary, text string) []int32 {
	dst := make([]int32, 0, len(text)/4+16)
	if bos, ok := tok.BOS(); ok && tok.AddBOS() {
		dst = append(dst, bos)
	}
	if text == "" {
		return dst
	}
	return tok.Encode(dst, text, tokenizer.Plain)
}
