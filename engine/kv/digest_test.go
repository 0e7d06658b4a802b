package kv

import (
	"bytes"
	"io"
	"testing"

	"bulkhead.dev/infra/assert"
)

var algs = map[string]DigestAlg{"gmac": GMAC, "nh": NH}

// A sum stands for the bytes, the place in the sequence, the generation and the
// key: a change of any of them is another sum.
func TestSumBinds(t *testing.T) {
	t.Parallel()
	sums := map[Sum]string{}
	for name, alg := range algs {
		key := DigestKey{Alg: alg, Secret: [32]byte{1}}
		page := bytes.Repeat([]byte{7}, 4096)
		d, err := newDigester(key)
		assert.NoError(t, err)
		want := d.sum(3, 9, page)
		assert.Equal(t, sums[want], "")
		sums[want] = name
		assert.Equal(t, d.sum(3, 9, page), want)

		assert.True(t, d.sum(4, 9, page) != want)
		assert.True(t, d.sum(3, 10, page) != want)
		for _, at := range []int{0, 15, 16, 2048, 4095} {
			page[at] ^= 1
			assert.True(t, d.sum(3, 9, page) != want)
			page[at] ^= 1
		}
		assert.True(t, d.sum(3, 9, page[:4032]) != want)
		key.Secret[31] = 1
		other, err := newDigester(key)
		assert.NoError(t, err)
		assert.True(t, other.sum(3, 9, page) != want)

		// However a page comes, it is stored whole and has the same sum.
		dst := make([]byte, len(page))
		assert.Equal(t, d.copySum(dst, page, 3, 9), want)
		assert.Equal(t, dst, page)
		clear(dst)
		got, err := d.readSum(dst, bytes.NewReader(page), 3, 9)
		assert.NoError(t, err)
		assert.Equal(t, got, want)
		assert.Equal(t, dst, page)
		_, err = d.readSum(dst, bytes.NewReader(page[1:]), 3, 9)
		assert.ErrorIs(t, err, io.ErrUnexpectedEOF)
	}
	_, err := newDigester(DigestKey{Alg: 3})
	assert.ErrorIs(t, err, ErrDigest)
}

func BenchmarkSum(b *testing.B) {
	for name, alg := range algs {
		b.Run(name, func(b *testing.B) {
			d, err := newDigester(DigestKey{Alg: alg})
			if err != nil {
				b.Fatal(err)
			}
			// SmolLM2-135M in f16: 368,640 bytes a page; 64 MiB so that caches do not help.
			const page = 368640
			pages := make([]byte, page*180)
			b.SetBytes(int64(len(pages)))
			for b.Loop() {
				for i := range 180 {
					d.sum(i, 1, pages[i*page:(i+1)*page])
				}
			}
		})
	}
}
