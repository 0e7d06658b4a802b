// Package sched decides which work a worker does next: who may start, which
// sequences are in the next step, which prompt gets the next chunk.
//
// # Admission
//
// A [Gate] holds the two things that work needs before it starts: one of a
// fixed number of slots, and credits of the pool for every page it may come to
// need. Work that cannot start at once waits in one bounded queue:
//
//   - first in, first out for one owner;
//   - round robin over the owners that wait, so that the length of one owner's
//     queue does not delay another's;
//   - an owner may have a bounded number of requests running and waiting;
//   - work that waits for credits may be passed by smaller work of other owners
//     a bounded number of times (maxPassed). After that nothing passes it, so it
//     starts once what runs has finished: large requests do not starve.
//
// Closing a gate refuses what waits and what comes; what runs goes on.
//
// # Decoding
//
// [Decode] batches continuously. One goroutine owns the model. Between two steps
// new sequences join and ended ones leave; each step is one forward pass with
// one token of every sequence that is not paused. A sequence starts only from a
// *handoff.Committed: there is no other way to make one, so text cannot be
// computed over pages that nobody verified.
//
//	Start -> proof step -> step* -> finished(eos | stop_string | max_tokens)
//	              |          |
//	              |          +--> refused(not finite | model | slow consumer | canceled | stopped)
//	              +-------------> refused(recompute mismatch | ...)
//
// The proof step runs the last token of the prompt, which writes keys and
// values of a position that prefill had written too. They must be the same to
// the bit: they depend on every page that attention read. If they differ, the
// sequence ends and no text of it ever leaves.
//
// The loop never waits for a consumer. Text goes into a mailbox of its
// [Run]; a run whose mailbox is full is left out of the steps, and ended when
// that lasts too long. A refused run drops the text that was not taken yet.
//
// A forward pass that fails as a whole is repeated for each sequence alone, so
// that only those at fault end.
//
// # Prefill
//
// [Prefill] computes one chunk of one prompt at a time, round robin over the
// prompts that have started, so that a long prompt delays a short one by one
// chunk and not by its length.
//
// # Who owns what
//
// The loop goroutine owns the sequence, sampler, stop matcher and logits of
// every run, from Start until Run.Done closes, by which time its pages are
// released and its buffers overwritten. A Slot is left by whoever entered it,
// after its pages were released.
package sched
