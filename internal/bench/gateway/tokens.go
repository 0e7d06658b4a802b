package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"time"

	"bulkhead.dev/engine/model/chat"
	"bulkhead.dev/services/gateway"
)

// tokenise times what the edge does to messages: the template, in its sandbox,
// and the tokenizer. A model that BULKHEAD_TEST_MODEL names is timed too.
func (b *bench) tokenise(ctx context.Context, _ *database) error {
	if err := b.tokeniseWith(ctx, "the model of the benchmark", b.model); err != nil {
		return err
	}
	if path := os.Getenv("BULKHEAD_TEST_MODEL"); path != "" {
		return b.tokeniseWith(ctx, "BULKHEAD_TEST_MODEL", path)
	}
	return nil
}

func (b *bench) tokeniseWith(ctx context.Context, name, path string) (err error) {
	engine := chat.NewEngine(chat.EngineOptions{CacheDir: filepath.Join(b.cache, "templates")})
	defer func() { err = errors.Join(err, engine.Close(ctx)) }()
	f := gateway.Files{Path: func([32]byte) (string, error) { return path, nil }, ChatOptions: chat.Options{Engine: engine, AllowUnlisted: true}}
	defer func() { err = errors.Join(err, f.Close()) }()
	p, err := f.Prompter(ctx, [32]byte{})
	if err != nil {
		return err
	}
	request := &gateway.Request{Messages: []chat.Message{{Role: "system", Content: system}, {Role: "user", Content: prose[:170]}}}
	text := &gateway.Request{Text: strings.Repeat(prose+". ", 200)}
	tokens := 0
	each := func(r *gateway.Request) (float64, error) {
		var times []float64
		for end := time.Now().Add(b.window / 4); len(times) == 0 || time.Now().Before(end); {
			start := time.Now()
			ids, err := p.Encode(ctx, r, start)
			if err != nil {
				return 0, err
			}
			tokens = len(ids)
			times = append(times, time.Since(start).Seconds())
		}
		return median(times), nil
	}
	took, err := each(request)
	if err != nil {
		return err
	}
	b.table.note("template and tokenizer, "+name, "%.1f us for %d tokens", took*1e6, tokens)
	if took, err = each(text); err != nil {
		return err
	}
	b.table.note("- tokenizer alone, long text", "%.1f MB/s, %.2f million tokens/s", float64(len(text.Text))/took/1e6, float64(tokens)/took/1e6)
	return nil
}
