//go:build faulty

package handoff

import (
	"context"

	"bulkhead.dev/engine/kv"
	"bulkhead.dev/internal/faulty/walls"
)

func (in *Inbound) prove(ctx context.Context, manifest []byte) (*Committed, *Refusal) {
	if walls.Down(walls.Manifest) {
		return in.believe(ctx, manifest)
	}
	return in.verify(ctx, manifest)
}

// believe does what the decode leg of the incident did: it takes whatever pages
// are offered and goes on with its whole reservation.
func (in *Inbound) believe(ctx context.Context, encoding []byte) (*Committed, *Refusal) {
	m, err := DecodeManifest(encoding)
	if err != nil {
		return nil, refuse(BadManifest, err)
	}
	early := in.landing.Pages()
	if more := in.receiver.conf.Geometry.PagesFor(in.want.Tokens) - early; more > 0 {
		if err := in.landing.Grant(more); err != nil {
			return nil, refuse(grantReason(err), err)
		}
	}
	refs := m.refs()
	in.landing.ReceiveBlindly(len(refs), func(i int, memory []byte) {
		sink := kv.BlindSink{Memory: memory}
		err = in.from.ReadPages(ctx, m.Transfer, m.Secret, refs[i:i+1], sink)
	})
	if err != nil {
		return nil, refuse(readReason(ctx, err), err)
	}
	seq := in.landing.CommitBlindly(in.want.Tokens)
	return &Committed{seq: seq, tokens: int(m.Tokens), root: Root(encoding), extents: seq.Extents()}, nil
}
