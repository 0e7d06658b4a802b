package sched

import (
	"context"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"bulkhead.dev/engine/handoff"
	"bulkhead.dev/engine/kv"
	"bulkhead.dev/engine/sample"
)

// Finish is why a run came to its end. There are no others: whatever else ends
// a run is an error.
type Finish string

// The ends of a finished run.
const (
	EOS       Finish = "eos"         // the model ended the text
	StopWord  Finish = "stop_string" // a stop string was found
	MaxTokens Finish = "max_tokens"  // the limit of output tokens was reached
)

// Request says what to decode.
type Request struct {
	// Committed is the proof that the pages of the prompt are here. Start takes
	// the sequence out of it, also when Start fails.
	Committed *handoff.Committed
	// LastToken is the last id of the prompt.
	LastToken int32
	// MaxOutput is the largest number of ids to compute, at least 1. The lease
	// holds credits for all of them.
	MaxOutput int
	Params    sample.Params
	Stops     []string
}

// Delta is text and the ids computed since the last one.
type Delta struct {
	Text string // whole characters; empty while text is held back
	IDs  []int32
}

// Result describes a finished run.
type Result struct {
	Finish Finish
	Output int // ids computed, an end-of-text id included
}

// Text turns ids into text; *tokenizer.Decoder is one.
type Text interface {
	Push(id int32) string
	Flush() string
}

// Run is one sequence in the batch. Its methods are safe for concurrent use, but
// Next is for one consumer.
type Run struct {
	d *Decode

	// Fields of the loop goroutine.
	seq     *kv.Sequence
	sampler *sample.Sampler
	stop    *sample.Stop
	text    Text
	logits  []float32 // one vocabulary; overwritten when the run ends
	input   [1]int32  // the id of the next step
	pos     int       // its position
	proved  bool      // the proof step was passed
	proof   []byte    // bytes of the last prompt position as pulled
	max     int
	full    time.Time // since when the mailbox is full; zero when it is not

	pages    func() []kv.Extent // of the sequence, also after its release
	output   atomic.Int64       // ids computed
	compute  atomic.Int64       // nanoseconds of the passes that it was part of
	canceled atomic.Bool

	mu      sync.Mutex
	pending Delta
	ended   bool
	result  Result
	err     error

	ready chan struct{} // holds one element when there is something to take
	done  chan struct{} // closes when the loop let go of everything
}

// Next waits for the next piece of text. At the end it returns io.EOF, after
// which Result is valid; any other error is final too, and text that was not
// taken before it is lost on purpose.
func (r *Run) Next(ctx context.Context) (Delta, error) {
	for {
		r.mu.Lock()
		d, ended, err := r.pending, r.ended, r.err
		r.pending = Delta{}
		r.mu.Unlock()
		switch {
		case err != nil:
			return Delta{}, err
		case len(d.IDs) > 0 || d.Text != "":
			if len(d.IDs) >= r.d.opts.Mailbox {
				r.d.poke()
			}
			return d, nil
		case ended:
			return Delta{}, io.EOF
		}
		select {
		case <-r.ready:
		case <-ctx.Done():
			return Delta{}, ctx.Err()
		}
	}
}

// Result returns how the run finished. It is valid after Next returned io.EOF.
func (r *Run) Result() Result {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.result
}

// Output returns the ids computed so far.
func (r *Run) Output() int { return int(r.output.Load()) }

// Computed returns the wall time of the forward passes that the run was part of.
func (r *Run) Computed() time.Duration { return time.Duration(r.compute.Load()) }

// Extents returns what was granted to the sequence so far.
func (r *Run) Extents() []kv.Extent { return r.pages() }

// Close ends the run within one step if it has not ended, and waits until its
// pages are released and its buffers overwritten. It is idempotent. The loop
// must be running, or have ended.
func (r *Run) Close() {
	r.canceled.Store(true)
	r.d.poke()
	<-r.done
}

// put adds to the mailbox.
func (r *Run) put(text string, id int32) {
	r.mu.Lock()
	r.pending.Text += text
	r.pending.IDs = append(r.pending.IDs, id)
	r.mu.Unlock()
	r.wake()
}

func (r *Run) wake() {
	select {
	case r.ready <- struct{}{}:
	default:
	}
}

// mailboxFull reports whether the consumer has to take text before more may be
// computed.
func (r *Run) mailboxFull() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.pending.IDs) >= r.d.opts.Mailbox
}

// end lets go of everything and publishes the outcome. It is called once, by
// the loop.
func (r *Run) end(f Finish, err error) {
	if r.seq != nil {
		r.seq.Release()
	}
	r.sampler.Close()
	r.stop.Close()
	clear(r.logits)
	clear(r.proof)
	r.seq, r.text, r.logits, r.proof = nil, nil, nil, nil
	r.input = [1]int32{}

	r.mu.Lock()
	r.ended = true
	if err != nil {
		r.err, r.pending = err, Delta{}
	} else {
		r.result = Result{Finish: f, Output: int(r.output.Load())}
	}
	r.mu.Unlock()
	r.wake()
	close(r.done)
}

// accept takes in the logits of a step: it draws an id and passes on its text.
// It reports how the run ended, if it did.
func (r *Run) accept() (f Finish, err error) {
	id, err := r.sampler.Next(r.logits)
	if err != nil {
		return "", fmt.Errorf("%w: %w", ErrNotFinite, err)
	}
	n := r.output.Add(1)
	r.input[0] = id
	r.pos++
	if r.d.opts.IsEOG(id) {
		r.put(r.rest(), id)
		return r.finish(EOS), nil
	}
	emit, stopped := r.stop.Push(r.text.Push(id))
	if !stopped && int(n) >= r.max {
		emit += r.rest()
		r.put(emit, id)
		return r.finish(MaxTokens), nil
	}
	r.put(emit, id)
	if stopped {
		return StopWord, nil
	}
	return "", nil
}

// rest returns what the decoder and the stop matcher still hold. A stop string
// that waited in it counts.
func (r *Run) rest() string {
	emit, stopped := r.stop.Push(r.text.Flush())
	if !stopped {
		emit += r.stop.Flush()
	}
	return emit
}

// finish returns f, unless a stop string was found in the very last text.
func (r *Run) finish(f Finish) Finish {
	if r.stop.Stopped() {
		return StopWord
	}
	return f
}
