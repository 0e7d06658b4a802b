// Package sim runs the hand-off under randomized schedules. It has no code but
// its tests.
//
// A schedule is a small cluster in a bubble of virtual time: two prefill workers,
// one decode worker and a gateway for each of a few concurrent requests. All of
// it is derived from one seed. Real pools, page servers, offers and receivers are
// driven; what is simulated is the passes, the network and the faults.
//
// # Steps and faults
//
// A step is any point at which something else could happen: between two calls,
// while a pass holds its pages open, inside the read of a page, before and after a
// message. At each, the seed may inject a fault. A message may be lost on the way
// there or back, come twice, late or out of order, or with one bit flipped. A page
// may come flipped, swapped, short or not at all, or be another one, or its source
// may be given up and granted to somebody else before the read. Either leg may give up, and
// either worker may die and come back under a new epoch, which replays the
// manifests of the one before.
//
// # What must hold
//
//   - A sequence that was committed holds the bytes of its own prompt, and was
//     committed once, from an unaltered manifest and unaltered pages.
//   - Everything else is refused, for the reason that a simple model of the
//     announcement, the manifest and the faults predicts.
//   - A prompt that met no fault is committed and acknowledged.
//   - No page is granted or freed while anybody has it open. The ledger behind
//     this is made of the events of the pool and of what the simulation itself
//     has open.
//   - In the end the pools of the workers that live are free, no offer is open and
//     no goroutine is left.
//
// # Running it
//
// BULKHEAD_SOAK is how long to go on with new seeds (make soak). A schedule that
// fails prints its seed; with that as BULKHEAD_SOAK_SEED it alone is run, and its
// steps are logged.
package sim
