package chat

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"
)

// status is how a call of the guest ended.
type status uint32

// The statuses of the guest's ABI.
const (
	statusOK       status = 0
	statusTemplate status = 1
	statusRaised   status = 2
	statusLimit    status = 3
	statusRequest  status = 4
)

// instance is one guest with one template. It is used by one goroutine at a time.
type instance struct {
	module  api.Module
	memory  api.Memory
	input   api.Function
	compile api.Function
	render  api.Function
	// dead is set by a trap, an interruption or a broken result. The stack and
	// the heap of the guest are undefined from then on.
	dead bool
}

// newInstance instantiates the guest without a template.
func (e *Engine) newInstance(ctx context.Context) (*instance, error) {
	r, m, err := e.compiled(ctx)
	if err != nil {
		return nil, err
	}
	// Anonymous, so that there can be many.
	mod, err := r.InstantiateModule(ctx, m, wazero.NewModuleConfig().WithName(""))
	if err != nil {
		return nil, fmt.Errorf("instantiate the template engine: %w", err)
	}
	in := &instance{
		module:  mod,
		memory:  mod.Memory(),
		input:   mod.ExportedFunction("guest_input"),
		compile: mod.ExportedFunction("guest_compile"),
		render:  mod.ExportedFunction("guest_render"),
	}
	abi := mod.ExportedFunction("guest_abi")
	if in.memory == nil || in.input == nil || in.compile == nil || in.render == nil || abi == nil {
		return nil, errors.Join(errors.New("the template engine lacks a function"), in.close())
	}
	res, err := abi.Call(ctx)
	if err != nil || len(res) != 1 || res[0] != guestABI {
		return nil, errors.Join(fmt.Errorf("the template engine has another version, want %d", guestABI), err, in.close())
	}
	return in, nil
}

func (in *instance) close() error {
	in.dead = true
	// A close cannot wait for the context of a render that has just run out.
	return in.module.Close(context.Background())
}

// call runs f on b within d. A failure of the guest is a status and a text; the
// error is the context's, or a *Failed of the given stage after which the
// instance is dead.
func (in *instance) call(ctx context.Context, stage string, d time.Duration, f api.Function, b []byte) (status, []byte, error) {
	bounded, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	die := func(budget bool, text string) (status, []byte, error) {
		in.dead = true
		if err := ctx.Err(); err != nil {
			return 0, nil, fmt.Errorf("%s a chat template: %w", stage, err)
		}
		return 0, nil, &Failed{Stage: stage, Budget: budget, cause: &Private{text}}
	}
	res, err := in.input.Call(bounded, uint64(len(b)))
	if err != nil {
		// Either the time or the memory is over: the function has no loop.
		return die(true, err.Error())
	}
	if !in.memory.Write(uint32(res[0]), b) {
		return die(false, "the input buffer lies outside of the memory")
	}
	res, err = f.Call(bounded, uint64(len(b)))
	if err != nil {
		// The time is over, or it is a trap. That is the bound of the memory or
		// of the stack, which look alike; the guest has no other on purpose.
		return die(true, err.Error())
	}
	address, st, n := uint32(res[0]>>32), status(res[0]>>28&0xf), uint32(res[0]&(1<<28-1))
	out, ok := in.memory.Read(address, n)
	if !ok {
		return die(false, "the output lies outside of the memory")
	}
	// Read returns the guest's memory itself.
	return st, bytes.Clone(out), nil
}

// image returns a copy of the memory.
func (in *instance) image() ([]byte, error) {
	mem, ok := in.memory.Read(0, in.memory.Size())
	if !ok {
		return nil, errors.New("the memory of the template engine cannot be read")
	}
	return bytes.Clone(mem), nil
}

// restore sets the memory back to img. It reports false for an instance that
// cannot be used again: a dead one, or one that grew, since a guest cannot shrink.
func (in *instance) restore(img []byte) bool {
	return !in.dead && int(in.memory.Size()) == len(img) && in.memory.Write(0, img)
}

// load makes a fresh instance one of the template that img was taken of.
func (in *instance) load(img []byte) bool {
	if have := in.memory.Size(); int(have) < len(img) {
		if _, ok := in.memory.Grow((uint32(len(img)) - have) >> 16); !ok {
			return false
		}
	}
	return in.restore(img)
}
