// Package handoff is the protocol by which a decode worker takes over the
// computed prompt of a prefill worker.
//
// The rule: absence of an error is not success. A sequence exists on the decode
// leg only if a manifest named exactly what the gateway had announced to that
// leg, and the bytes that were read match it, page by page and position by
// position. Everything else is a *Refusal with a reason from a closed list.
//
// # The prefill leg: Offer
//
//	*kv.Sealed ──NewOffer──► open ──Ack(root)──► released
//	                          │                    ▲
//	                          └──Abort─────────────┘
//
// NewOffer takes the sealed pages over, also if it fails. It digests them under
// a fresh key, opens them at the page server under a fresh secret, and writes
// both into the manifest, which goes to the decode worker alone. The pages stay
// until the other leg has acknowledged the same root, or until the call that
// carried the manifest has failed for certain; a bare timeout is neither. That
// Abort is safe at any time comes from package kv: a page that the server is
// just copying is quarantined until it has.
//
// # The decode leg: Receiver, Inbound, Committed
//
//	Expect ──► expected ──Pull──► pulling ──verified──► committed ──Sequence──► taken
//	              │                  │                      │
//	              │ Close            │ any failure, Close   │ Close
//	              ▼                  ▼                      ▼
//	           refused ◄─────────────┘                  released
//
// Expect is called with what the gateway announced, and takes the credits. The
// manifest arrives in another call, from the prefill worker, and Pull takes it
// through these steps; whatever a step refuses, the later ones do not happen:
//
//  1. the transfer is expected and was never pulled       wrong_transfer, replay
//  2. the manifest is canonical, whole and no longer      bad_manifest
//  3. each field that both know is equal                  wrong_*, coverage
//  4. only now pages are granted, scrubbed                exhausted
//  5. the pages are read over the fabric, and digested    fabric, generation
//     as they are stored
//  6. kv.Landing.Commit compares the digests and counts   digest, coverage
//     the written positions
//
// Canceling is possible at any time (canceled). A transfer is pulled at most
// once, whatever came of it. Until step 6 the pages are a kv.Landing, which no
// forward pass can read.
//
// # Who owns what
//
//	credits    the caller until Expect, then the Inbound
//	landing    the Inbound; aborted by every refusal and by Close
//	sequence   the Committed until Sequence is called, then its caller
//	sealed     the Offer from NewOffer on
//
// # What is not proven
//
// A prefill worker that lies about which tokens it computed, with digests that
// match, is not found out here: it holds the key. The decode worker recomputes
// the last position of the prompt and compares (see package worker). A malicious
// prefill worker remains inside the trust boundary.
package handoff
