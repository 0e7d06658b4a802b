package handoff

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"bulkhead.dev/engine/fabric"
	"bulkhead.dev/engine/kv"
	"bulkhead.dev/infra/id"
)

// Versions of the hand-off. A gateway picks one that both legs speak; see
// Common.
const (
	// Whole pulls all pages when the prompt is complete.
	Whole uint16 = 1
	// Early lets finished pages be pulled while the rest is computed, and digests
	// them as they are moved.
	Early uint16 = 2
)

// Versions returns the versions that this build speaks up to the given one,
// the best first; 0 is no limit.
func Versions(limit uint16) []uint16 {
	if limit == 0 || limit > Early {
		limit = Early
	}
	var out []uint16
	for v := limit; v >= Whole; v-- {
		out = append(out, v)
	}
	return out
}

// Common returns the best version in both lists, 0 if there is none.
func Common(a, b []uint16) (best uint16) {
	for _, v := range a {
		if v > best && slices.Contains(b, v) {
			best = v
		}
	}
	return best
}

// algOf is how pages are digested in a version of the hand-off.
func algOf(version uint16) kv.DigestAlg {
	if version < Early {
		return kv.GMAC
	}
	return kv.NH
}

// Manifest is what the prefill leg offers. It has one encoding: little endian,
// fixed fields first, then the extents, then one digest for each page, in order
// of position. Page i of n covers positions [16i, min(16i+16, Tokens)); it is
// derived, so that no second, different statement of it exists.
//
// A preview is a manifest of the first pages only, all of them full and without
// their digests; it says what can be pulled already.
type Manifest struct {
	Version      uint16
	Preview      bool
	Request      id.Request
	Transfer     id.Transfer
	Nonce        id.Nonce
	Owner        id.Owner
	Lease        id.Lease // of the prefill leg
	PrefillEpoch id.Epoch
	DecodeEpoch  id.Epoch
	Model        [32]byte // SHA-256 of the model file
	Geometry     [32]byte // kv.Geometry.Fingerprint
	TokenDigest  [32]byte
	// Tokens is the number of positions that the forward passes wrote.
	Tokens uint32
	Alg    kv.DigestAlg
	// Seed makes the digest key, together with the ids above.
	Seed [32]byte
	// Secret opens the pages at the page server.
	Secret  fabric.Secret
	Extents []kv.Extent
	Sums    []kv.Sum
}

const (
	manifestMagic = "BHKM"
	previewMagic  = "BHKP"
	fixedBytes    = 4 + 2 + 2 + 7*16 + 3*32 + 4 + 32 + 32 + 4 + 4
	extentBytes   = 4 + 4 + 8 + 4

	// maxTokens is above any context window (2M positions).
	maxTokens = 1 << 21
	maxSums   = maxTokens / kv.PageTokens
	// MaxManifestBytes is the size of the longest manifest that can be valid:
	// every page an extent of its own.
	MaxManifestBytes = fixedBytes + maxSums*(extentBytes+kv.SumBytes)
)

// ErrManifest means that bytes are not the canonical encoding of a manifest.
var ErrManifest = errors.New("malformed manifest")

// Encode returns the encoding. It does not check the fields: only what
// DecodeManifest accepts is a manifest.
func (m *Manifest) Encode() []byte {
	b := make([]byte, 0, fixedBytes+len(m.Extents)*extentBytes+len(m.Sums)*kv.SumBytes)
	le := binary.LittleEndian
	if m.Preview {
		b = append(b, previewMagic...)
	} else {
		b = append(b, manifestMagic...)
	}
	b = le.AppendUint16(b, m.Version)
	b = le.AppendUint16(b, uint16(m.Alg))
	b = append(b, m.Request[:]...)
	b = append(b, m.Transfer[:]...)
	b = append(b, m.Nonce[:]...)
	b = append(b, m.Owner[:]...)
	b = append(b, m.Lease[:]...)
	b = append(b, m.PrefillEpoch[:]...)
	b = append(b, m.DecodeEpoch[:]...)
	b = append(b, m.Model[:]...)
	b = append(b, m.Geometry[:]...)
	b = append(b, m.TokenDigest[:]...)
	b = le.AppendUint32(b, m.Tokens)
	b = append(b, m.Seed[:]...)
	b = append(b, m.Secret[:]...)
	b = le.AppendUint32(b, uint32(len(m.Extents)))
	b = le.AppendUint32(b, uint32(len(m.Sums)))
	for _, e := range m.Extents {
		b = le.AppendUint32(b, e.First)
		b = le.AppendUint32(b, e.Count)
		b = le.AppendUint64(b, e.Generation)
		b = le.AppendUint32(b, e.Scrubbed)
	}
	for _, s := range m.Sums {
		b = append(b, s[:]...)
	}
	return b
}

// Root identifies a manifest: SHA-256 of its encoding. Both legs report it, and
// the gateway compares.
func Root(encoding []byte) [32]byte { return sha256.Sum256(encoding) }

// DecodeManifest reads an encoding strictly: whole, of a version that this build
// speaks, no byte more, and only the one encoding that Encode makes. Extents
// hold pages, do not overlap, are joined where they could be, and hold exactly
// the pages that the positions need; so do the digests, or there are none in a
// preview. Every error is an ErrManifest.
func DecodeManifest(b []byte) (*Manifest, error) {
	if len(b) < fixedBytes || len(b) > MaxManifestBytes {
		return nil, fmt.Errorf("%w: %d bytes", ErrManifest, len(b))
	}
	c := cursor{b}
	magic := string(c.next(4))
	if magic != manifestMagic && magic != previewMagic {
		return nil, fmt.Errorf("%w: not a manifest", ErrManifest)
	}
	m := &Manifest{Preview: magic == previewMagic, Version: c.u16(), Alg: kv.DigestAlg(c.u16())}
	if m.Version < Whole || m.Version > Early || m.Preview && m.Version < Early {
		return nil, fmt.Errorf("%w: version %d", ErrManifest, m.Version)
	}
	for _, dst := range [][]byte{
		m.Request[:], m.Transfer[:], m.Nonce[:], m.Owner[:], m.Lease[:], m.PrefillEpoch[:], m.DecodeEpoch[:],
		m.Model[:], m.Geometry[:], m.TokenDigest[:],
	} {
		copy(dst, c.next(len(dst)))
	}
	m.Tokens = c.u32()
	copy(m.Seed[:], c.next(len(m.Seed)))
	copy(m.Secret[:], c.next(len(m.Secret)))
	extents, sums := int64(c.u32()), int64(c.u32())
	if m.Alg != algOf(m.Version) {
		return nil, fmt.Errorf("%w: digest algorithm %d", ErrManifest, m.Alg)
	}
	if m.Tokens < 1 || m.Tokens > maxTokens {
		return nil, fmt.Errorf("%w: %d positions", ErrManifest, m.Tokens)
	}
	pages := int64(pagesFor(m.Tokens))
	want := pages
	if m.Preview {
		want = 0
		if m.Tokens%kv.PageTokens != 0 {
			return nil, fmt.Errorf("%w: a preview of %d positions, which do not fill their pages", ErrManifest, m.Tokens)
		}
	}
	if sums != want || extents < 1 || extents > pages {
		return nil, fmt.Errorf("%w: %d extents and %d digests for %d pages", ErrManifest, extents, sums, pages)
	}
	if want := extents*extentBytes + sums*kv.SumBytes; int64(len(c.b)) != want {
		return nil, fmt.Errorf("%w: %d bytes in place of %d after the header", ErrManifest, len(c.b), want)
	}
	m.Extents = make([]kv.Extent, extents)
	for i := range m.Extents {
		m.Extents[i] = kv.Extent{First: c.u32(), Count: c.u32(), Generation: c.u64(), Scrubbed: c.u32()}
	}
	m.Sums = make([]kv.Sum, sums)
	for i := range m.Sums {
		m.Sums[i] = kv.Sum(c.next(kv.SumBytes))
	}
	if err := checkExtents(m.Extents, int(pages)); err != nil {
		return nil, err
	}
	return m, nil
}

func pagesFor(tokens uint32) uint32 { return (tokens + kv.PageTokens - 1) / kv.PageTokens }

// checkExtents checks that extents hold exactly so many different pages, in
// canonical form.
func checkExtents(extents []kv.Extent, pages int) error {
	seen := make(map[uint32]struct{}, pages)
	for i, e := range extents {
		switch {
		case e.Count < 1 || int64(e.Count) > int64(pages) || uint64(e.First)+uint64(e.Count) > 1<<32:
			return fmt.Errorf("%w: extent %d has %d pages from %d", ErrManifest, i, e.Count, e.First)
		case e.Generation < 1:
			return fmt.Errorf("%w: extent %d has no generation", ErrManifest, i)
		case e.Scrubbed > e.Count:
			return fmt.Errorf("%w: extent %d scrubbed more than it has", ErrManifest, i)
		}
		if i > 0 {
			if p := extents[i-1]; p.Generation == e.Generation && p.First+p.Count == e.First {
				return fmt.Errorf("%w: extents %d and %d are one", ErrManifest, i-1, i)
			}
		}
		for k := range e.Count {
			if _, ok := seen[e.First+k]; ok || len(seen) == pages {
				return fmt.Errorf("%w: extents do not hold %d different pages", ErrManifest, pages)
			}
			seen[e.First+k] = struct{}{}
		}
	}
	if len(seen) != pages {
		return fmt.Errorf("%w: extents hold %d pages in place of %d", ErrManifest, len(seen), pages)
	}
	return nil
}

// refs lists the pages in order of position.
func (m *Manifest) refs() []kv.PageRef {
	refs := make([]kv.PageRef, 0, pagesFor(m.Tokens))
	for _, e := range m.Extents {
		for k := range e.Count {
			refs = append(refs, kv.PageRef{Index: e.First + k, Generation: e.Generation})
		}
	}
	return refs
}

const keyLabel = "bulkhead page digest 1\x00"

// key derives the digest key: fresh for each offer by the seed, and bound to
// the transfer, so that no sum of one transfer can stand in another.
func (m *Manifest) key() kv.DigestKey {
	h := hmac.New(sha256.New, m.Seed[:])
	h.Write([]byte(keyLabel))
	h.Write(m.Transfer[:])
	h.Write(m.Nonce[:])
	h.Write(m.PrefillEpoch[:])
	h.Write(m.DecodeEpoch[:])
	return kv.DigestKey{Alg: m.Alg, Secret: [32]byte(h.Sum(nil))}
}

// claim is what a commit has to prove.
func (m *Manifest) claim() kv.Claim {
	c := kv.Claim{Tokens: int(m.Tokens), Key: m.key(), Pages: make([]kv.PageClaim, len(m.Sums))}
	for i, r := range m.refs() {
		c.Pages[i] = kv.PageClaim{From: r, Sum: m.Sums[i]}
	}
	return c
}

// cursor reads fields of bytes whose length was checked before.
type cursor struct{ b []byte }

func (c *cursor) next(n int) []byte {
	out := c.b[:n]
	c.b = c.b[n:]
	return out
}

func (c *cursor) u16() uint16 { return binary.LittleEndian.Uint16(c.next(2)) }
func (c *cursor) u32() uint32 { return binary.LittleEndian.Uint32(c.next(4)) }
func (c *cursor) u64() uint64 { return binary.LittleEndian.Uint64(c.next(8)) }
