// Package history records what happened to the pages of a worker: grants,
// scrubs, last writes, releases. Later, when somebody asks whose bytes a page
// held before it was granted to a request, the answer is looked up here and not
// guessed.
//
// # Blocks
//
// The events of one run of a worker (its epoch) are numbered without gaps by
// package kv. A Writer cuts them into blocks, at least once a second, that are
// numbered from 1 and chained: each names the SHA-256 of the one before. What is
// missing, doubled, reordered or changed shows. A block says in front which
// sequence numbers, times and pages it is about, so that a search opens only
// those that can matter.
//
// Little endian:
//
//	"BHKH" version:u16 flags:u16 epoch:16 number:u64 firstSeq:u64 lastSeq:u64
//	firstAt:i64 lastAt:i64 minPage:u32 maxPage:u32 events:u32 prev:32
//	size:u32 body
//
// Times are microseconds since 1970, read once for each event. The body is
// deflated; size is its length before. Inside: the owners and leases that occur
// (count, then 16 bytes each), then for each event a byte for the kind, a byte
// for reason and method, and varints: owner, lease, first page (difference to
// the event before), pages, generation (difference), time (difference).
//
// # Gaps
//
// A writer never makes a pool wait. If blocks cannot be delivered for so long
// that its buffer is full, it drops events and says so: a block with the flag
// gap covers exactly the sequence numbers that were lost. Evidence with a gap is
// unknown, not good.
package history
