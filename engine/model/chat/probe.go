package chat

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
)

// probeNow is the time that probes are rendered at.
var probeNow = time.Date(2024, time.July, 26, 12, 0, 0, 0, time.UTC)

// The conversations that are probed. The first two must render; a template may
// refuse a system message.
var probeRoles = [][]string{
	{RoleUser},
	{RoleUser, RoleAssistant, RoleUser},
	{RoleSystem, RoleUser},
	{RoleSystem, RoleUser, RoleAssistant, RoleUser},
}

// mark returns a text that no template has, different for each n.
func mark(n int, end string) string { return fmt.Sprintf("qzx%dj%sk", n, end) }

// probe renders conversations to see that the template does with messages what
// Encode relies on, and finds the literals that it looks for in them.
func (t *Template) probe(ctx context.Context, src string) error {
	bounded, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	err := t.probeAll(bounded, src)
	if err != nil && ctx.Err() == nil && bounded.Err() != nil {
		err = t.unsupported("its probes take too long", &Failed{Stage: "render", Budget: true})
	}
	return err
}

func (t *Template) probeAll(ctx context.Context, src string) error {
	widest := -1
	for i, roles := range probeRoles {
		err := t.probeShape(ctx, roles)
		_, refused := errors.AsType[*Refused](err)
		if refused && roles[0] == RoleSystem {
			continue
		}
		if err != nil {
			_, known := errors.AsType[*UnsupportedTemplate](err)
			if known || ctx.Err() != nil || !refused && !errors.Is(err, ErrTemplate) {
				return err
			}
			return t.unsupported("it does not render a conversation of "+strings.Join(roles, ", "), err)
		}
		widest = i
	}
	return t.probeLiterals(ctx, src, probeRoles[widest])
}

// probeShape checks that each message is in the render, unchanged, and that what
// surrounds it cannot become a special token together with it.
func (t *Template) probeShape(ctx context.Context, roles []string) error {
	msgs := make([]Message, len(roles))
	for i, role := range roles {
		// Every rune that Encode replaces has to come through.
		msgs[i] = Message{Role: role, Content: mark(i, "a") + string(t.markup.protected) + mark(i, "b")}
	}
	m, err := t.maskOf(msgs)
	if err != nil {
		return err
	}
	hidden := masked(msgs, m)
	text, err := t.render(ctx, hidden, probeNow)
	if err != nil {
		return err
	}
	for i, msg := range hidden {
		parts := strings.Split(text, msg.Content)
		if len(parts) == 1 {
			return t.unsupported("it leaves out or changes the content of a message of role "+roles[i], nil)
		}
		for k := range parts[1:] {
			if special, ok := t.markup.joins(parts[k], parts[k+1]); ok {
				return t.unsupported(fmt.Sprintf("it joins a message of role %s to a part of the special token %q", roles[i], special), nil)
			}
		}
	}
	return nil
}

// probeLiterals fills in the literals for which hiding them from the template
// changes the render.
func (t *Template) probeLiterals(ctx context.Context, src string, roles []string) error {
	texts := t.markup.sourceLiterals(src)
	if len(texts) > maxLiterals {
		return t.unsupported(fmt.Sprintf("it has more than %d string literals with markup", maxLiterals), nil)
	}
	t.literals = map[string][]literal{}
	for _, text := range texts {
		// At once for all roles first: most literals are only written.
		if seen, err := t.sees(ctx, roles, "", text); err != nil {
			return err
		} else if !seen {
			continue
		}
		for _, role := range []string{RoleSystem, RoleUser, RoleAssistant} {
			seen, err := t.sees(ctx, roles, role, text)
			if err != nil {
				return err
			}
			if seen {
				t.literals[role] = append(t.literals[role], t.markup.literal(text))
			}
		}
	}
	return nil
}

// sees reports whether the template treats messages of a role, or of all of them
// if role is empty, differently when text in them is hidden.
func (t *Template) sees(ctx context.Context, roles []string, role, text string) (bool, error) {
	for _, shape := range []func(a, b string) string{
		func(string, string) string { return text },
		func(a, b string) string { return a + text + b },
		func(a, _ string) string { return text + a + text },
	} {
		msgs := make([]Message, len(roles))
		for i, r := range roles {
			content := mark(i, "a")
			if role == "" || r == role {
				content = shape(mark(i, "a"), mark(i, "b"))
			}
			msgs[i] = Message{Role: r, Content: content}
		}
		m, err := t.maskOf(msgs)
		if err != nil {
			return false, err
		}
		plain, plainErr := t.render(ctx, msgs, probeNow)
		hidden, hiddenErr := t.render(ctx, masked(msgs, m), probeNow)
		for _, err := range []error{plainErr, hiddenErr} {
			if err != nil && !errors.Is(err, ErrTemplate) {
				if _, refused := errors.AsType[*Refused](err); !refused {
					return false, err
				}
			}
		}
		if (plainErr == nil) != (hiddenErr == nil) || plain != m.revert(hidden) {
			return true, nil
		}
	}
	return false, nil
}
