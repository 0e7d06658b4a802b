// Package kv holds the pages of keys and values, and decides who may touch
// which of them when.
//
// # Isolation is a type
//
// Nothing in this package hands out a page by number. A page is reached through
// a handle, each handle allows the steps that are right in its phase, and each
// step to the next phase consumes the handle:
//
//	Reserve ──► Credits ──Fill──► Filler ──Seal────► Sealed      prefill leg
//	               │                 │ Table            │ View, Sums
//	               │
//	               └──────Land──► Landing ─Commit──► Sequence    decode leg
//	                                 │ Receive          │ Table, Extend
//
// A rejected request holds none of them, so no queue can mistake it for work.
// What cannot be written down:
//
//   - a page without a grant, or a grant without credits: Fill and Land take
//     the credits, and only the handles they return draw pages;
//   - an unscrubbed page of another owner: the state between drawing a page and
//     letting the owner touch it (Granted) ends after the scrub, inside Grant;
//   - a forward pass over pages that are not held: compute sees pages through a
//     Table only, and an open Table holds every page in it;
//   - attention over a position that nobody proved: a Table reads [0, pos) with
//     pos at most Len, and Len grows by a commit and by own writes only;
//   - a decode sequence without proof: the one way from Landing to Sequence is
//     Landing.Commit, and Commit is the verification, not a flag set after it.
//     Bytes get into landed pages through an Intake only, which digests them as
//     it stores them, with the same code the prefill leg used; Commit compares
//     those digests with the claim and counts the positions that it finds
//     written. There is no "verified" value that somebody could make up, keep or
//     pass on. What the
//     claim is compared with comes from package handoff, which first checks the
//     manifest against what the gateway announced; a test there fails if any
//     other package commits.
//
// # States of a page
//
// The table in state.go is data: it drives the pool, the property tests, and
// whatever else needs it. Every page is in exactly one state.
//
//	             grant               fill                seal
//	Clean ────────┐       ┌──────────────────► Filling ─────────┐
//	  ▲           ▼       │                     ▲    │ free     ▼
//	  │ scrubbed Granted ─┤               adopt │    │        Sealed(refs)
//	Scrubbing     ▲       │  land               │    │          │ free at refs 0
//	  ▲ scrub     │       └──────► Reading ─────┴────┼── commit─►
//	Dirty ────────┘                   │ free         │          │
//	  ▲                               │              │          │
//	  └───────────────────────────────┴──────────────┴──────────┘
//
//	Granted, Filling, Reading, Sealed ── quarantine ──► Quarantined ── clear ──► Dirty
//
// Clean means that the page was wiped since its last owner gave it back, or
// never had one. Granted pages belong to a lease
// but are out of its reach: they are being scrubbed. Commit seals the pages of
// a landing but the one that holds its last position; that one is adopted,
// because decoding writes on there. A page that a sequence has filled is
// sealed when the pass that filled it closes.
//
// # Holds
//
// Each page counts its open readers and writers: tables, views, receives,
// digests and scrubs. Releasing a handle takes effect at once for everybody who
// holds it, and frees those of its pages that nobody has open. The others are
// quarantined with the reason and become free (dirty) when the last hold
// closes. So aborting while a kernel, a socket or a scrub is still at work is
// safe, at any time, any number of times.
//
// # Generations and scrubbing
//
// One counter per pool numbers the grants; all pages of a grant carry its
// number. A PageRef is a page and the generation it was granted under, and
// every use compares both, so a reference that outlives its grant is ErrStale.
// At a grant a dirty page is scrubbed if its last owner is another one (or
// always, by policy). Pool.Scrub wipes free pages ahead of that, within a bound
// on the memory bandwidth that it takes; what it wiped, and pages that nobody
// ever used, need no scrub. Each page keeps the proof of its last scrub:
// generation, time and method.
//
// # What is remembered
//
// The prefill leg may keep the full pages of a prompt that the other leg has
// verified (Sealed.Remember), for later prompts of the same owner, model and
// adapter that begin with the same token ids (Pool.Recall, Credits.FillAfter).
// Such pages are sealed and shared by reference. They are found by the scope and
// the ids themselves, not by a hash. Each owner has a share, within which its
// own oldest pages give way; when credits are short, remembered pages that
// nobody uses give way, those of the owner who asks first.
//
// # Credits
//
// Reserve promises pages without choosing them. The sum of all promises never
// exceeds the free pages, so a Grant against credits cannot fail for lack of
// pages. Whatever ends a lease returns the credits it did not use. A pool may
// have a limit of pages in quarantine, beyond which it promises nothing: who
// keeps pages open for ever costs capacity, never safety.
//
// # Errors and panics
//
// A caller who comes too late, out of turn or asks for too much gets a typed
// error and nothing changes. A transition that the table does not have, or a page
// given back by somebody who does not hold it, means that the pool's own books
// are wrong; then no page can be trusted to belong to whom it says. The call
// panics, and since servers recover panics the pool also stops for good:
// everything after it is ErrCorrupt, nothing is granted, resolved or freed, and
// Stats says so.
package kv
