//go:build unix && !linux

package compute

func adviseHuge([]byte) {}
