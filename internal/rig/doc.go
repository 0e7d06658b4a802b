// Package rig runs the platform without a database: the real edge over a TCP
// socket, the real gateway and registry, and workers as real processes. Tests,
// demonstrations and benchmarks use it; it is in no release.
//
// A program that starts a rig must call Main first thing: the workers are that
// same program, started again.
package rig
