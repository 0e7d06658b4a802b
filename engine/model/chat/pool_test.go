package chat

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"

	"bulkhead.dev/infra/assert"
)

// memoryOf returns the memory of the only instance of a template at rest.
func memoryOf(t *testing.T, tpl *Template) []byte {
	t.Helper()
	tpl.pool.mu.Lock()
	defer tpl.pool.mu.Unlock()
	assert.Equal(t, len(tpl.pool.idle), 1)
	in := tpl.pool.idle[0]
	mem, ok := in.memory.Read(0, in.memory.Size())
	assert.True(t, ok)
	return mem
}

// No byte of a conversation is left in an instance, whether it was rendered,
// refused or failed.
func TestNothingIsLeft(t *testing.T) {
	t.Parallel()
	const src = `{% for m in messages %}{{ m.content }}{% if 'refuse' in m.content %}{{ raise_exception(m.content) }}{% endif %}{% if 'fail' in m.content %}{{ m.content.x.y }}{% endif %}{% endfor %}`
	_, v := chatML(t)
	tpl := mustNew(t, src, v, Options{AllowUnlisted: true, Instances: 1})
	before := bytes.Clone(memoryOf(t, tpl))
	contents := []string{"canary 2718", "refuse canary 2718", "fail canary 2718"}
	for n := 1; n <= 1<<15; n *= 2 {
		contents = append(contents, strings.Repeat("canary 2718 ", n))
	}
	kept := 0
	for _, content := range contents {
		_, _ = tpl.Encode(context.Background(), user(content), noon)
		if len(tpl.pool.idle) == 0 {
			// The conversation made it grow, so it was closed. Make another.
			_, err := tpl.Encode(context.Background(), user("x"), noon)
			assert.NoError(t, err)
			continue
		}
		kept = max(kept, len(content))
		mem := memoryOf(t, tpl)
		assert.False(t, bytes.Contains(mem, []byte("canary")))
		assert.True(t, bytes.Equal(mem, before))
	}
	// Instances serve more than one conversation of the usual length.
	assert.True(t, kept >= 4<<10)
	// The check can see one: here it is without the restoration.
	in, err := tpl.pool.get(context.Background())
	assert.NoError(t, err)
	b := appendRequest(nil, user("canary 2718"), tpl.vars, noon, renderFuel, maxOutput)
	_, _, err = in.call(context.Background(), "render", renderTime, in.render, b)
	assert.NoError(t, err)
	mem, _ := in.memory.Read(0, in.memory.Size())
	assert.True(t, bytes.Contains(mem, []byte("canary")))
	tpl.pool.put(in)
}

// An instance out of the image is the one that compiled the template.
func TestImage(t *testing.T) {
	t.Parallel()
	src, v := chatML(t)
	tpl := mustNew(t, src, v, Options{Instances: 1})
	want, err := tpl.Encode(context.Background(), user("x"), noon)
	assert.NoError(t, err)
	first, err := tpl.pool.get(context.Background())
	assert.NoError(t, err)
	first.dead = true
	tpl.pool.put(first) // closes it
	got, err := tpl.Encode(context.Background(), user("x"), noon)
	assert.NoError(t, err)
	assert.Equal(t, got, want)
}

// Long conversations fit, and do not keep their memory.
func TestLongConversation(t *testing.T) {
	t.Parallel()
	src, v := chatML(t)
	tpl := mustNew(t, src, v, Options{Instances: 1})
	small := len(memoryOf(t, tpl))
	var bmp strings.Builder // leaves replacements of four bytes
	for r := privateUse[0][0]; r <= privateUse[0][1]; r++ {
		bmp.WriteRune(r)
	}
	for name, msgs := range map[string][]Message{
		"100 KB": turns(100, 1000), "longest": turns(2, MaxContent/2), "most messages": turns(MaxMessages, 1),
		"most of both": turns(MaxMessages, MaxContent/MaxMessages),
		"controls":     {{RoleUser, strings.Repeat("\x01", MaxContent)}},
		"markup":       {{RoleUser, strings.Repeat("<", MaxContent)}},
		"wide markup":  {{RoleUser, bmp.String() + strings.Repeat("<", MaxContent-bmp.Len())}},
	} {
		ids, err := tpl.Encode(context.Background(), msgs, noon)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		text := v.decode(ids)
		for _, m := range msgs {
			assert.True(t, strings.Contains(text, m.Content))
		}
	}
	_, err := tpl.Encode(context.Background(), user("x"), noon)
	assert.NoError(t, err)
	assert.Equal(t, len(memoryOf(t, tpl)), small)
}

// turns returns a conversation of n messages of the given length.
func turns(n, length int) []Message {
	msgs := make([]Message, n)
	for i := range msgs {
		msgs[i] = Message{[]string{RoleUser, RoleAssistant}[i%2], strings.Repeat("words é ", length/9+1)[:length/9*9]}
	}
	return msgs
}

func TestConcurrentRenders(t *testing.T) {
	t.Parallel()
	src, v := chatML(t)
	tpl := mustNew(t, src, v, Options{Instances: 2})
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for k := range 40 {
				content := fmt.Sprintf("<|im_end|> from %d at %d", i, k)
				ids, err := tpl.Encode(context.Background(), user(content), noon)
				if err != nil || !strings.Contains(v.decode(ids), content) {
					t.Errorf("render %d of %d: %q, %v", k, i, v.decode(ids), err)
				}
			}
		})
	}
	wg.Wait()
	tpl.pool.mu.Lock()
	defer tpl.pool.mu.Unlock()
	assert.True(t, len(tpl.pool.idle) <= 2)
}

// Close waits for renders, and others are told.
func TestClose(t *testing.T) {
	t.Parallel()
	src, v := chatML(t)
	tpl, err := New(context.Background(), src, v, Options{Instances: 1})
	assert.NoError(t, err)
	in, err := tpl.pool.get(context.Background())
	assert.NoError(t, err)
	var wg sync.WaitGroup
	wg.Go(func() { // waits for the instance, or finds the pool closed
		if _, err := tpl.Encode(context.Background(), user("x"), noon); err == nil {
			return
		} else if !strings.Contains(err.Error(), ErrClosed.Error()) {
			t.Error(err)
		}
	})
	wg.Go(func() {
		if err := tpl.Close(); err != nil {
			t.Error(err)
		}
	})
	tpl.pool.put(in)
	wg.Wait()
	_, err = tpl.Encode(context.Background(), user("x"), noon)
	assert.ErrorIs(t, err, ErrClosed)
	assert.NoError(t, tpl.Close())
}

// An engine of its own, with its compiled module on disk.
func TestEngine(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	src, v := chatML(t)
	for range 2 {
		e := NewEngine(EngineOptions{CacheDir: dir})
		assert.NoError(t, e.Warm(context.Background()))
		tpl, err := New(context.Background(), src, v, Options{Engine: e})
		assert.NoError(t, err)
		_, err = tpl.Encode(context.Background(), user("x"), noon)
		assert.NoError(t, err)
		assert.NoError(t, tpl.Close())
		assert.NoError(t, e.Close(context.Background()))
		assert.NoError(t, e.Close(context.Background()))
		assert.ErrorIs(t, e.Warm(context.Background()), ErrClosed)
	}
	done, cancel := context.WithCancel(context.Background())
	cancel()
	assert.ErrorIs(t, NewEngine(EngineOptions{}).Warm(done), context.Canceled)
	assert.True(t, NewEngine(EngineOptions{CacheDir: "/dev/null/x"}).Warm(context.Background()) != nil)
	assert.NoError(t, NewEngine(EngineOptions{}).Close(context.Background()))
}
