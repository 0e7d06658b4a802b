// Package compute runs a llama model over token positions and KV pages: a
// reference in Go, and C kernels that are chosen at run time (scalar, AVX2,
// AVX-512 VNNI, AMX).
//
// # The rule
//
// Results are bitwise the same whatever the batch, the place of a row in it,
// the chunking of a prompt, the placement of pages, the number of threads and
// the level, the Go reference included. It makes "same seed, same output" hold
// under load, lets two workers check each other's arithmetic bit for bit, and
// keeps answers from telling about neighbours. It holds by construction: every
// output has one accumulator whose operations have a fixed order.
//
//   - Quantised weights (Q4_0, Q4_1, Q8_0). Activations become int8 in blocks
//     of 32: s = amax/127, q = round-half-even(x * (127/amax)), S = sum of q.
//     A block with a number that is not finite has s = NaN and q = 0, so that
//     NaN is never lost. Per output, blocks ascending:
//     acc = fma(float(I), d*s, acc) with the exact integer I = sum of q_w*q;
//     then, for Q4, acc = fma(m, s*S, acc). Q4_0 is Q4_1 with m = -8d.
//   - Other weights (F32, F16, BF16): acc = fma(x[k], w[k], acc), k ascending.
//   - RMSNorm: sixteen sums of squares (lane i mod 16, fma), the tree 8, 4, 2,
//     1; r = 1/sqrt(sum/n + eps); y = (x*r)*w.
//   - RoPE on neighbouring pairs: x' = fma(a, cos, -(b*sin)), y' = fma(a, sin,
//     b*cos), then times 1/sqrt(head dim) for queries. Angles are computed once
//     in float64 and rounded.
//   - Attention, per query: pages ascending; a score is two sums (even and odd
//     dims, fma) added; the running maximum rescales the sums when it moves;
//     weights come from one polynomial exp and are added by the tree; values are
//     added token by token (fma); one division at the end.
//   - SwiGLU: e = exp(-|g|); g * (g >= 0 ? 1/(1+e) : e/(1+e)) * up.
//   - Keys and values are rounded half-even to the type of the page.
//
// NaN may have another payload on another level; that it is NaN is the same.
//
// # What a pass may touch
//
// It reads and writes pages through [Pages] only, which checks them when asked.
// The query at position p reads positions [0, p]. Slots of a page behind that
// may hold anything, NaN included, and never influence a result. Scratch is
// overwritten after each pass ([Model.Forward]).
package compute
