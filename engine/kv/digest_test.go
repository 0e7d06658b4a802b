package kv

import (
	"bytes"
	"testing"

	"bulkhead.dev/infra/assert"
)

// A sum stands for the bytes, the place in the sequence, the generation and the
// key: a change of any of them is another sum.
func TestSumBinds(t *testing.T) {
	t.Parallel()
	key := DigestKey{Alg: GMAC, Secret: [32]byte{1}}
	page := bytes.Repeat([]byte{7}, 4096)
	d, err := newDigester(key)
	assert.NoError(t, err)
	want := d.sum(3, 9, page)
	assert.Equal(t, d.sum(3, 9, page), want)

	assert.True(t, d.sum(4, 9, page) != want)
	assert.True(t, d.sum(3, 10, page) != want)
	for _, at := range []int{0, 15, 16, 2048, 4095} {
		page[at] ^= 1
		assert.True(t, d.sum(3, 9, page) != want)
		page[at] ^= 1
	}
	assert.True(t, d.sum(3, 9, page[:4080]) != want)
	key.Secret[31] = 1
	other, err := newDigester(key)
	assert.NoError(t, err)
	assert.True(t, other.sum(3, 9, page) != want)

	_, err = newDigester(DigestKey{Alg: 2})
	assert.ErrorIs(t, err, ErrDigest)
}

func BenchmarkSum(b *testing.B) {
	d, err := newDigester(DigestKey{Alg: GMAC})
	if err != nil {
		b.Fatal(err)
	}
	// SmolLM2-135M in f16: 368,640 bytes a page; 64 MiB so that caches do not help.
	const page = 368640
	mem := make([]byte, page*180)
	b.SetBytes(int64(len(mem)))
	for b.Loop() {
		for i := range 180 {
			d.sum(i, 1, mem[i*page:(i+1)*page])
		}
	}
}
