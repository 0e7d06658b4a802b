/* The C side of package mem: NH sums, copies and fills at the speed of memory. The function is defined in doc.go, and
 * reference.go computes the same bits. Nothing here allocates or keeps state. */
#ifndef BK_MEM_H
#define BK_MEM_H
#include <stddef.h>
#include <stdint.h>

enum { BK_MEM_GO, BK_MEM_AVX2, BK_MEM_AVX512 };          /* levels; GO: this CPU has no kernel here */
enum { BK_STRIPE = 4096, BK_LANES = 4 };                 /* as in mem.go */

int bk_mem_level(void);                                  /* best level of this CPU */
/* Adds n bytes (a multiple of 64) to sums. The first of them is byte `at` of a stripe, whose sums come first. Stores to
 * dst what it adds, unless dst is NULL; reads each byte of src once. */
void bk_mem_nh(int level, const uint32_t *key, void *dst, const void *src, size_t n, size_t at, uint64_t *sums);
void bk_mem_copy(int level, void *dst, const void *src, size_t n);
void bk_mem_fill(int level, void *dst, int byte, size_t n);
#endif
