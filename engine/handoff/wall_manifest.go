//go:build !faulty

package handoff

import "context"

// prove takes a manifest and either ends in proof or in a refusal.
func (in *Inbound) prove(ctx context.Context, manifest []byte) (*Committed, *Refusal) {
	return in.verify(ctx, manifest)
}
