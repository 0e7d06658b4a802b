// Command gateway measures what the platform costs around the model: it starts
// `bulkhead up` with the simulated engine (see engine/sim) on a private PostgreSQL, all of
// it real processes and sockets, and asks it questions.
//
// # Method
//
// A bare upstream, the least that an HTTP server can do for the same requests, is
// measured before Bulkhead in every round, so that a busy machine slows both.
// Figures are medians over the rounds; what is added is the median of the
// differences within rounds. Every window is preceded by a warm-up that is not counted.
//
// Load is closed (so many callers, each asks again when it was answered) or open (so many
// requests a second, whatever the server does, with latencies counted from when a
// request was due). A window with errors is no measurement: the run says so and fails.
//
// CPU time is read from /proc before and after a window: of the gateway process, of
// PostgreSQL with all its processes, and of both workers. What a request costs is that
// divided by the answers within the window.
//
// # Phases
//
// The platform is started anew for each engine that is wanted: one that answers
// at once, for requests and latency; one that takes some milliseconds for a step, because
// only then does a stream of 64 tokens have 64 chunks; and one that takes seconds, for
// streams that are open and idle.
package main
