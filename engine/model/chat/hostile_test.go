package chat

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"bulkhead.dev/infra/assert"
)

// doubled makes a list that is shared 2^60 times out of 60 small ones.
const doubled = "{% set ns = namespace(s=[1],t=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s,ns.s] %}{% set ns.t = [ns.t,ns.t] %}{% endfor %}"

// nested makes a list that is n deep.
func nested(n string) string {
	return "{% set ns = namespace(s=[1],t=[1]) %}{% for i in range(" + n + ") %}{% set ns.s = [ns.s] %}{% set ns.t = [ns.t] %}{% endfor %}"
}

func around(n int, before, middle, after string) string {
	return strings.Repeat(before, n) + middle + strings.Repeat(after, n)
}

// hostile are templates that ask for too much, or for what is not theirs.
var hostile = map[string]string{
	"nested loops":         "{% for a in range(100000) %}{% for b in range(100000) %}{% for c in range(100000) %}{% endfor %}{% endfor %}{% endfor %}",
	"long range":           "{% for a in range(10**9) %}x{% endfor %}",
	"long range as list":   "{{ range(10**9)|list|length }}",
	"long string":          "{{ ('a' * 10**9)|length }}",
	"long list":            "{{ ([0] * 10**9)|length }}",
	"doubling a string":    "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(64) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
	"doubling a list":      "{% set ns = namespace(s=[1,2]) %}{% for i in range(64) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s|length }}",
	"huge output":          "{% for a in range(100000) %}{% for b in range(100000) %}" + strings.Repeat("a", 70) + "{% endfor %}{% endfor %}",
	"endless macro":        "{% macro f(n) %}{{ f(n+1) }}{% endmacro %}{{ f(0) }}",
	"exponential macro":    "{% macro f(n) %}{% if n>0 %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(40) }}",
	"deep parentheses":     "{{ " + around(100000, "(", "1", ")") + " }}",
	"deep if":              around(10000, "{% if true %}", "", "{% endif %}"),
	"deep list":            "{{ " + around(100000, "[", "", "]") + " }}",
	"long sum":             "{{ 1" + strings.Repeat("+1", 100000) + " }}",
	"long filter chain":    "{{ 'a'" + strings.Repeat("|e", 100000) + " }}",
	"long attribute chain": "{{ m" + strings.Repeat(".b", 100000) + " }}",
	"long negation":        "{{ " + strings.Repeat("not ", 60000) + "1 }}",
	"indent":               "{{ 'a\\nb'|indent(10**9) }}",
	"format":               "{{ '%1000000000d'|format(1) }}",
	"replace":              "{% set s='a'*100000 %}{{ s|replace('a', s)|length }}",
	"replace method":       "{% set s='a'*100000 %}{{ s.replace('a', s)|length }}",
	"join":                 "{% set s='a'*100000 %}{{ range(100000)|join(s)|length }}",
	"tojson of depth":      nested("5000") + "{{ ns.s|tojson }}",
	"print of depth":       nested("5000") + "{{ ns.s }}",
	"equality of depth":    nested("50000") + "{{ ns.s == ns.t }}",
	"drop of depth":        nested("49999") + "x",
	"tojson of sharing":    doubled + "{{ ns.s|tojson }}",
	"print of sharing":     doubled + "{{ ns.s|string|length }}",
	"equality of sharing":  doubled + "{{ ns.s == ns.t }}",
	"hash of sharing":      doubled + "{{ {ns.s: 1}|length }}",
	"include itself":       "{% include 'template' %}",
	"extends itself":       "{% extends 'template' %}",
	"include a file":       "{% include '/etc/passwd' %}",
	"import a file":        "{% from '/etc/passwd' import root %}",
	"python internals":     "{{ ''.__class__.__mro__[1] }}",
	"unknown function":     "{{ open('/etc/passwd').read() }}",
	"not closed":           "{% for m in messages %}",
	"nul bytes":            "{{ \x00\x00 }}",
}

// slack is what a render may take beyond its deadline on a busy machine: the
// interruption, and a new instance.
const slack = 3 * time.Second

// Every hostile template ends in a typed error in time, as a template of its own
// and as one that behaves until a message tells it not to, and the others render
// on.
func TestHostileTemplates(t *testing.T) {
	// One after the other, and not beside other tests: they take all that they
	// get, and the bounds of others are of time that passes.
	good, v := chatML(t)
	witness := mustNew(t, good, v, Options{})
	want, err := witness.Encode(context.Background(), user("hello"), noon)
	assert.NoError(t, err)
	for name, src := range hostile {
		t.Run(name, func(t *testing.T) {
			start := time.Now()
			_, err := New(context.Background(), src, v, Options{AllowUnlisted: true})
			assert.ErrorAs[*UnsupportedTemplate](t, err)
			assert.True(t, time.Since(start) < compileTime+renderTime+slack)

			sleeper := "{% for m in messages %}{{ m.content }}{% if 'wake' in m.content %}" + src + "{% endif %}{% endfor %}"
			tpl, err := New(context.Background(), sleeper, v, Options{AllowUnlisted: true, Instances: 1})
			if err != nil { // it does not even parse
				assert.ErrorAs[*UnsupportedTemplate](t, err)
				return
			}
			start = time.Now()
			_, err = tpl.Encode(context.Background(), user("wake"), noon)
			assert.True(t, time.Since(start) < renderTime+slack)
			// Some only ask for nothing, such as a missing attribute.
			if err != nil {
				assert.ErrorIs(t, err, ErrTemplate)
				assert.ErrorAs[*Failed](t, err)
			}
			// Its only instance was replaced or restored.
			ids, err := tpl.Encode(context.Background(), user("hello"), noon)
			assert.NoError(t, err)
			assert.Equal(t, v.decode(ids), "hello")
			assert.NoError(t, tpl.Close())
			ids, err = witness.Encode(context.Background(), user("hello"), noon)
			assert.NoError(t, err)
			assert.Equal(t, ids, want)
		})
	}
}

// These are over budget and are reported so, each by another bound.
func TestBudget(t *testing.T) {
	t.Parallel()
	_, v := chatML(t)
	for _, name := range []string{"nested loops", "huge output", "doubling a string", "equality of sharing"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := New(context.Background(), hostile[name], v, Options{AllowUnlisted: true})
			assert.ErrorIs(t, err, ErrBudget)
			assert.ErrorIs(t, err, ErrTemplate)
		})
	}
}

// A caller that goes away gets its own error, and its instance is not used again.
func TestCancel(t *testing.T) {
	t.Parallel()
	_, v := chatML(t)
	src := "{% for m in messages %}{{ m.content }}{% if 'wake' in m.content %}" + hostile["equality of sharing"] + "{% endif %}{% endfor %}"
	tpl := mustNew(t, src, v, Options{AllowUnlisted: true, Instances: 1})
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	_, err := tpl.Encode(ctx, user("wake"), noon)
	assert.ErrorIs(t, err, context.DeadlineExceeded)
	assert.False(t, errors.Is(err, ErrTemplate))
	_, err = tpl.Encode(ctx, user("hello"), noon)
	assert.ErrorIs(t, err, context.DeadlineExceeded)
	_, err = tpl.Encode(context.Background(), user("hello"), noon)
	assert.NoError(t, err)
}

// Templates that cannot be trusted to keep messages and markup apart.
func TestProbes(t *testing.T) {
	t.Parallel()
	const loop = "{% for m in messages %}"
	v := &triples{specials: []string{"<s>", "</s>", "<user>", "<user>:", "\n <x>", "\n\n"}, bos: "<s>", eos: "</s>"}
	for name, c := range map[string]struct{ src, reason string }{
		"drops messages":    {"{{ messages[0].content }}", "leaves out"},
		"drops assistant":   {loop + "{% if m.role != 'assistant' %}{{ m.content }}{% endif %}{% endfor %}", "role assistant"},
		"drops system":      {loop + "{% if m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}", "role system"},
		"escapes markup":    {loop + "{{ m.content|replace('<', '&lt;') }}{% endfor %}", ""},
		"ascii json":        {loop + "{{ m.content|tojson(ensure_ascii=true) }}{% endfor %}", "changes"},
		"upper case":        {loop + "{{ m.content|upper }}{% endfor %}", "changes"},
		"opens a token":     {loop + "<us{{ m.content }}{% endfor %}", "joins"},
		"opens with a rune": {loop + "<{{ m.content }}>{% endfor %}", "joins"},
		"a longer token":    {loop + "<user>{{ m.content }}{% endfor %}", "joins"},
		"closes a token":    {loop + "{{ m.content }}<x>{% endfor %}", "joins"},
		"white space":       {loop + "\n{{ m.content }}\n{% endfor %}", ""},
		"whole tokens":      {loop + "<s>{{ m.content }}</s>{% endfor %}", ""},
		"refuses all":       {loop + "{{ raise_exception('no') }}{% endfor %}", "does not render"},
		"refuses answers":   {loop + "{{ m.content }}{% if m.role == 'assistant' %}{{ raise_exception('no') }}{% endif %}{% endfor %}", "does not render"},
		"refuses system":    {loop + "{{ m.content }}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}{% endfor %}", ""},
		"fails on system":   {loop + "{{ m.content }}{% if m.role == 'system' %}{{ x.y.z }}{% endif %}{% endfor %}", "does not render"},
		"not UTF-8":         {loop + "{{ m.content }}{% endfor %}\xff", "UTF-8"},
		"too long":          {loop + "{{ m.content }}{% endfor %}" + strings.Repeat(" ", maxSource), "too long"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tpl, err := New(context.Background(), c.src, v, Options{AllowUnlisted: true})
			if c.reason == "" {
				assert.NoError(t, err)
				assert.NoError(t, tpl.Close())
				return
			}
			reason := assert.ErrorAs[*UnsupportedTemplate](t, err).Reason
			if !strings.Contains(reason, c.reason) {
				t.Fatalf("reason is %q, want %q in it", reason, c.reason)
			}
			_, err = New(context.Background(), c.src, v, Options{})
			assert.ErrorAs[*UnsupportedTemplate](t, err)
		})
	}
}
