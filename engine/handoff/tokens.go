package handoff

import (
	"crypto/sha256"
	"encoding/binary"
)

const tokenLabel = "bulkhead token ids 1\x00"

// TokenDigest identifies a prompt by its exact token ids: SHA-256 over a label,
// the count and the ids, little endian. The edge, prefill and decode compare it
// without sending the ids around.
func TokenDigest(ids []int32) [32]byte {
	b := make([]byte, 0, len(tokenLabel)+8+4*len(ids))
	b = append(b, tokenLabel...)
	b = binary.LittleEndian.AppendUint64(b, uint64(len(ids)))
	for _, id := range ids {
		b = binary.LittleEndian.AppendUint32(b, uint32(id))
	}
	return sha256.Sum256(b)
}
