package sim

import (
	"encoding/binary"
	"testing"

	"bulkhead.dev/engine/kv"
	"bulkhead.dev/infra/assert"
)

// Positions are where the geometry says.
func TestSlots(t *testing.T) {
	t.Parallel()
	for _, dtype := range []kv.DType{kv.F16, kv.F32} {
		g := Geometry(dtype)
		page := make([]byte, g.PageBytes())
		const k, v = 0x4444_3333_2222_1111, 0x8888_7777_6666_5555
		for tok := range kv.PageTokens {
			clear(page)
			s := slot{page, dtype == kv.F32, tok}
			s.write(k, v)
			for d := range numbers {
				for at, want := range map[int]uint16{g.KIndex(0, 0, d, tok): uint16(0x1111 * (d + 1)), g.VIndex(0, 0, tok, d): uint16(0x1111 * (d + 5))} {
					assert.Equal(t, binary.LittleEndian.Uint16(page[at*dtype.Bytes():]), want)
				}
			}
			gotK, gotV := s.read()
			assert.Equal(t, gotK, k)
			assert.Equal(t, gotV, v)
		}
	}
}
