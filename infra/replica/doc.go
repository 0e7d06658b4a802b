// Package replica is the membership of the processes that serve one database.
//
// Every front is a replica. It has an epoch, minted when the process starts, and a
// lease in the table replica that it renews every [RenewEvery]. Whatever a
// replica holds in the name of others (slices of limits, intents of requests) is
// safe from them for as long as its lease lasts:
//
//	renewed at t ──> usable until t+FenceAfter       by its own clock, from before it asked
//	             └─> lease_until = t'+LeaseFor       by the clock of the database, from after
//
// FenceAfter is shorter than LeaseFor, so a replica stops using what it holds before
// anybody else can take it: [Member.Fenced] is the question to ask before each
// use. The clocks are only compared with themselves.
//
// A lease that is over is not proof that the process is dead, and need not be: from
// the moment that another replica has set ended_at, no renewal and no exchange
// of the old epoch succeeds ([ErrEnded]). The process that finds this out ends.
//
// # Recovery
//
// One replica at a time claims an ended one and calls [Options.Recover] for it until
// that succeeds. A replica only looks for ended ones after it has itself
// renewed without a pause for LeaseFor: when a database comes back after an
// outage, every living replica has had the time to renew before anybody is declared
// dead. What is held is given back at most LeaseFor + a few renewals after a
// death: 15 seconds.
package replica
