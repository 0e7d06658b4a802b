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
//	NewOffer ──► new ──Preview, Complete──► open ──Ack(root)──► closed
//	              │                        │  ▲ │                 ▲
//	              │ Abort           Preview, Complete             │
//	              │                             │ Abort           │
//	              └─────────────────────────────┴─────────────────┘
//
// Preview and Complete take sealed pages over, also if they fail. They digest
// them under a key and open them at the page server under a secret, both fresh
// for each offer, which previews and manifest carry to the decode worker alone.
// The pages stay
// until the other leg has acknowledged the same root, or until the call that
// carried the manifest has failed for certain; a bare timeout is neither. That
// Abort is safe at any time comes from package kv: a page that the server is
// just copying is quarantined until it has.
//
// # The decode leg: Receiver, Inbound, Committed
//
//	              ┌──Preview, pulled─┐
//	              ▼                  │
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
//  3. each field that both know is equal, and the pages   wrong_*, coverage
//     that came early are those of the manifest
//  4. only now pages are granted, scrubbed                exhausted
//  5. the pages are read over the fabric, and digested    fabric, generation
//     as they are stored
//  6. kv.Landing.Commit compares the digests and counts   digest, coverage
//     the written positions
//
// From version 2 on, pages can come early: while the prompt is computed, previews
// name the pages that are finished, and each goes through steps 1 to 5. Until
// the manifest has come and all pages were verified, those of before and the
// rest alike, nothing is committed. A preview that is refused ends the transfer.
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
//	sealed     the Offer from Preview or Complete on
//
// # Versions
//
// Workers register the versions that they speak, the gateway pairs legs that have
// one in common and tells both the best of those. An encoding names its version;
// one that was not agreed on is refused. So a fleet can be upgraded worker by
// worker, in any order.
//
// # What is not proven
//
// A prefill worker that lies about which tokens it computed, with digests that
// match, is not found out here: it holds the key. The decode worker recomputes
// the last position of the prompt and compares (see package worker). A malicious
// prefill worker remains inside the trust boundary.
package handoff
