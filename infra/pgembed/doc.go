// Package pgembed runs a private PostgreSQL server for `bulkhead up` and for
// tests.
//
// # What the server is
//
// A direct child of this process that listens on one unix socket, in a folder
// that only its own user can enter, with SCRAM-SHA-256 and a random superuser
// password that the caller keeps. It never runs as root: root drops to the user
// postgres or nobody, which therefore must be able to reach the data
// directory. It gets an explicit environment of three variables.
//
// # What it logs
//
// Starts, stops, checkpoints, crashes. Never statements, parameters, or the messages of
// errors, which quote values: log_min_messages is "log", the level above
// "error", and verbosity is terse, so DETAIL, CONTEXT and STATEMENT lines do not exist.
//
// # How it ends
//
// [Server.Close] asks for a fast shutdown. If this process dies first, by
// SIGKILL too, the Linux kernel sends the server the same signal. That signal is tied to the
// *thread* that started the server, so one goroutine locks itself to a thread,
// starts the server there and waits on that thread until it has ended.
// [Server.Done] tells that it has ended, asked or not.
//
// # First start
//
// initdb works in "data.new", which becomes "data" when it is complete: an
// interrupted first start leaves nothing that looks like a database.
package pgembed
