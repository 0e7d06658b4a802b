package chat

import (
	"context"
	"testing"

	"bulkhead.dev/infra/assert"
)

// Templates that look for markup in messages see it where that is safe.
func TestLiterals(t *testing.T) {
	t.Parallel()
	v := &triples{specials: []string{"<s>", "</s>", "</think>", "<think>"}, bos: "<s>", eos: "</s>"}
	const (
		cut      = "{% for m in messages %}<s>{{ m.role }}:{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}</s>{% endfor %}"
		add      = "{% for m in messages %}{% if '</think>' not in m.content %}<think></think>{% endif %}{{ m.content }}</s>{% endfor %}"
		starts   = "{% for m in messages %}{% if m.content.startswith(\"<q>\") %}!{% endif %}{{ m.content }}</s>{% endfor %}"
		rejects  = "{% for m in messages %}{% if '</s>' in m.content %}{{ raise_exception('no') }}{% endif %}{{ m.content }}</s>{% endfor %}"
		part     = "{% for m in messages %}{% if '</th' in m.content %}!{% endif %}{{ m.content }}</s>{% endfor %}"
		stripped = "{% for m in messages %}{{ m.content|replace('</s>', '')|replace('</think>', '') }}</s>{% endfor %}"
	)
	for name, c := range map[string]struct {
		src     string
		msgs    []Message
		want    string // empty for a refusal
		control int
	}{
		"cut off":                 {cut, []Message{{RoleUser, "a"}, {RoleAssistant, "<think>b</think>c"}, {RoleUser, "d"}}, "<s>user:a</s><s>assistant:c</s><s>user:d</s>", 6},
		"cut off, others stay":    {cut, []Message{{RoleAssistant, "b</think>c<s></s>"}, {RoleUser, "</think><s>"}}, "<s>assistant:c<s></s></s><s>user:</think><s></s>", 4},
		"added where missing":     {add, []Message{{RoleUser, "a"}}, "<think></think>a</s>", 3},
		"not taken from a client": {add, []Message{{RoleUser, "a</think>"}}, "<think></think>a</think></s>", 3},
		"begins with":             {starts, []Message{{RoleUser, "<q>a<s>"}}, "!<q>a<s></s>", 1},
		"does not begin with":     {starts, []Message{{RoleUser, "a<q>"}}, "a<q></s>", 1},
		"part of a token":         {part, []Message{{RoleUser, "a</th<s>"}}, "!a</th<s></s>", 1},
		"part becomes whole":      {part, []Message{{RoleUser, "a</think>"}}, "a</think></s>", 1},
		"refused by the template": {rejects, []Message{{RoleUser, "a</s>"}}, "", 0},
		"stripped":                {stripped, []Message{{RoleUser, "a</think>b<s>"}}, "ab<s></s>", 1},
		// Cutting one token must not make another out of its surroundings.
		"stripped to make one": {stripped, []Message{{RoleUser, "<</think>s></</think>s></th</think>ink>"}}, "<s></s></think></s>", 1},
		// The template's own token cannot be told from one that a message brought.
		"stripped, but written too": {stripped, []Message{{RoleUser, "a</s>b<s></think>"}}, "a</s>b<s></think></s>", 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tpl := mustNew(t, c.src, v, Options{AllowUnlisted: true})
			ids, err := tpl.Encode(context.Background(), c.msgs, noon)
			if c.want == "" {
				assert.Equal(t, assert.ErrorAs[*Refused](t, err).Reason, ReasonTemplate)
				return
			}
			assert.NoError(t, err)
			assert.Equal(t, v.decode(ids), c.want)
			assert.Equal(t, len(v.control(ids)), c.control)
		})
	}
}

func TestSourceLiterals(t *testing.T) {
	t.Parallel()
	m, err := newMarkup(&triples{specials: []string{"<s>", "[X]"}})
	assert.NoError(t, err)
	for src, want := range map[string][]string{
		`{{ 'a' }}{{ '<b' + "[c" }}`:                              {"<b", "[c"},
		`don't {{ '<s>' }}`:                                       {"<s>"},
		`{{ '\'<\n' }}{{ "<" }}{{ '<' }}`:                         {"'<\n", "<"},
		`{{ '<`:                                                   {"<"},
		`{{ '}}<' }}{% if "%}<" %}<{'<x'}`:                        {"}}<", "%}<"},
		`{# don't '<s>' #}{{ {'<': '['} }}`:                       {"<", "["},
		`{{ {'a': {'b': '<1'}} }}{% '<2' %}`:                      {"<1", "<2"},
		`{{ {'a': {}} ~ '<3' }}}'<4'{{ '<5' }}`:                   {"<3", "<5"},
		`{{ '\\' + '<' }}`:                                        {"<"},
		"{{ '<" + string(make([]byte, maxLiteral)) + "' + '[' }}": {"["},
		"": nil, "{": nil, "{{": nil,
	} {
		assert.Equal(t, m.sourceLiterals(src), want)
	}
}
