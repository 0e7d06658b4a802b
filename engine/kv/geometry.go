package kv

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
)

// DType is the number format of keys and values in a page.
type DType uint8

// The formats. F32 is for golden tests; F16 for everything else.
const (
	F32 DType = 1
	F16 DType = 2
)

// Bytes returns the size of one number, 0 for an unknown format.
func (d DType) Bytes() int {
	switch d {
	case F32:
		return 4
	case F16:
		return 2
	}
	return 0
}

func (d DType) String() string {
	switch d {
	case F32:
		return "f32"
	case F16:
		return "f16"
	}
	return fmt.Sprintf("dtype(%d)", uint8(d))
}

const (
	// PageTokens is the number of token positions in a page.
	PageTokens = 16
	// Layout1 is the order of numbers inside a page that this version writes:
	// for each layer keys as [kv head][dim][token], so that one instruction
	// loads one dim of sixteen tokens, then values as [kv head][token][dim].
	Layout1 = 1
	// pageAlign keeps every page on a cache line, and digests and copies free
	// of tails.
	pageAlign = 64
)

// Limits of a geometry: far above any model, low enough that no product of
// them overflows.
const (
	maxLayers  = 1 << 10
	maxKVHeads = 1 << 10
	maxHeadDim = 1 << 10
)

// ErrGeometry means that a geometry cannot be served.
var ErrGeometry = errors.New("bad KV geometry")

// Geometry describes a page: what two legs must agree on, to the bit, before
// one may read the pages of the other. Compare fingerprints, not fields.
type Geometry struct {
	Layers     int
	KVHeads    int
	HeadDim    int
	PageTokens int
	DType      DType
	Layout     uint16
}

// Validate checks every field against what this build can serve.
func (g Geometry) Validate() error {
	switch {
	case g.Layers < 1 || g.Layers > maxLayers:
		return fmt.Errorf("%w: %d layers", ErrGeometry, g.Layers)
	case g.KVHeads < 1 || g.KVHeads > maxKVHeads:
		return fmt.Errorf("%w: %d KV heads", ErrGeometry, g.KVHeads)
	case g.HeadDim < 1 || g.HeadDim > maxHeadDim:
		return fmt.Errorf("%w: head dimension %d", ErrGeometry, g.HeadDim)
	case g.PageTokens != PageTokens:
		return fmt.Errorf("%w: %d tokens a page, want %d", ErrGeometry, g.PageTokens, PageTokens)
	case g.DType.Bytes() == 0:
		return fmt.Errorf("%w: %v", ErrGeometry, g.DType)
	case g.Layout != Layout1:
		return fmt.Errorf("%w: layout %d", ErrGeometry, g.Layout)
	}
	return nil
}

// LayerElems returns the numbers in one layer of a page: keys, then values.
func (g Geometry) LayerElems() int { return 2 * g.KVHeads * g.HeadDim * g.PageTokens }

// TokenBytes returns the bytes that one token position takes in all layers.
func (g Geometry) TokenBytes() int { return g.Layers * 2 * g.KVHeads * g.HeadDim * g.DType.Bytes() }

// PageBytes returns the size of a page, a multiple of 64.
func (g Geometry) PageBytes() int {
	n := g.Layers * g.LayerElems() * g.DType.Bytes()
	return (n + pageAlign - 1) / pageAlign * pageAlign
}

// PagesFor returns the number of pages that hold the given token positions.
func (g Geometry) PagesFor(tokens int) int { return (tokens + g.PageTokens - 1) / g.PageTokens }

// KIndex returns the place of a key inside a page, counted in numbers.
// tok counts from the first position of the page.
func (g Geometry) KIndex(layer, head, dim, tok int) int {
	return layer*g.LayerElems() + (head*g.HeadDim+dim)*g.PageTokens + tok
}

// VIndex returns the place of a value inside a page, counted in numbers.
func (g Geometry) VIndex(layer, head, tok, dim int) int {
	return layer*g.LayerElems() + g.LayerElems()/2 + (head*g.PageTokens+tok)*g.HeadDim + dim
}

// Fingerprint identifies the geometry. Two workers with equal fingerprints
// agree on every byte of a page.
func (g Geometry) Fingerprint() [32]byte {
	b := []byte("bulkhead kv geometry 1\x00")
	for _, v := range []int{g.Layers, g.KVHeads, g.HeadDim, g.PageTokens, int(g.DType), int(g.Layout)} {
		b = binary.LittleEndian.AppendUint32(b, uint32(v))
	}
	return sha256.Sum256(b)
}
