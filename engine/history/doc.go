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
//	granted:u64 firstAt:i64 lastAt:i64 minPage:u32 maxPage:u32 events:u32 prev:32
//	size:u32 body
//
// granted is the highest generation that was granted in the block. Generations
// are granted in order, so the first block that reaches one is the one that
// grants it. Times are microseconds since 1970, read once for each event, and
// never go back: while a clock that was set back catches up, they stand still.
//
// The body is deflated; size is its length before. Inside: the owners and leases
// that occur, in order of appearance (count, then 16 bytes each), then one column
// after the other: a byte for the kind, a byte for reason and method, and
// varints: owner, lease, first page (difference to the event before), pages,
// generation (difference), time (difference). A body has one form; a reader
// refuses every other.
//
// # Gaps
//
// A writer never makes a pool wait: noting an event is a copy into memory that
// was there before. If blocks cannot be delivered for so long that all of it is
// full, it drops events and says so: a block with the flag gap covers exactly the
// sequence numbers that were lost. Evidence with a gap is unknown, not good.
//
// # The end
//
// A worker that drains delivers everything before it ends, for at most five
// seconds. One that is killed takes the last second with it: a history says what
// happened until its last block, and nothing of the time after it.
package history
