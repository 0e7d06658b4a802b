package chat

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"sync"

	"github.com/tetratelabs/wazero"
)

// guestWasm is the build of guest; minijinja.wasm.sha256 has its checksum.
//
//go:embed minijinja.wasm
var guestWasm []byte

// guestABI is the version of the guest's functions that instance.go calls.
const guestABI = 2

// EngineOptions says how the module is compiled.
type EngineOptions struct {
	// CacheDir is a folder for the compiled module, or empty. Compiling takes
	// about 1.3 s of one core, reading it back 50 ms. What is in there runs as
	// code of this process, so nobody else may write to it.
	CacheDir string
}

// Engine is the sandbox that templates run in. It is safe for concurrent use.
type Engine struct {
	opts EngineOptions

	mu      sync.Mutex // guards all below
	closed  bool
	cache   wazero.CompilationCache
	runtime wazero.Runtime
	module  wazero.CompiledModule
}

// NewEngine returns an engine that compiles its module on first use.
func NewEngine(opts EngineOptions) *Engine { return &Engine{opts: opts} }

// shared is the engine of templates that name none. It is never closed.
var shared = sync.OnceValue(func() *Engine { return NewEngine(EngineOptions{}) })

// Warm compiles the module of the engine that templates have by default, so that
// the first New does not have to.
func Warm(ctx context.Context) error { return shared().Warm(ctx) }

// Warm compiles the module, if that was not done yet. Others who need it wait.
func (e *Engine) Warm(ctx context.Context) error {
	_, _, err := e.compiled(ctx)
	return err
}

func (e *Engine) compiled(ctx context.Context) (wazero.Runtime, wazero.CompiledModule, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil, nil, ErrClosed
	}
	if e.module != nil {
		return e.runtime, e.module, nil
	}
	if err := ctx.Err(); err != nil {
		return nil, nil, fmt.Errorf("compile the template engine: %w", err)
	}
	config := wazero.NewRuntimeConfig().WithMemoryLimitPages(guestPages).WithCloseOnContextDone(true)
	if e.opts.CacheDir != "" {
		cache, err := wazero.NewCompilationCacheWithDir(e.opts.CacheDir)
		if err != nil {
			return nil, nil, fmt.Errorf("open the cache of the template engine: %w", err)
		}
		e.cache = cache
		config = config.WithCompilationCache(cache)
	}
	// The runtime outlives the caller's context.
	ctx = context.WithoutCancel(ctx)
	r := wazero.NewRuntimeWithConfig(ctx, config)
	m, err := r.CompileModule(ctx, guestWasm)
	if err == nil && len(m.ImportedFunctions())+len(m.ImportedMemories()) != 0 {
		err = errors.New("it has imports")
	}
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("compile the template engine: %w", err), r.Close(ctx), e.closeCache(ctx))
	}
	e.runtime, e.module = r, m
	return r, m, nil
}

// Close ends every instance and frees the module. Templates of this engine have
// to be closed before.
func (e *Engine) Close(ctx context.Context) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil
	}
	e.closed = true
	var err error
	if e.runtime != nil {
		err = e.runtime.Close(ctx)
	}
	return errors.Join(err, e.closeCache(ctx))
}

func (e *Engine) closeCache(ctx context.Context) error {
	if e.cache == nil {
		return nil
	}
	err := e.cache.Close(ctx)
	e.cache = nil
	return err
}
