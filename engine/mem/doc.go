// Package mem moves and wipes page memory at the speed of the memory, and
// digests what it moves in the same pass.
//
// # The digest
//
// A page is n bytes, n a multiple of 64, in a place that is named by its index
// and generation. Its sum has two steps:
//
//  1. NH (Black, Halevi, Krawczyk, Krovetz, Rogaway, "UMAC: Fast and Secure
//     Message Authentication", 1999; RFC 4418 section 5.2) over stripes of 4096
//     bytes. With m[0], m[1], … the little-endian 32-bit words of a stripe and
//     k the key words, lane p of 0 … 3 is the sum over even j, mod 2^64, of
//     (m[j] + k[4p+j]) * (m[j+1] + k[4p+j+1]), the additions mod 2^32. The
//     lanes are Toeplitz: they share one key, four words apart. The last stripe
//     may be short.
//  2. AES-256-GMAC over the lanes of all stripes in order, 8 bytes each, and n in
//     16 bytes, all little-endian. The nonce is the index (4 bytes) and the
//     generation (8 bytes).
//
// The key of both is expanded from a secret of 32 bytes by AES-256 in counter
// mode from zero on: 32 bytes for GMAC, then the words of NH.
//
// # The bound
//
// Over the choice of the secret, and with AES taken for a random function:
//
//   - Two different pages of the same length have the same lanes in a stripe in
//     which they differ with probability at most 2^-128: NH is 2^-32-almost
//     universal for each lane. Lane p's terms at the last pair of words that
//     differs contain a key word that neither earlier lanes contain, nor this
//     lane at earlier pairs; and the terms after it are equal. So the lanes
//     multiply (the Toeplitz theorem of the paper, whose key shift is two words; any
//     even shift will do).
//   - Two different inputs of b blocks to GMAC under one nonce have the same sum
//     with probability at most (b+1)/2^128; here b = 2*stripes + 1, and pages of
//     different length are always different inputs.
//
// Together, two different pages in one place have equal sums with probability
// below (2*stripes + 3)/2^128: 2^-120 for the pages of 368,640 bytes of a small model,
// 2^-114 for 16 MiB. One page in two places has two sums, always, because the
// masks of two nonces are different blocks of one permutation; different pages
// in different places have equal sums by chance only (2^-128).
//
// That holds if nobody who chooses bytes sees sums or the secret, and if the
// offering side sums one page for each place under a key. It is proof against
// accidents, races, and tenants, who see neither. It is no defense against a
// malicious worker: it holds the secret and can give any bytes a good sum.
//
// # Levels
//
// The Go reference is the definition; C kernels for AVX2 and AVX-512 are chosen
// at run time and compute the same bits. Level tells which one runs.
//
// From 4 KiB on, copies and fills store past the caches: that is faster, and
// leaves the caches to those who compute. Smaller ones, and memory that does not
// begin at a cache line, are stored in the ordinary way. In every case the
// stores are ordered before whatever the caller does next.
//
// A copy with a sum loads each byte of the source once, and digests what it
// stores. A source that another process changes meanwhile may yield torn bytes,
// but never bytes that differ from those the sum is of.
package mem
