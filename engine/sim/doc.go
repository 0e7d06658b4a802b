// Package sim computes without weights: a worker that runs on it has everything
// but a model. It writes keys and values into the same pages, reads the pages
// of the whole sequence at each step, and says how long that would have taken.
// What surrounds it (scheduler, manifests, digests, hand-off, receipts) cannot
// tell the difference, so the cost of everything but arithmetic can be measured
// and planned with. Answers are words in no order.
//
// # What a page holds
//
// A position takes eight numbers of 16 bits, whatever the model file says: one
// layer, one head of four. The key has a mark that wiped memory does not have,
// the two halves of the token id, and the position; the value is a hash of the
// token, of its position, and of all keys and values before it. So the hash
// depends on every byte of every page in front, as it does in a model by way of
// attention: the proof of the last position (see package sched) fails over wrong
// pages, and what is answered differs. All sums are of whole numbers, so nothing depends on
// the batch, the chunks of a prompt, or where pages lie.
//
// A position without the mark, in pages that a pass reads, spoils the logits as
// NaN does in a model.
//
// # Time
//
// A pass over prompts takes Latency.PromptToken for each token. A step of
// decoding takes Latency.Step, and Latency.Sequence for each sequence in it. The pass
// sleeps for that long after its work. With no latency it answers at once.
package sim
