package fabric

import (
	"bytes"
	"io"
	"math/rand/v2"
	"net"
	"testing"
	"testing/iotest"

	"bulkhead.dev/engine/mem"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/infra/id"
)

// However it is used, a window gives the bytes of the stream in order, Next in
// whole lines.
func TestWindow(t *testing.T) {
	t.Parallel()
	rng := rand.New(rand.NewPCG(1, 2))
	want := make([]byte, 1<<20)
	for i := range want {
		want[i] = byte(rng.Uint32())
	}
	for name, from := range map[string]io.Reader{
		"whole":       bytes.NewReader(want),
		"halves":      iotest.HalfReader(bytes.NewReader(want)),
		"bytes":       iotest.OneByteReader(bytes.NewReader(want)),
		"data and io": iotest.DataErrReader(bytes.NewReader(want)),
	} {
		v := newWindow(from, 1000)
		var got []byte
		for len(want)-len(got) >= mem.Line {
			if rng.IntN(2) == 0 {
				b := make([]byte, rng.IntN(300))
				n, err := io.ReadFull(v, b[:min(len(b), len(want)-len(got))])
				assert.NoError(t, err)
				got = append(got, b[:n]...)
				continue
			}
			n := (1 + rng.IntN(20)) * mem.Line
			b, err := v.Next(n)
			assert.NoError(t, err)
			if len(b) == 0 || len(b) > n || len(b)%mem.Line != 0 || cap(b) != len(b) {
				t.Fatalf("%s: %d bytes for %d", name, len(b), n)
			}
			got = append(got, b...)
		}
		rest, err := io.ReadAll(v)
		assert.NoError(t, err)
		if !bytes.Equal(append(got, rest...), want) {
			t.Errorf("%s: other bytes than those of the stream", name)
		}
		_, err = v.Next(mem.Line)
		assert.ErrorIs(t, err, io.EOF)
		assert.True(t, v.failed)
	}
	_, err := newWindow(iotest.ErrReader(nil), 0).Next(mem.Line)
	assert.ErrorIs(t, err, io.ErrNoProgress)
}

// keeper is a sink that keeps what it must not keep.
type keeper struct {
	memory
	kept [][]byte
}

func (k *keeper) Read(i int, stream io.Reader) error {
	b, err := stream.(mem.Source).Next(testPage)
	k.kept = append(k.kept, b)
	copy(k.memory[i], b)
	return err
}

// Nothing of a page stays in what a read used, and a server that says more than
// it was asked is not asked again.
func TestWindowIsWiped(t *testing.T) {
	t.Parallel()
	refs := []PageRef{{Index: 4, Generation: 9}, {Index: 5, Generation: 9}}
	page := bytes.Repeat([]byte{7}, testPage)
	for _, extra := range []int{0, 1} {
		c := server(t, func(c net.Conn) {
			if _, err := readReadRequest(c); err != nil {
				return
			}
			out := answerHeader{pageBytes: testPage, count: 2}.append(nil)
			for _, r := range refs {
				out = append(pageHeader{ref: r}.append(out), page...)
			}
			_, _ = c.Write(append(out, make([]byte, extra)...))
			_, _ = io.Copy(io.Discard, c)
		})
		k := &keeper{memory: memory{make([]byte, testPage), make([]byte, testPage)}}
		assert.NoError(t, c.ReadPages(t.Context(), id.Transfer{}, Secret{}, refs, k))
		assert.Equal(t, [][]byte(k.memory), [][]byte{page, page})
		assert.Equal(t, k.kept, [][]byte{make([]byte, testPage), make([]byte, testPage)})
		assert.Equal(t, len(c.idle), 1-extra)
	}
}
