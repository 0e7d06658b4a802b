//go:build cgo && amd64

#define _GNU_SOURCE
#include "kernels.h"
#include <immintrin.h>
#include <string.h>

#define T2     __attribute__((target("avx2")))
#define T5     __attribute__((target("avx512f,avx512bw,avx512vl,avx2")))
#define INL    static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 4")
/* After the one load of a piece of the source, the compiler has to take the register for changed and cannot load again. So
 * what is added is what is stored, whatever another process does to the source meanwhile. */
#define PIN(x) __asm__ volatile("" : "+v"(x))

/* From here on stores go past the caches (measured over 64 MiB of pages: copies with a sum 15 to 40 % faster, fills 50 %).
 * Pages come by the hundred, and who reads them does so later and elsewhere. */
enum { FAR = 4096 };
/* How far ahead of the load a line is fetched: the hardware stops at the end of each 4 KiB (measured: sums 40 % faster).
 * Never beyond the source. */
enum { AHEAD = 4096 };

int bk_mem_level(void) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2")) return BK_MEM_GO;
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") ? BK_MEM_AVX512 : BK_MEM_AVX2;
}

enum store { NONE, NEAR, STREAM };

/* n bytes of one stripe; key points to the word that goes with the first; the source goes on for left bytes. */
#define LANE2(a, p) x = _mm256_add_epi32(m, _mm256_loadu_si256((const void *)(key + 4 * p + j / 4))); \
    a = _mm256_add_epi64(a, _mm256_mul_epu32(x, _mm256_shuffle_epi32(x, 0xf5)))
T2 INL uint64_t sum_2(__m256i a) { uint64_t t[4]; memcpy(t, &a, 32); return t[0] + t[1] + t[2] + t[3]; }
T2 INL void nh_2(enum store st, const uint32_t *key, uint8_t *d, const uint8_t *s, size_t n, size_t left, uint64_t sum[BK_LANES]) {
    __m256i a0 = _mm256_setzero_si256(), a1 = a0, a2 = a0, a3 = a0, x;
    for (size_t i = 0; i < n; i += 64) {
        if (i + AHEAD < left) _mm_prefetch((const void *)(s + i + AHEAD), _MM_HINT_T0);
        UNROLL for (size_t j = i; j < i + 64; j += 32) {
            __m256i m = _mm256_loadu_si256((const void *)(s + j));
            PIN(m);
            if (st == NEAR) _mm256_storeu_si256((void *)(d + j), m);
            if (st == STREAM) _mm256_stream_si256((void *)(d + j), m);
            LANE2(a0, 0); LANE2(a1, 1); LANE2(a2, 2); LANE2(a3, 3);
        }
    }
    sum[0] += sum_2(a0); sum[1] += sum_2(a1); sum[2] += sum_2(a2); sum[3] += sum_2(a3);
}
/* A lane's key begins 16 bytes after that of the lane before it. Three of four such loads would cross a cache line, which on
 * some CPUs makes waiting for memory twice as long: each line of the key is loaded once, and lanes are cut out of two. */
#define LANE5(a, k) x = _mm512_add_epi32(m, k); a = _mm512_add_epi64(a, _mm512_mul_epu32(x, _mm512_srli_epi64(x, 32)))
T5 INL uint64_t sum_5(__m512i a) { return (uint64_t)_mm512_reduce_add_epi64(a); }
T5 INL void nh_5(enum store st, const uint32_t *key, uint8_t *d, const uint8_t *s, size_t n, size_t left, uint64_t sum[BK_LANES]) {
    __m512i a0 = _mm512_setzero_si512(), a1 = a0, a2 = a0, a3 = a0, x, k0 = _mm512_loadu_si512(key);
    for (size_t i = 0; i < n; i += 64) {
        if (i + AHEAD < left) _mm_prefetch((const void *)(s + i + AHEAD), _MM_HINT_T0);
        __m512i m = _mm512_loadu_si512(s + i);
        PIN(m);
        if (st == NEAR) _mm512_storeu_si512(d + i, m);
        if (st == STREAM) _mm512_stream_si512((void *)(d + i), m);
        __m512i k1 = _mm512_loadu_si512(key + i / 4 + 16);
        LANE5(a0, k0);
        LANE5(a1, _mm512_alignr_epi32(k1, k0, 4));
        LANE5(a2, _mm512_alignr_epi32(k1, k0, 8));
        LANE5(a3, _mm512_alignr_epi32(k1, k0, 12));
        k0 = k1;
    }
    sum[0] += sum_5(a0); sum[1] += sum_5(a1); sum[2] += sum_5(a2); sum[3] += sum_5(a3);
}
#define NH(T, f, st) T static void f##_##st(const uint32_t *key, uint8_t *d, const uint8_t *s, size_t n, size_t left, uint64_t *sum) { \
    f(st, key, d, s, n, left, sum); }
NH(T2, nh_2, NONE) NH(T2, nh_2, NEAR) NH(T2, nh_2, STREAM)
NH(T5, nh_5, NONE) NH(T5, nh_5, NEAR) NH(T5, nh_5, STREAM)

/* Stores past the caches need whole lines. */
static int far(const void *dst, size_t n) { return n >= FAR && (uintptr_t)dst % 64 == 0; }

void bk_mem_nh(int level, const uint32_t *key, void *dst, const void *src, size_t n, size_t at, uint64_t *sums) {
    uint8_t *d = dst;
    const uint8_t *s = src;
    enum store st = !d ? NONE : far(d, n) ? STREAM : NEAR;
    while (n > 0) {
        size_t l = BK_STRIPE - at < n ? BK_STRIPE - at : n;
        const uint32_t *k = key + at / 4;
        if (level == BK_MEM_AVX512)
            (st == NONE ? nh_5_NONE : st == NEAR ? nh_5_NEAR : nh_5_STREAM)(k, d, s, l, n, sums);
        else
            (st == NONE ? nh_2_NONE : st == NEAR ? nh_2_NEAR : nh_2_STREAM)(k, d, s, l, n, sums);
        sums += BK_LANES;
        if (d) d += l;
        s += l, n -= l, at = 0;
    }
    if (st == STREAM) _mm_sfence();
}

/* Copies and fills gain nothing from wider registers: they wait for memory. */
T2 static void copy_far(uint8_t *d, const uint8_t *s, size_t n) {
    for (size_t i = 0; i < n; i += 64) {
        if (i + AHEAD < n) _mm_prefetch((const void *)(s + i + AHEAD), _MM_HINT_T0);
        for (size_t j = i; j < i + 64; j += 32) _mm256_stream_si256((void *)(d + j), _mm256_loadu_si256((const void *)(s + j)));
    }
    _mm_sfence();
}
T2 static void fill_far(uint8_t *d, int byte, size_t n) {
    __m256i x = _mm256_set1_epi8((char)byte);
    for (size_t i = 0; i < n; i += 32) _mm256_stream_si256((void *)(d + i), x);
    _mm_sfence();
}
void bk_mem_copy(int level, void *dst, const void *src, size_t n) {
    size_t whole = level >= BK_MEM_AVX2 && far(dst, n) ? n / 64 * 64 : 0;
    if (whole) copy_far(dst, src, whole);
    memcpy((uint8_t *)dst + whole, (const uint8_t *)src + whole, n - whole);
}
void bk_mem_fill(int level, void *dst, int byte, size_t n) {
    size_t whole = level >= BK_MEM_AVX2 && far(dst, n) ? n / 64 * 64 : 0;
    if (whole) fill_far(dst, byte, whole);
    memset((uint8_t *)dst + whole, byte, n - whole);
}
