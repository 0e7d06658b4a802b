package handoff

import (
	"bytes"
	"encoding/hex"
	"testing"

	"bulkhead.dev/engine/kv"
	"bulkhead.dev/infra/assert"
)

func sample() *Manifest {
	return &Manifest{
		Version: Whole,
		Request: [16]byte{1}, Transfer: [16]byte{2}, Nonce: [16]byte{3}, Owner: [16]byte{4}, Lease: [16]byte{5},
		PrefillEpoch: [16]byte{6}, DecodeEpoch: [16]byte{7}, Model: [32]byte{8}, Geometry: [32]byte{9}, TokenDigest: [32]byte{10},
		Tokens: 33, Alg: kv.GMAC, Seed: [32]byte{11}, Secret: [32]byte{12},
		Extents: []kv.Extent{{First: 5, Count: 2, Generation: 7, Scrubbed: 1}, {First: 0, Count: 1, Generation: 8}},
		Sums:    []kv.Sum{{1}, {2}, {3}},
	}
}

func TestManifestRoundTrip(t *testing.T) {
	t.Parallel()
	m := sample()
	b := m.Encode()
	got, err := DecodeManifest(b)
	assert.NoError(t, err)
	assert.Equal(t, got, m)
	assert.Equal(t, got.Encode(), b)
	assert.Equal(t, len(b), fixedBytes+2*extentBytes+3*kv.SumBytes)
	assert.Equal(t, m.refs(), []kv.PageRef{{Index: 5, Generation: 7}, {Index: 6, Generation: 7}, {Index: 0, Generation: 8}})
}

// The encoding is on the wire and in receipts: it changes only with the version.
func TestManifestEncodingIsFixed(t *testing.T) {
	t.Parallel()
	root := Root(sample().Encode())
	assert.Equal(t, hex.EncodeToString(root[:]), goldenRoot)
	digest := TokenDigest([]int32{1, 2, 3})
	assert.Equal(t, hex.EncodeToString(digest[:]), goldenTokens)
}

func TestDecodeManifestRefuses(t *testing.T) {
	t.Parallel()
	for name, f := range map[string]func(m *Manifest){
		"no positions":                func(m *Manifest) { m.Tokens = 0 },
		"too many positions":          func(m *Manifest) { m.Tokens = maxTokens + 1 },
		"a page too many":             func(m *Manifest) { m.Tokens = 32 },
		"a page too few":              func(m *Manifest) { m.Tokens = 49 },
		"no extents":                  func(m *Manifest) { m.Extents = nil },
		"too many extents":            func(m *Manifest) { m.Extents = make([]kv.Extent, 4) },
		"empty extent":                func(m *Manifest) { m.Extents[0].Count = 0 },
		"large extent":                func(m *Manifest) { m.Extents[0].Count = 1 << 31 },
		"extent off the end":          func(m *Manifest) { m.Extents[0].First = 1<<32 - 1 },
		"overlap":                     func(m *Manifest) { m.Extents[1].First = 6 },
		"could be joined":             func(m *Manifest) { m.Extents[1].First, m.Extents[1].Generation = 7, 7 },
		"no generation":               func(m *Manifest) { m.Extents[1].Generation = 0 },
		"scrubbed too many":           func(m *Manifest) { m.Extents[1].Scrubbed = 2 },
		"pages beyond sums":           func(m *Manifest) { m.Extents[1].Count = 2 },
		"pages short of sums":         func(m *Manifest) { m.Extents = m.Extents[:1] },
		"sums short of pages":         func(m *Manifest) { m.Sums = m.Sums[:2] },
		"unknown algorithm":           func(m *Manifest) { m.Alg = 0 },
		"no version":                  func(m *Manifest) { m.Version = 0 },
		"version to come":             func(m *Manifest) { m.Version = Early + 1 },
		"preview in version 1":        func(m *Manifest) { m.Preview, m.Tokens, m.Sums = true, 48, nil },
		"preview with digests":        func(m *Manifest) { m.Preview, m.Version, m.Tokens = true, Early, 48 },
		"preview of a part of a page": func(m *Manifest) { m.Preview, m.Version, m.Sums = true, Early, nil },
	} {
		m := sample()
		f(m)
		_, err := DecodeManifest(m.Encode())
		if err == nil {
			t.Errorf("%s: accepted", name)
			continue
		}
		assert.ErrorIs(t, err, ErrManifest)
	}
	good := sample().Encode()
	for n := range good {
		_, err := DecodeManifest(good[:n])
		assert.ErrorIs(t, err, ErrManifest)
	}
	_, err := DecodeManifest(append(bytes.Clone(good), 0))
	assert.ErrorIs(t, err, ErrManifest)
	_, err = DecodeManifest(make([]byte, MaxManifestBytes+1))
	assert.ErrorIs(t, err, ErrManifest)
	for _, at := range []int{0, 5} { // magic, version
		b := bytes.Clone(good)
		b[at]++
		_, err := DecodeManifest(b)
		assert.ErrorIs(t, err, ErrManifest)
	}
}

// The largest window fits.
func TestLargestManifest(t *testing.T) {
	t.Parallel()
	m := sample()
	m.Tokens = maxTokens
	m.Sums = make([]kv.Sum, maxSums)
	m.Extents = make([]kv.Extent, maxSums)
	for i := range m.Extents {
		m.Extents[i] = kv.Extent{First: uint32(2 * i), Count: 1, Generation: 1}
	}
	b := m.Encode()
	assert.Equal(t, len(b), MaxManifestBytes)
	_, err := DecodeManifest(b)
	assert.NoError(t, err)
}

// Each part that goes into the key changes it.
func TestKeyBinds(t *testing.T) {
	t.Parallel()
	want := sample().key()
	for _, f := range []func(m *Manifest){
		func(m *Manifest) { m.Seed[31]++ }, func(m *Manifest) { m.Transfer[15]++ }, func(m *Manifest) { m.Nonce[15]++ },
		func(m *Manifest) { m.PrefillEpoch[15]++ }, func(m *Manifest) { m.DecodeEpoch[15]++ },
	} {
		m := sample()
		f(m)
		assert.True(t, m.key() != want)
	}
}

func TestTokenDigest(t *testing.T) {
	t.Parallel()
	want := TokenDigest([]int32{1, 2})
	for _, ids := range [][]int32{nil, {1}, {2, 1}, {1, 2, 0}, {1 + 2<<8}, {-1, 2}} {
		assert.True(t, TokenDigest(ids) != want)
	}
}

// Whatever arrives, decoding ends, and there is one encoding for what it gives.
func FuzzDecodeManifest(f *testing.F) {
	f.Add(sample().Encode())
	p := sample()
	p.Version, p.Preview, p.Tokens, p.Sums = Early, true, 48, nil
	f.Add(p.Encode())
	f.Add([]byte("BHKM\x01\x00\x01\x00"))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := DecodeManifest(b)
		if err != nil {
			return
		}
		if !bytes.Equal(m.Encode(), b) {
			t.Fatal("two encodings of one manifest")
		}
		sums := int(pagesFor(m.Tokens))
		if m.Preview {
			sums = 0
		}
		if len(m.refs()) != int(pagesFor(m.Tokens)) || len(m.Sums) != sums {
			t.Fatalf("%d pages, %d sums, %d positions", len(m.refs()), len(m.Sums), m.Tokens)
		}
	})
}
