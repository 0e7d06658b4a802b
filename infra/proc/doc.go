// Package proc starts the child processes of `bulkhead up` and makes sure that
// none of them outlives it.
//
// # What a child gets
//
// An explicit environment (nothing of the parent's leaks in), an empty standard
// input, the standard error of the parent, and, as file descriptor 3, the read
// end of a pipe with its boot document. Secrets travel in that document and
// never in argv or the environment, where any process of the user can read
// them.
//
// # How a child dies
//
// On Linux the kernel sends SIGKILL to the child when the thread that created
// it ends, so also when the parent is killed with SIGKILL. That signal belongs
// to a thread, not to the process: all children are created by one goroutine
// that is locked to its thread for as long as the process lives (see spawner).
// A child that was created after its parent had died would miss the signal;
// it finds out by comparing its parent with the one that the boot document
// names (see [AdoptBoot]).
//
// [Child.Done] closes when the child was reaped. That is proof of its death: no
// code of it runs any more and none of its memory is reachable. A missed
// heartbeat never is.
package proc
