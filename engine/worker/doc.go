// Package worker is the process that serves one leg of inference: prefill or
// decode.
//
// # Start
//
// A worker gets a [Boot] document and nothing else: no configuration file, no
// environment, no database. It verifies the digest of the model file itself,
// checks that its pool can hold the context window ([CheckCapacity]), listens,
// and registers with the front, to which it reports what it has counted from
// then on.
//
// # Who may call what
//
//	gateway          Generate, Prefill, Drain
//	prefill worker   Offer
//	decode worker    reads of the page server
//
// The identity of a caller is in its certificate (package peer). An offer must
// come from the very run of the prefill worker that the gateway announced.
//
// # One request
//
//	gateway            decode                              prefill
//	  Generate ────────► Gate.Enter, Expect
//	  ◄── Reserved ─────
//	  Prefill ───────────────────────────────────────────► Gate.Enter, Fill, NewOffer
//	                     Offer ◄───────────────────────────
//	                     pull over the fabric, commit
//	                     ─── root ────────────────────────► Ack: pages released
//	  ◄── Committed ────                       facts ─────►
//	  ◄── Delta* ──────  batch
//	  ◄── Finished ────
//
// Whatever ends one call ends what it holds: the end of Generate withdraws the
// expected transfer, so that an offer that comes later, or is being pulled, is
// refused; the failure of Prefill is seen by the gateway, which ends Generate.
// Every path releases the pages before it leaves the gate.
//
// # Refusals
//
// Every error of an RPC carries a Refusal with a reason of the closed list in
// refusal.go and the facts measured up to there. Messages hold numbers and ids,
// never content.
//
// # Facts
//
// What a leg reports it has measured: prefill the sum of the positions that
// forward passes wrote, decode the positions found in verified pages. No number
// of a request is echoed.
//
// # End
//
// When its context ends, or on Drain, a worker refuses new work and what waits,
// finishes what runs until the drain timeout, and then stops. The pages go with
// the process.
package worker
