// Package synth makes small llama models as GGUF files: models with random
// weights of any shape, and a model whose output is known in advance. Both
// are complete, with tokenizer and chat template, so that every part of the
// platform runs on them as on a real model. The same arguments give the same
// bytes.
//
// # The copy model
//
// CopyModel is built by hand such that, greedily, the token that follows
// position p is the token at position p+1-CopyDistance, read out of the KV
// pages and nothing else. So a prompt is answered by its own last CopyDistance
// tokens, again and again. If a page holds keys and values that some other
// request left there, the answer is the text of that request, character by
// character: the worst case of a stale page becomes literal text in a test.
//
// It works with the standard forward pass (RMS norm, rotary embedding,
// softmax, SwiGLU) of one layer with one head:
//
//   - The code of a token is two digits in base 16, each written as a one-hot
//     vector: 17 + 16 numbers. All codes have the same length, so all norms
//     have a known value and undo nothing.
//   - The residual stream has three parts that never mix: two constants, the
//     code of the token at this position, and the code that attention found.
//   - Query and key project the constants, hence are the same at all positions
//     but for the rotation. With a rotary frequency w, query and key are set
//     apart by the angle w*(CopyDistance-1), so that their product at
//     distance r is cos(w*(r-CopyDistance+1)). The sum over 32 frequencies
//     has one peak, at r = CopyDistance-1. Keys are scaled such that the
//     neighbours of the peak get less than 1e-10 of its weight.
//   - The value is the code of the token; the output projection puts it into
//     the third part, and the head compares only that part with all codes. A
//     digit that agrees adds copyGain to a logit, so the right token leads by
//     at least copyGain, which also makes sampling at temperature 1 copy.
//   - The feed-forward layer is zero.
//
// BOS has the key of the opposite sign and the code of a space, and no code in
// the head: it is hardly ever attended to and never emitted. EOS and the marks
// of a turn have codes of their own and are emitted only when they are copied.
// A text of at least CopyDistance tokens after BOS is copied as described. In
// a shorter one there is no token at the distance yet: another token of the
// text takes its place, which one is not specified.
//
// DeepCopyModel is for tests that look at keys and values: in one layer those
// of a position tell nothing about other positions. It has a second head, whose
// query is zero, so that it finds the mean of all codes so far; a fourth part of
// the stream takes it, and a second layer has it as its value. That layer puts
// out zero, so that the answers are the same.
//
// Margins: rounding keys and values to half precision changes a score by less
// than 1, and the peak leads by more than 20.
package synth
