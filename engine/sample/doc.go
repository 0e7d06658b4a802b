// Package sample turns logits into token ids and cuts text at stop strings.
//
// A Sampler belongs to one sequence. Its steps are a pure function of the
// parameters, the logits and the ids it returned before, so the same seed gives
// the same output whatever else runs in the batch. The order of the steps is:
//
//  1. every logit is checked: a NaN, a +Inf, or nothing but -Inf is
//     ErrNotFinite. It means that a page held something it must not, and the
//     caller refuses the response;
//  2. frequency and presence penalties, over the ids that this sampler returned
//     (not over the prompt);
//  3. temperature 0 takes the largest logit, the lowest id among equals, and
//     ends here; any other temperature divides the logits;
//  4. top-k, then min-p, then top-p, each over what the one before left;
//  5. one number per step out of a ChaCha8 stream that is keyed with the seed
//     picks among what is left.
//
// Top-k and top-p select with a radix histogram over the bits of the numbers:
// linear in the vocabulary for any input, no sorting, and equal numbers are
// kept in order of their ids.
//
// A Stop watches decoded text for stop strings across any chunking.
//
// Logits, penalty history and held-back text are derived from a client's
// content. Each is owned by one Sampler or Stop, is never pooled, and is
// overwritten by Close.
package sample
