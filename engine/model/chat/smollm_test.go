package chat

import (
	"context"
	"os"
	"testing"

	"bulkhead.dev/engine/model"
	"bulkhead.dev/engine/model/gguf"
	"bulkhead.dev/engine/model/tokenizer"
	"bulkhead.dev/infra/assert"
)

// smolLM2 returns the tokenizer and the template of the model file that
// BULKHEAD_TEST_MODEL names.
func smolLM2(t testing.TB) (string, *tokenizer.Tokenizer) {
	t.Helper()
	path := os.Getenv("BULKHEAD_TEST_MODEL")
	if path == "" {
		assert.Skip(t, "BULKHEAD_TEST_MODEL names no model file")
	}
	f, err := gguf.Open(path)
	assert.NoError(t, err)
	defer func() { assert.NoError(t, f.Close()) }()
	tok, err := tokenizer.FromGGUF(f)
	assert.NoError(t, err)
	src, ok := model.ChatTemplate(f)
	assert.True(t, ok)
	return src, tok
}

// The template of the model file is the one of the golden renders, and its ids
// are those of the rendered text.
func TestSmolLM2(t *testing.T) {
	t.Parallel()
	src, tok := smolLM2(t)
	want, _ := chatML(t)
	assert.Equal(t, src, want)
	tpl := mustNew(t, src, tok, Options{})
	for _, g := range readGolden(t).Templates {
		if g.Name != "SmolLM2" {
			continue
		}
		for name, msgs := range readGolden(t).Conversations {
			ids, err := tpl.Encode(context.Background(), msgs, noon)
			assert.NoError(t, err)
			assert.Equal(t, ids, tok.Encode(nil, *g.Want[name], tokenizer.Markup))
		}
	}
	// Control tokens of a message are text.
	count := func(content string) (n int) {
		ids, err := tpl.Encode(context.Background(), user(content), noon)
		assert.NoError(t, err)
		for _, id := range ids {
			if tok.IsControl(id) {
				n++
			}
		}
		return n
	}
	assert.Equal(t, count("x"), 5)
	for _, s := range tok.Specials() {
		assert.Equal(t, count(s), 5)
		assert.Equal(t, count("<|im_end|>\n"+s+s), 5)
	}
}

func benchmark(b *testing.B, msgs []Message) {
	src, tok := smolLM2(b)
	tpl := mustNew(b, src, tok, Options{})
	for b.Loop() {
		_, err := tpl.Encode(context.Background(), msgs, noon)
		assert.NoError(b, err)
	}
}

func BenchmarkEncodeShort(b *testing.B) {
	benchmark(b, []Message{{RoleSystem, "You are terse."}, {RoleUser, "Hi."}, {RoleAssistant, "Hello."}, {RoleUser, "What is the capital of France?"}})
}

func BenchmarkEncode100KB(b *testing.B) { benchmark(b, turns(100, 1000)) }

func BenchmarkRenderShort(b *testing.B) {
	src, v := chatML(b)
	tpl := mustNew(b, src, v, Options{})
	for b.Loop() {
		_, err := tpl.render(context.Background(), user("What is the capital of France?"), noon)
		assert.NoError(b, err)
	}
}

func BenchmarkRender100KB(b *testing.B) {
	src, v := chatML(b)
	tpl := mustNew(b, src, v, Options{})
	for b.Loop() {
		_, err := tpl.render(context.Background(), turns(100, 1000), noon)
		assert.NoError(b, err)
	}
}

func BenchmarkInstance(b *testing.B) {
	src, v := chatML(b)
	tpl := mustNew(b, src, v, Options{Instances: 1})
	for b.Loop() {
		in, err := tpl.pool.get(context.Background())
		assert.NoError(b, err)
		in.dead = true
		tpl.pool.put(in)
	}
	b.ReportMetric(float64(len(tpl.pool.img)), "memory-B")
}

func BenchmarkNew(b *testing.B) {
	src, tok := smolLM2(b)
	assert.NoError(b, Warm(context.Background()))
	for b.Loop() {
		tpl, err := New(context.Background(), src, tok, Options{})
		assert.NoError(b, err)
		assert.NoError(b, tpl.Close())
	}
}

func BenchmarkCompile(b *testing.B) {
	for b.Loop() {
		e := NewEngine(EngineOptions{})
		assert.NoError(b, e.Warm(context.Background()))
		assert.NoError(b, e.Close(context.Background()))
	}
}

func BenchmarkCompileCached(b *testing.B) {
	dir := b.TempDir()
	first := NewEngine(EngineOptions{CacheDir: dir})
	assert.NoError(b, first.Warm(context.Background()))
	assert.NoError(b, first.Close(context.Background()))
	for b.Loop() {
		e := NewEngine(EngineOptions{CacheDir: dir})
		assert.NoError(b, e.Warm(context.Background()))
		assert.NoError(b, e.Close(context.Background()))
	}
}
