//go:build cgo && amd64

package mem

// #cgo CFLAGS: -O3 -std=c11 -Wall -Wno-unknown-pragmas
// #cgo noescape bk_mem_nh
// #cgo nocallback bk_mem_nh
// #cgo noescape bk_mem_copy
// #cgo nocallback bk_mem_copy
// #cgo noescape bk_mem_fill
// #cgo nocallback bk_mem_fill
// #include "kernels.h"
import "C"

import "unsafe"

// cLevels returns the levels of the C kernels that run here, slowest first.
func cLevels() []level {
	all := []level{cLevel("avx2", C.BK_MEM_AVX2), cLevel("avx512", C.BK_MEM_AVX512)}
	return all[:int(C.bk_mem_level())]
}

func cLevel(name string, n C.int) level {
	return level{
		name: name,
		nh: func(key *nhKey, dst, src []byte, at int, sums []uint64) {
			C.bk_mem_nh(n, (*C.uint32_t)(&key[0]), pointer(dst), pointer(src), C.size_t(len(src)), C.size_t(at), (*C.uint64_t)(unsafe.SliceData(sums)))
		},
		copy: func(dst, src []byte) { C.bk_mem_copy(n, pointer(dst), pointer(src), C.size_t(len(src))) },
		fill: func(dst []byte, b byte) { C.bk_mem_fill(n, pointer(dst), C.int(b), C.size_t(len(dst))) },
	}
}

func pointer(b []byte) unsafe.Pointer { return unsafe.Pointer(unsafe.SliceData(b)) }
