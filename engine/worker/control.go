package worker

import (
	"context"

	"bulkhead.dev/engine/worker/peer"
	workerv1 "bulkhead.dev/services/gen/bulkhead/worker/v1"
)

// control serves ControlService.
type control struct{ w *worker }

// Drain implements workerv1connect.ControlServiceHandler. The worker does not
// take work again.
func (c control) Drain(ctx context.Context, _ *workerv1.DrainRequest) (*workerv1.DrainResponse, error) {
	if _, err := peer.Require(ctx, peer.IsGateway); err != nil {
		return nil, c.w.refused(ctx, "drain", names{}, err, measured{})
	}
	select {
	case <-c.w.startDrain():
		return &workerv1.DrainResponse{}, nil
	case <-ctx.Done():
		return nil, c.w.refused(ctx, "drain", names{}, ctx.Err(), measured{})
	}
}
