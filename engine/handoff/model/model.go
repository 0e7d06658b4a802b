// Package model holds the Promela model of the hand-off (handoff.pml), which
// spin searches exhaustively: every interleaving of two requests of two owners
// with aborts, lost and repeated offers, late reads and the death of prefill.
// What it claims and what it leaves out stands at the top of the model.
//
// The test runs spin and a C compiler, and then breaks the model in the ways
// that the code guards against, to show that the claims can fail.
package model
