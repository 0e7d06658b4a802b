package receipt

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"hash"
)

// Labels keep the two digests of one answer, and other uses of the key, apart.
const (
	labelIDs  = "bulkhead response ids v1\x00"
	labelText = "bulkhead response text v1\x00"
)

// Hasher makes the keyed digests of an answer while it is emitted. It is not
// safe for concurrent use.
type Hasher struct {
	keyID     string
	ids, text hash.Hash
}

// NewHasher starts the digests under a key of the tenant
// (tenancy.KeyFile.DigestKey).
//
// Both are HMAC-SHA-256. The first covers a label and each emitted token id as
// four little-endian bytes, the second another label and the UTF-8 text as it was
// sent to the client, all pieces joined.
func NewHasher(keyID string, key [32]byte) *Hasher {
	h := &Hasher{keyID: keyID, ids: hmac.New(sha256.New, key[:]), text: hmac.New(sha256.New, key[:])}
	h.ids.Write([]byte(labelIDs))
	h.text.Write([]byte(labelText))
	return h
}

// IDs adds token ids that were computed for the answer.
func (h *Hasher) IDs(ids []uint32) {
	var b [4]byte
	for _, v := range ids {
		binary.LittleEndian.PutUint32(b[:], v)
		h.ids.Write(b[:])
	}
}

// Text adds text that was sent to the client.
func (h *Hasher) Text(s string) { h.text.Write([]byte(s)) }

// Response returns the digests of everything added so far.
func (h *Hasher) Response() *Response {
	return &Response{KeyID: h.keyID, IDs: Digest(h.ids.Sum(nil)), Text: Digest(h.text.Sum(nil))}
}
