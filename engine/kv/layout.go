package kv

// tail calls f with every run of bytes that belongs to the slots of a page from
// position used on, in every layer, and with the padding, until f says no.
func (g Geometry) tail(page []byte, used int, f func(run []byte) bool) bool {
	w := g.DType.Bytes()
	if used < g.PageTokens {
		for l := range g.Layers {
			for h := range g.KVHeads {
				for d := range g.HeadDim {
					at := g.KIndex(l, h, d, used)
					if !f(page[at*w : (at+g.PageTokens-used)*w]) {
						return false
					}
				}
				at := g.VIndex(l, h, used, 0)
				if !f(page[at*w : (at+(g.PageTokens-used)*g.HeadDim)*w]) {
					return false
				}
			}
		}
	}
	return f(page[g.Layers*g.LayerElems()*w:])
}

// zeroTail wipes the slots of a page from position used on.
func (g Geometry) zeroTail(page []byte, used int) {
	g.tail(page, used, func(run []byte) bool { clear(run); return true })
}

// tailClear reports whether all slots of a page from used on are zero.
func (g Geometry) tailClear(page []byte, used int) bool {
	return g.tail(page, used, func(run []byte) bool { return uniform(run, 0) })
}

// appendToken appends the keys and values of one slot: for each layer the keys
// of all heads, then the values of all heads.
func (g Geometry) appendToken(dst, page []byte, slot int) []byte {
	w := g.DType.Bytes()
	for l := range g.Layers {
		for h := range g.KVHeads {
			for d := range g.HeadDim {
				at := g.KIndex(l, h, d, slot) * w
				dst = append(dst, page[at:at+w]...)
			}
		}
		for h := range g.KVHeads {
			at := g.VIndex(l, h, slot, 0) * w
			dst = append(dst, page[at:at+g.HeadDim*w]...)
		}
	}
	return dst
}

// written reports whether a slot holds anything but the bytes of a wiped one:
// all zero, or all 0xFF. A slot that a model wrote is neither; it takes a few
// comparisons to see, and all of the slot only where it is not written.
func (g Geometry) written(page []byte, slot int) bool {
	w := g.DType.Bytes()
	fill := page[g.VIndex(0, 0, slot, 0)*w]
	if fill != 0 && fill != 0xFF {
		return true
	}
	for l := range g.Layers {
		for h := range g.KVHeads {
			at := g.VIndex(l, h, slot, 0) * w
			if !uniform(page[at:at+g.HeadDim*w], fill) {
				return true
			}
			for d := range g.HeadDim {
				at := g.KIndex(l, h, d, slot) * w
				if !uniform(page[at:at+w], fill) {
					return true
				}
			}
		}
	}
	return false
}

// coverage counts the positions from the start of the pages that are written,
// up to the first that is not.
func (g Geometry) coverage(pages int, page func(i int) []byte) int {
	for i := range pages {
		b := page(i)
		for slot := range g.PageTokens {
			if !g.written(b, slot) {
				return i*g.PageTokens + slot
			}
		}
	}
	return pages * g.PageTokens
}

func uniform(b []byte, v byte) bool {
	for _, x := range b {
		if x != v {
			return false
		}
	}
	return true
}
