//go:build faulty

package worker

import (
	"context"
	"io"

	"bulkhead.dev/engine/compute"
	"bulkhead.dev/engine/fabric"
	"bulkhead.dev/engine/sched"
	"bulkhead.dev/infra/id"
	"bulkhead.dev/internal/faulty/failpoint"
)

func step(name string) error { return failpoint.Hit(name) }

type failingModel struct {
	sched.Forwarder
	role string
}

func steppedModel(m sched.Forwarder, role string) sched.Forwarder { return failingModel{m, role} }

func (m failingModel) Forward(spans []compute.Span) error {
	if err := step(m.role + ".pass"); err != nil {
		return err
	}
	return m.Forwarder.Forward(spans)
}

type failingReader struct{ fabric.Reader }

func steppedReader(r fabric.Reader) fabric.Reader { return failingReader{r} }

func (r failingReader) ReadPages(ctx context.Context, transfer id.Transfer, secret fabric.Secret, refs []fabric.PageRef, into fabric.Sink) error {
	return r.Reader.ReadPages(ctx, transfer, secret, refs, failingSink{into})
}

// failingSink has a step in the middle of each page: it was stored, but the
// reader does not know yet.
type failingSink struct{ fabric.Sink }

func (s failingSink) Copy(i int, page []byte) error {
	if err := s.Sink.Copy(i, page); err != nil {
		return err
	}
	return step("decode.reading")
}

func (s failingSink) Read(i int, stream io.Reader) error {
	if err := s.Sink.Read(i, stream); err != nil {
		return err
	}
	return step("decode.reading")
}
