package fabric

import (
	"bytes"
	"crypto/rand"
	"crypto/tls"
	"io"
	"net"
	"testing"
	"time"

	"bulkhead.dev/engine/worker/peer"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
)

// watched remembers all the memory that TLS reads into.
type watched struct {
	*records
	into [][]byte
}

func (w *watched) Read(p []byte) (int, error) {
	w.into = append(w.into, p[:cap(p)])
	return w.records.Read(p)
}

// holds counts the windows of 16 bytes of a page in the memory.
func (w *watched) holds(page []byte) (n int) {
	for at := 0; at+16 <= len(page); at += 16 {
		for _, b := range w.into {
			if bytes.Contains(b, page[at:at+16]) {
				n++
				break
			}
		}
	}
	return n
}

// What TLS decrypted is overwritten: all but the last record when the next is
// read, and the last when it was used up.
func TestRecordsAreOverwritten(t *testing.T) {
	t.Parallel()
	a, err := peer.NewAuthority(time.Now)
	assert.NoError(t, err)
	prefill := peer.Worker(peer.Prefill, id.NewEpoch(time.Now()))
	of := func(who peer.Identity) peer.Credentials {
		c, err := a.Issue(who)
		assert.NoError(t, err)
		return c
	}
	server, err := of(prefill).ServerConfig(peer.Anyone)
	assert.NoError(t, err)
	server.DynamicRecordSizingDisabled = true // a write is a record
	client, err := of(peer.Gateway()).ClientConfig(peer.Anyone)
	assert.NoError(t, err)

	// Records that grow make TLS take other memory.
	pages := [][]byte{make([]byte, 100), make([]byte, 3000), make([]byte, 16000), make([]byte, 16000), make([]byte, 600)}
	theirs, ours := net.Pipe()
	sent := make(chan error, 1)
	go func() {
		s := tls.Server(theirs, server)
		var err error
		for _, p := range pages {
			rand.Read(p)
			if err == nil {
				_, err = s.Write(p)
			}
		}
		sent <- err
	}()
	w := &watched{records: newRecords(ours)}
	c := tls.Client(w, client)
	for i, p := range pages {
		got := make([]byte, len(p))
		_, err := io.ReadFull(c, got)
		assert.NoError(t, err)
		assert.True(t, bytes.Equal(got, p))
		clear(got)
		assert.True(t, w.holds(p) > len(p)/16-2) // so it would be found
		for _, before := range pages[:i] {
			assert.Equal(t, w.holds(before), 0)
		}
	}
	w.wipe()
	for _, p := range pages {
		assert.Equal(t, w.holds(p), 0)
	}
	assert.NoError(t, <-sent)
	assert.NoError(t, ours.Close())
	assert.NoError(t, theirs.Close())
}
