//go:build race

package sim

// raced tells that the race detector is at work.
const raced = true
