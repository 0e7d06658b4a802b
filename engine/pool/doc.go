// Package pool keeps the workers that the platform can use: who they are, what
// they can hold, whether they are well, and which two serve a request.
//
// # Life of a worker
//
//	Register --> live --(no heartbeat for StaleAfter)--> stale --(heartbeat)--> live
//	               |                                        |
//	               +--------- Lost, or the same role ------>+--> gone
//
// A worker registers with the epoch that its certificate names; an epoch that
// is gone never comes back, so a message of a dead process cannot pass for one
// of its successor. A stale worker gets no new requests. It is not dead: only
// [Registry.Lost], called by whoever reaped the process, says that.
//
// # Admission
//
// A pool whose pages cannot hold the context window of its model is refused at
// registration with the leg, both numbers and the remedy. The effective
// context of a model is the least over all live legs, and is what the edge
// enforces.
//
// # Routing
//
// A pair is a prefill and a decode worker with the same model digest and the
// same geometry fingerprint. Among live ones the pair with the fewest requests
// in flight is taken.
package pool
