// Package quota decides what tenants may use, exactly, on any number of
// replicas, and in the common case without asking the database.
//
// # Limits
//
// A [Limit] bounds one meter of a tenant, a project or a key, of one model or of
// all: requests, concurrent requests, weighted tokens, or money at list prices. Every
// limit that applies to a request must have room for all that the request could use
// (its prompt and its longest answer); otherwise nothing is taken from any and the
// caller gets a [Refusal]. When the request ends, what it did not use goes back.
//
// Requests and tokens per minute are token buckets: full after a minute without
// use, and what is taken flows back at limit/60 a second. Limits of a day or a month
// are windows in UTC; a charge belongs to the window in which it was reserved.
// Concurrent requests have no time.
//
// # Slices
//
// All of it is kept in Postgres: one row for each limit (what is taken) and one row for
// each replica that has taken something of it (its slice). A replica reserves out of
// its slices under one lock, without asking anybody. The one statement that moves
// anything is quota_exchange (see the migration): the replica says what it keeps, and takes more.
//
//	limit = free + Σ slices + used         used: drains by the minute, or is empty
//	slice = available + reserved + spent   spent: windows only; minutes report it as used
//
// so that what all replicas together can still reserve never exceeds what is left of the
// limit. How much a replica takes beyond what it needs now is what it used in the last
// second, and at most an eighth of what is free after that: near the limit, slices shrink to
// exact reservations. A slice that is not used goes back within [idleAfter], and at once
// when another replica finds the limit empty and recalls it (NOTIFY).
//
// # Invariants
//
//  1. At no instant do reservations exceed the limit, whatever replicas do or die.
//  2. A refusal means that the limit had no room when all idle slices had been recalled, at
//     most a tenth of a second before.
//  3. What a settled request spent is in its slice in the transaction that writes its
//     usage; so a replica may die at any moment and what it had reserved is known.
//  4. What a dead replica held is back after its lease and the recovery ([Recoverer]): at
//     most 15 seconds. Only a rate may be lower for as long as the slice takes to
//     flow back.
//  5. Asking again is harmless: all numbers in an exchange are absolute.
//
// Reservations by the minute count as spent, and begin to flow back, at the next exchange.
// What flows back to a bucket after a request ended is reduced by what has drained since,
// because the drain would otherwise be counted twice.
//
// # Outage
//
// While the database does not answer, a replica goes on with the slices that it has, for as
// long as its lease lasts (10 s); what does not fit into them cannot be known and is
// refused with 503 quota_check_unavailable, never with 429.
package quota
