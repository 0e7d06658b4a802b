/* What all C files of this package share: targets, and vectors of sixteen floats at three levels under one set of names,
 * so that a kernel is written once (rows.inc) and compiled for each. The scalar one is the rule made plain. */
#ifndef BK_VEC_H
#define BK_VEC_H
#pragma STDC FP_CONTRACT OFF   /* clang; gcc is told by -std=c11 */
#include <float.h>
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define T2   __attribute__((target("avx2,fma,f16c")))
#define T5   __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")))
#define TX   __attribute__((target("amx-tile,amx-int8,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")))
#define INL  static inline __attribute__((always_inline, unused))
#define UNROLL _Pragma("GCC unroll 16")

INL float bk_half(const void *p) {                       /* exact fp16 -> fp32 */
    uint16_t h; memcpy(&h, p, 2);
    uint32_t e = h >> 10 & 31, f = h & 1023, u;
    float v = e ? ldexpf((float)(f | 1024), (int)e - 25) : ldexpf((float)f, -24);
    if (e == 31) { u = 0x7f800000u | f << 13; memcpy(&v, &u, 4); }
    return h & 0x8000 ? -v : v;
}
INL uint16_t bk_to_half(float f) {                       /* round to nearest, ties to even */
    uint32_t u; memcpy(&u, &f, 4);
    uint32_t s = u >> 16 & 0x8000, a = u & 0x7fffffff;
    if (a > 0x7f800000) return (uint16_t)(s | 0x7e00 | (a >> 13 & 0x1ff));
    if (a >= 0x477ff000) return (uint16_t)(s | 0x7c00);  /* 65520 and more */
    if (a < 0x38800000) {                                /* subnormal: align to 2^-24 and round */
        if (a < 0x33000000) return (uint16_t)s;
        uint32_t m = (a & 0x7fffff) | 0x800000, sh = 126 - (a >> 23), half = 1u << (sh - 1);
        uint32_t q = m >> sh, r = m & ((1u << sh) - 1);
        return (uint16_t)(s | (q + (r > half || (r == half && (q & 1)))));
    }
    uint32_t r = a & 0x1fff, q = (a - 0x38000000) >> 13;
    return (uint16_t)(s | (q + (r > 0x1000 || (r == 0x1000 && (q & 1)))));
}
INL float bk_bf16(const void *p) { uint16_t h; memcpy(&h, p, 2); uint32_t u = (uint32_t)h << 16; float f; memcpy(&f, &u, 4); return f; }

/* ---- scalar ---- */
typedef struct { float f[16]; } v16;
#define EACH(e) v16 o; for (int i = 0; i < 16; i++) o.f[i] = (e); return o
INL v16 r_set(float x) { EACH(x); }
INL v16 r_load(const float *p) { EACH(p[i]); }
INL v16 r_half(const uint16_t *p) { EACH(bk_half(p + i)); }
INL v16 r_bf16(const uint16_t *p) { EACH(bk_bf16(p + i)); }
INL v16 r_add(v16 a, v16 b) { EACH(a.f[i] + b.f[i]); }
INL v16 r_mul(v16 a, v16 b) { EACH(a.f[i] * b.f[i]); }
INL v16 r_sub(v16 a, v16 b) { EACH(a.f[i] - b.f[i]); }
INL v16 r_div(v16 a, v16 b) { EACH(a.f[i] / b.f[i]); }
INL v16 r_max(v16 a, v16 b) { EACH(a.f[i] > b.f[i] ? a.f[i] : b.f[i]); }      /* as maxps: the second when one is NaN */
INL v16 r_negabs(v16 a) { EACH(-fabsf(a.f[i])); }
INL v16 r_pick(v16 c, v16 a, v16 b) { EACH(c.f[i] >= 0 ? a.f[i] : b.f[i]); }  /* b where c is NaN */
INL v16 r_fma(v16 a, v16 b, v16 c) { EACH(fmaf(a.f[i], b.f[i], c.f[i])); }
INL v16 r_round(v16 a) { EACH(rintf(a.f[i])); }
INL v16 r_scale2(v16 a, v16 n) { EACH(a.f[i] == a.f[i] ? ldexpf(a.f[i], (int)n.f[i]) : a.f[i]); }
INL void r_store(float *p, v16 a) { memcpy(p, a.f, 64); }
INL void r_tohalf(uint16_t *p, v16 a) { for (int i = 0; i < 16; i++) p[i] = bk_to_half(a.f[i]); }
INL float r_sum(v16 a) { for (int h = 8; h; h /= 2) for (int i = 0; i < h; i++) a.f[i] += a.f[i + h]; return a.f[0]; }
INL float r_maxall(v16 a) { for (int i = 1; i < 16; i++) if (a.f[i] > a.f[0]) a.f[0] = a.f[i]; return a.f[0]; }

/* ---- AVX2: two registers ---- */
typedef struct { __m256 l, h; } y16;
#define Y(a, b) ((y16){ (a), (b) })
T2 INL float sum8(__m256 a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x)); return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
T2 INL float max8(__m256 a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x)); return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
T2 INL __m256 pow2m(__m256 a, __m256 n) {   /* a * 2^n through the exponent field; a in (0.5, 2), or NaN, which stays */
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23)));
}
T2 INL __m256 bf8(const uint16_t *p) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p)), 16)); }
T2 INL y16 y_set(float x) { return Y(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
T2 INL y16 y_load(const float *p) { return Y(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
T2 INL y16 y_half(const uint16_t *p) { return Y(_mm256_cvtph_ps(_mm_loadu_si128((const void *)p)), _mm256_cvtph_ps(_mm_loadu_si128((const void *)(p + 8)))); }
T2 INL y16 y_bf16(const uint16_t *p) { return Y(bf8(p), bf8(p + 8)); }
#define OP2(f) T2 INL y16 y_##f(y16 a, y16 b) { return Y(_mm256_##f##_ps(a.l, b.l), _mm256_##f##_ps(a.h, b.h)); }
OP2(add) OP2(mul) OP2(sub) OP2(div) OP2(max)
T2 INL y16 y_negabs(y16 a) { const __m256 s = _mm256_set1_ps(-0.0f); return Y(_mm256_or_ps(a.l, s), _mm256_or_ps(a.h, s)); }
T2 INL y16 y_pick(y16 c, y16 a, y16 b) {
    const __m256 z = _mm256_setzero_ps();
    return Y(_mm256_blendv_ps(b.l, a.l, _mm256_cmp_ps(c.l, z, _CMP_GE_OQ)), _mm256_blendv_ps(b.h, a.h, _mm256_cmp_ps(c.h, z, _CMP_GE_OQ)));
}
T2 INL y16 y_fma(y16 a, y16 b, y16 c) { return Y(_mm256_fmadd_ps(a.l, b.l, c.l), _mm256_fmadd_ps(a.h, b.h, c.h)); }
T2 INL y16 y_round(y16 a) { return Y(_mm256_round_ps(a.l, 8), _mm256_round_ps(a.h, 8)); }
T2 INL y16 y_scale2(y16 a, y16 n) { return Y(pow2m(a.l, n.l), pow2m(a.h, n.h)); }
T2 INL void y_store(float *p, y16 a) { _mm256_storeu_ps(p, a.l); _mm256_storeu_ps(p + 8, a.h); }
T2 INL void y_tohalf(uint16_t *p, y16 a) { _mm_storeu_si128((void *)p, _mm256_cvtps_ph(a.l, 0)); _mm_storeu_si128((void *)(p + 8), _mm256_cvtps_ph(a.h, 0)); }
T2 INL float y_sum(y16 a) { return sum8(_mm256_add_ps(a.l, a.h)); }
T2 INL float y_maxall(y16 a) { return max8(_mm256_max_ps(a.l, a.h)); }

/* ---- AVX-512 ---- */
T5 INL __m512 z_set(float x) { return _mm512_set1_ps(x); }
T5 INL __m512 z_load(const float *p) { return _mm512_loadu_ps(p); }
T5 INL __m512 z_half(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)p)); }
T5 INL __m512 z_bf16(const uint16_t *p) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)), 16)); }
#define OP5(f) T5 INL __m512 z_##f(__m512 a, __m512 b) { return _mm512_##f##_ps(a, b); }
OP5(add) OP5(mul) OP5(sub) OP5(div) OP5(max)
T5 INL __m512 z_negabs(__m512 a) { return _mm512_or_ps(a, _mm512_set1_ps(-0.0f)); }
T5 INL __m512 z_pick(__m512 c, __m512 a, __m512 b) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(c, _mm512_setzero_ps(), _CMP_GE_OQ), b, a); }
T5 INL __m512 z_fma(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
T5 INL __m512 z_round(__m512 a) { return _mm512_roundscale_ps(a, 8); }
T5 INL __m512 z_scale2(__m512 a, __m512 n) { return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_slli_epi32(_mm512_cvtps_epi32(n), 23))); }
T5 INL void z_store(float *p, __m512 a) { _mm512_storeu_ps(p, a); }
T5 INL void z_tohalf(uint16_t *p, __m512 a) { _mm256_storeu_si256((void *)p, _mm512_cvtps_ph(a, 0)); }
T5 INL float z_sum(__m512 a) { return sum8(_mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1))); }
T5 INL float z_maxall(__m512 a) { return max8(_mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1))); }
#endif
