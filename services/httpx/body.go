package httpx

import (
	"errors"
	"io"
	"net/http"
	"time"
)

// DefaultBodyTimeout is how long a client may take to send the body of a
// request: a body of the largest size over a slow line, not a trickle that
// keeps a connection for ever.
const DefaultBodyTimeout = 30 * time.Second

// timedBody gives the whole body one deadline, from the arrival of the headers
// on, so that what a handler leaves unread is bounded too. It is lifted at the
// end of the body, because the connection is then read for another purpose: to
// notice that the client left.
type timedBody struct {
	io.ReadCloser
	rc *http.ResponseController
}

// timed wraps the body of a request.
func timed(w http.ResponseWriter, r *http.Request, within time.Duration) io.ReadCloser {
	if r.Body == nil || r.Body == http.NoBody {
		return r.Body
	}
	b := &timedBody{ReadCloser: r.Body, rc: http.NewResponseController(w)}
	_ = b.rc.SetReadDeadline(time.Now().Add(within)) // writers of tests have none
	return b
}

// Read implements io.Reader.
func (b *timedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if errors.Is(err, io.EOF) {
		_ = b.rc.SetReadDeadline(time.Time{})
	}
	return n, err
}
