//go:build !cgo || !amd64

package mem

func cLevels() []level { return nil }
