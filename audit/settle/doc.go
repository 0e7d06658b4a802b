// Package settle makes what happened durable: for every request one usage row
// and one receipt, in one transaction, before the last byte of the answer
// leaves.
//
// # One writer
//
// A [Settler] has one writer goroutine per replica. It gathers facts for at
// most [Options.Linger] and writes up to [Options.MaxBatch] requests at once:
// one statement per table, one round trip, one commit with
// synchronous_commit=on. Every statement is idempotent by request id, so a
// batch whose commit got no answer is simply written again.
//
// # Intents
//
// When a request is admitted its intent is queued with [Settler.Intend] and
// committed with the next batch, at most [Options.IntendWithin] later. Nothing of an
// answer waits for it: the last byte waits for the receipt, which takes its place. If the process dies, [Settler.Recover]
// in another process turns each intent without a receipt into a receipt with
// the outcome "lost" and a usage of nothing. A process and its workers killed together lose at most
// the unflushed intents.
//
// # States of facts
//
//	queued ──> in flight ──> committed            Settle returns nil
//	  │            │  └────> rejected             the row itself is at fault: Settle returns evidence_rejected
//	  │            └───────> queued               the database did not answer
//	  └─ hold ended ───────> queued and withheld  Settle returns evidence_unavailable; written later, marked withheld
//
// Facts never change from withheld back. While facts are in flight the hold
// does not end, because a commit may be under way; an attempt is cut off when the
// hold of its first fact ends. What is left is the case that the server committed and
// the answer was lost and the hold ended: the receipt then says "completed" although the
// end of the answer was withheld. The settler sees it when it writes again,
// counts it ([Counts.LateAcks]) and logs it.
//
// # Bounds
//
// Facts wait in memory, never on disk. [Settler.Ready] refuses new admissions
// when the queue is full or its oldest fact has waited longer than a hold, so
// an outage stops admission before memory runs out. Facts of requests that were
// admitted are always taken.
package settle
