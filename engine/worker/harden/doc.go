// Package harden keeps the memory of a worker out of reach of other processes
// of the same user: no core dump, no ptrace, no /proc/<pid>/mem.
package harden
