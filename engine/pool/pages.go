package pool

import (
	"context"
	"sync"
	"time"

	workerv1 "bulkhead.dev/services/gen/bulkhead/worker/v1"
)

// mapTimeout bounds the wait for the page map of one worker. One that stands
// still must not hide the others.
const mapTimeout = 2 * time.Second

// PageMap is what a worker says of its pages, or why it said nothing.
type PageMap struct {
	Worker *Worker
	Pages  *workerv1.PagesResponse
	Err    error
}

// PageMaps asks every worker for its live page map, in order of epoch.
func (r *Registry) PageMaps(ctx context.Context) []PageMap {
	workers := r.Workers()
	out := make([]PageMap, len(workers))
	var asked sync.WaitGroup
	for i, s := range workers {
		asked.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, mapTimeout)
			defer cancel()
			pages, err := s.Worker.ControlClient.Pages(ctx, &workerv1.PagesRequest{})
			out[i] = PageMap{s.Worker, pages, err}
		})
	}
	asked.Wait()
	return out
}
