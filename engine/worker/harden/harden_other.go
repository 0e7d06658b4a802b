//go:build !linux

package harden

// Apply does nothing on this system.
func Apply() error { return nil }
