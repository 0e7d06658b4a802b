//go:build !cgo || !amd64

package compute

func cLevels() []string { return nil }

func newC(*weights, string, Options) (backend, error) { return nil, ErrOptions }
