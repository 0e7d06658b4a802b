//go:build cgo && amd64

/* Quantised matrix products at every level. The rule is in doc.go; each level keeps it to the bit. */
#define _GNU_SOURCE
#include "kernels.h"
#include "vec.h"
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* ---- levels ------------------------------------------------------------------------- */
int bk_cpu_level(void) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return BK_REF;
    if (!__builtin_cpu_supports("avx512vnni") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq")) return BK_AVX2;
    unsigned a, b, c, d; __asm__("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "0"(7), "2"(0));
    if (!(d >> 24 & 1) || !(d >> 25 & 1)) return BK_VNNI;            /* AMX-TILE, AMX-INT8 */
    return syscall(SYS_arch_prctl, 0x1023, 18) ? BK_VNNI : BK_AMX;   /* ARCH_REQ_XCOMP_PERM */
}

/* ---- layout (written by pack.go) ----------------------------------------------------
 * A tile is 16 output columns; tiles lie one after another, each sequential in K.
 * BK_Q4, per 32-block, 320 B = 5 lines: 4 x 64 B of nibbles, then d[16], m[16] in fp16.
 *   Row r's 16 nibble bytes are 4 dwords; dword g goes to line g, lane r. Low nibbles
 *   are then K = 4g..4g+3 and high ones 16+4g..: both are ready VNNI operands.
 * BK_Q8, per pair of blocks, 1088 B = 17 lines: 2 x 8 x 64 B of (q ^ 0x80), 2 x d[16]. */
enum { B4 = 320, B8 = 1088 };
INL const uint8_t *q4_tile(const wmat *w, int t) { return (uint8_t *)w->data + (size_t)t * (w->k / 32) * B4; }
INL const uint8_t *q8_tile(const wmat *w, int t) { return (uint8_t *)w->data + (size_t)t * ((w->k / 32 + 1) / 2) * B8; }
INL const uint8_t *q8_q(const uint8_t *p, int b) { return p + b / 2 * B8 + b % 2 * 512; }
INL const uint8_t *q8_d(const uint8_t *p, int b) { return p + b / 2 * B8 + 1024 + b % 2 * 32; }

/* ---- activations: s = amax/127, q = rne(x * (127/amax)) -------------------------------
 * A block with a number that is not finite gets a scale of NaN: int8 cannot carry NaN, and it must not get lost. */
INL void poisoned(const acts *a, int8_t *q, size_t o) { memset(q, 0, 32); a->s[o] = a->ss[o] = NAN; a->c[o] = 0; }
static void quant_ref(const float *x, const acts *a, int row) {
    int8_t *q = a->q + (size_t)row * a->k;
    for (size_t o = row; o < (size_t)a->ms * (a->k / 32); o += a->ms, x += 32, q += 32) {
        float am = 0; int sum = 0, finite = 1;
        for (int i = 0; i < 32; i++) { finite &= fabsf(x[i]) <= FLT_MAX; am = fmaxf(am, fabsf(x[i])); }
        if (!finite) { poisoned(a, q, o); continue; }
        float inv = am > 0 ? 127.0f / am : 0;
        for (int i = 0; i < 32; i++) sum += q[i] = (int8_t)lrintf(x[i] * inv);
        a->s[o] = am / 127.0f; a->ss[o] = a->s[o] * (float)sum; a->c[o] = -128 * sum;
    }
}
T2 static void quant_avx2(const float *x, const acts *a, int row) {
    int8_t *q = a->q + (size_t)row * a->k;
    const __m256 abs = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    for (size_t o = row; o < (size_t)a->ms * (a->k / 32); o += a->ms, x += 32, q += 32) {
        __m256 v0 = _mm256_loadu_ps(x), v1 = _mm256_loadu_ps(x + 8), v2 = _mm256_loadu_ps(x + 16), v3 = _mm256_loadu_ps(x + 24);
        __m256 x8 = _mm256_max_ps(_mm256_max_ps(_mm256_and_ps(v0, abs), _mm256_and_ps(v1, abs)),
                                 _mm256_max_ps(_mm256_and_ps(v2, abs), _mm256_and_ps(v3, abs)));
        const __m256 big = _mm256_set1_ps(FLT_MAX);   /* NLE is true for NaN too */
        __m256 bad = _mm256_or_ps(_mm256_or_ps(_mm256_cmp_ps(_mm256_and_ps(v0, abs), big, _CMP_NLE_UQ), _mm256_cmp_ps(_mm256_and_ps(v1, abs), big, _CMP_NLE_UQ)),
                                  _mm256_or_ps(_mm256_cmp_ps(_mm256_and_ps(v2, abs), big, _CMP_NLE_UQ), _mm256_cmp_ps(_mm256_and_ps(v3, abs), big, _CMP_NLE_UQ)));
        if (_mm256_movemask_ps(bad)) { poisoned(a, q, o); continue; }
        __m128 h = _mm_max_ps(_mm256_castps256_ps128(x8), _mm256_extractf128_ps(x8, 1));
        h = _mm_max_ps(h, _mm_movehl_ps(h, h)); h = _mm_max_ss(h, _mm_movehdup_ps(h));
        float am = _mm_cvtss_f32(h);
        __m256 inv = _mm256_set1_ps(am > 0 ? 127.0f / am : 0);
        __m256i i0 = _mm256_cvtps_epi32(_mm256_mul_ps(v0, inv)), i1 = _mm256_cvtps_epi32(_mm256_mul_ps(v1, inv));
        __m256i i2 = _mm256_cvtps_epi32(_mm256_mul_ps(v2, inv)), i3 = _mm256_cvtps_epi32(_mm256_mul_ps(v3, inv));
        __m256i t = _mm256_add_epi32(_mm256_add_epi32(i0, i1), _mm256_add_epi32(i2, i3));
        __m128i u = _mm_add_epi32(_mm256_castsi256_si128(t), _mm256_extracti128_si256(t, 1));
        u = _mm_add_epi32(u, _mm_shuffle_epi32(u, 0x4e)); u = _mm_add_epi32(u, _mm_shuffle_epi32(u, 0xb1));
        int sum = _mm_cvtsi128_si32(u);
        __m256i p = _mm256_packs_epi16(_mm256_packs_epi32(i0, i1), _mm256_packs_epi32(i2, i3));
        p = _mm256_permutevar8x32_epi32(p, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        _mm256_storeu_si256((void *)q, p);
        a->s[o] = am / 127.0f; a->ss[o] = a->s[o] * (float)sum; a->c[o] = -128 * sum;
    }
}
void bk_quant_row(int level, const float *x, const acts *a, int row) {
    (level == BK_REF ? quant_ref : quant_avx2)(x, a, row);
}

/* ---- scalar reference ---------------------------------------------------------------- */
static void mm_ref(const wmat *w, const acts *a, float *y, int ldy, int t0, int t1) {
    int nb = w->k / 32;
    for (int n = t0 * 16; n < t1 * 16; n++)
        for (int m = 0; m < a->m; m++) {
            float acc = 0; int r = n % 16;
            for (int b = 0; b < nb; b++) {
                const int8_t *q = a->q + (size_t)m * a->k + b * 32;
                float s = a->s[(size_t)b * a->ms + m];
                int32_t I = 0;
                if (w->type == BK_Q4) {
                    const uint8_t *p = q4_tile(w, n / 16) + b * B4;
                    for (int i = 0; i < 32; i++) I += (p[i % 16 / 4 * 64 + r * 4 + i % 4] >> i / 16 * 4 & 15) * q[i];
                    acc = fmaf((float)I, bk_half(p + 256 + r * 2) * s, acc);
                    acc = fmaf(bk_half(p + 288 + r * 2), a->ss[(size_t)b * a->ms + m], acc);
                } else {
                    const uint8_t *p = q8_q(q8_tile(w, n / 16), b);
                    for (int i = 0; i < 32; i++) I += (int8_t)(p[i / 4 * 64 + r * 4 + i % 4] ^ 0x80) * q[i];
                    acc = fmaf((float)I, bk_half(q8_d(q8_tile(w, n / 16), b) + r * 2) * s, acc);
                }
            }
            y[(size_t)m * ldy + n] = acc;
        }
}

/* ---- AVX2 ------------------------------------------------------------------------------
 * BK_Q4: maddubs pairs are <= 2*15*127 = 3810, so all 8 fit an int16 lane (30480) and one
 * madd per block widens them. BK_Q8: |w| * sign(a, w) pairs are <= 2*128*127 = 32512: fits. */
#define ACT(r, b) (a->q + (size_t)(m + (r)) * a->k + (b) * 32)
#define BC(r, b) ((size_t)(b) * a->ms + m + (r))
INL int ld32(const void *p) { int v; memcpy(&v, p, 4); return v; }

T2 INL void avx2_q4(int MT, const uint8_t *p, int h, const acts *a, int m, float *y, int ldy, int nb) {
    const __m256i lo = _mm256_set1_epi8(15), one = _mm256_set1_epi16(1);
    __m256 acc[4];
    UNROLL for (int r = 0; r < MT; r++) acc[r] = _mm256_setzero_ps();
    for (int b = 0; b < nb; b++, p += B4) {
        __m256i w[8];
        UNROLL for (int g = 0; g < 4; g++) {
            __m256i x = _mm256_load_si256((const void *)(p + g * 64 + h * 32));
            w[g] = _mm256_and_si256(x, lo); w[g + 4] = _mm256_and_si256(_mm256_srli_epi16(x, 4), lo);
        }
        __m256 d = _mm256_cvtph_ps(_mm_load_si128((const void *)(p + 256 + h * 16)));
        __m256 mi = _mm256_cvtph_ps(_mm_load_si128((const void *)(p + 288 + h * 16)));
        UNROLL for (int r = 0; r < MT; r++) {
            const int8_t *q = ACT(r, b);
            __m256i i = _mm256_maddubs_epi16(w[0], _mm256_set1_epi32(ld32(q)));
            UNROLL for (int g = 1; g < 8; g++)
                i = _mm256_add_epi16(i, _mm256_maddubs_epi16(w[g], _mm256_set1_epi32(ld32(q + g * 4))));
            __m256 f = _mm256_cvtepi32_ps(_mm256_madd_epi16(i, one));
            acc[r] = _mm256_fmadd_ps(f, _mm256_mul_ps(d, _mm256_set1_ps(a->s[BC(r, b)])), acc[r]);
            acc[r] = _mm256_fmadd_ps(mi, _mm256_set1_ps(a->ss[BC(r, b)]), acc[r]);
        }
    }
    UNROLL for (int r = 0; r < MT; r++) _mm256_storeu_ps(y + (size_t)(m + r) * ldy + h * 8, acc[r]);
}
T2 INL void avx2_q8(int MT, const uint8_t *p, int h, const acts *a, int m, float *y, int ldy, int nb) {
    const __m256i off = _mm256_set1_epi8(-128), one = _mm256_set1_epi16(1);
    __m256 acc[4];
    UNROLL for (int r = 0; r < MT; r++) acc[r] = _mm256_setzero_ps();
    for (int b = 0; b < nb; b++) {
        __m256i i[4];
        UNROLL for (int r = 0; r < MT; r++) i[r] = _mm256_setzero_si256();
        UNROLL for (int g = 0; g < 8; g++) {
            __m256i x = _mm256_xor_si256(_mm256_load_si256((const void *)(q8_q(p, b) + g * 64 + h * 32)), off);
            __m256i ax = _mm256_abs_epi8(x);
            UNROLL for (int r = 0; r < MT; r++) {
                __m256i v = _mm256_sign_epi8(_mm256_set1_epi32(ld32(ACT(r, b) + g * 4)), x);
                i[r] = _mm256_add_epi32(i[r], _mm256_madd_epi16(_mm256_maddubs_epi16(ax, v), one));
            }
        }
        __m256 d = _mm256_cvtph_ps(_mm_load_si128((const void *)(q8_d(p, b) + h * 16)));
        UNROLL for (int r = 0; r < MT; r++)
            acc[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(i[r]), _mm256_mul_ps(d, _mm256_set1_ps(a->s[BC(r, b)])), acc[r]);
    }
    UNROLL for (int r = 0; r < MT; r++) _mm256_storeu_ps(y + (size_t)(m + r) * ldy + h * 8, acc[r]);
}
T2 static void mm_avx2(const wmat *w, const acts *a, float *y, int ldy, int t0, int t1) {
    int nb = w->k / 32;
    for (int t = t0; t < t1; t++)
        for (int m = 0, step; m < a->m; m += step) {
            step = a->m - m >= 4 ? 4 : 1;
            for (int h = 0; h < 2; h++) {
                const uint8_t *p = w->type == BK_Q4 ? q4_tile(w, t) : q8_tile(w, t);
                if (w->type == BK_Q4) { if (step == 4) avx2_q4(4, p, h, a, m, y + t * 16, ldy, nb); else avx2_q4(1, p, h, a, m, y + t * 16, ldy, nb); }
                else                 { if (step == 4) avx2_q8(4, p, h, a, m, y + t * 16, ldy, nb); else avx2_q8(1, p, h, a, m, y + t * 16, ldy, nb); }
            }
        }
}

/* ---- AVX-512 VNNI: 16 columns per register, up to 8 rows per pass over a tile ---------- */
enum { PF = 2048 };   /* prefetch distance, bytes: reaches into the next tile; past the end it is harmless */
T5 INL void load_q4(const uint8_t *p, __m512i w[8]) {
    const __m512i lo = _mm512_set1_epi8(15);
    UNROLL for (int g = 0; g < 4; g++) {
        __m512i x = _mm512_load_si512(p + g * 64);
        w[g] = _mm512_and_si512(x, lo); w[g + 4] = _mm512_and_si512(_mm512_srli_epi16(x, 4), lo);
    }
}
T5 INL __m512 ph16(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256(p)); }

T5 INL void vnni_tile(int MT, int type, const uint8_t *p, const acts *a, int m, float *y, int ldy, int nb) {
    __m512 acc[8];
    UNROLL for (int r = 0; r < MT; r++) acc[r] = _mm512_setzero_ps();
    for (int b = 0; b < nb; b++) {
        __m512i w[8]; __m512 d, mi = _mm512_setzero_ps();
        const uint8_t *q = type == BK_Q4 ? p + (size_t)b * B4 : q8_q(p, b);
        if (type == BK_Q4) { load_q4(q, w); d = ph16(q + 256); mi = ph16(q + 288); }
        else { UNROLL for (int g = 0; g < 8; g++) w[g] = _mm512_load_si512(q + g * 64); d = ph16(q8_d(p, b)); }
        if (MT == 1) for (int g = 0; g < (type == BK_Q4 ? 5 : 8); g++) __builtin_prefetch(q + PF + g * 64);
        UNROLL for (int r = 0; r < MT; r++) {
            const int8_t *x = ACT(r, b);
            __m512i i = type == BK_Q4 ? _mm512_setzero_si512() : _mm512_set1_epi32(a->c[BC(r, b)]);
            UNROLL for (int g = 0; g < 8; g++) i = _mm512_dpbusd_epi32(i, w[g], _mm512_set1_epi32(ld32(x + g * 4)));
            acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(i), _mm512_mul_ps(d, _mm512_set1_ps(a->s[BC(r, b)])), acc[r]);
            if (type == BK_Q4) acc[r] = _mm512_fmadd_ps(mi, _mm512_set1_ps(a->ss[BC(r, b)]), acc[r]);
        }
    }
    UNROLL for (int r = 0; r < MT; r++) _mm512_storeu_ps(y + (size_t)(m + r) * ldy, acc[r]);
}
T5 static void mm_vnni(const wmat *w, const acts *a, float *y, int ldy, int t0, int t1, int m0) {
    int nb = w->k / 32, ty = w->type;
    for (int t = t0; t < t1; t++)
        for (int m = m0, step; m < a->m; m += step) {
            const uint8_t *p = ty == BK_Q4 ? q4_tile(w, t) : q8_tile(w, t);
            int left = a->m - m;
            step = left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
#define RUN(MT) if (ty == BK_Q4) vnni_tile(MT, BK_Q4, p, a, m, y + t * 16, ldy, nb); \
                else vnni_tile(MT, BK_Q8, p, a, m, y + t * 16, ldy, nb)
            switch (step) { case 8: RUN(8); break; case 4: RUN(4); break; case 2: RUN(2); break; default: RUN(1); }
        }
}

/* ---- AMX int8 ---------------------------------------------------------------------------
 * One 16 x 16 int32 tile per 32-block: A is 16 rows x 32 B of activations, B the 8 VNNI
 * lines of the block. C goes through a small buffer to the same float steps as above.
 * Block b+2 is multiplied and block b+1 stored before block b is scaled, so that the tile
 * and the vector unit have independent work. tmm0-1 C, tmm4-5 A, tmm6-7 B. */
#define FENCE() __asm__ volatile("" ::: "memory")   /* gcc 12: _tile_loadd clobbers nothing */
enum { KMAX = 4096 };
TX static void amx_thread_init(void) {
    struct { uint8_t palette, start, z[14]; uint16_t colsb[16]; uint8_t rows[16]; } c = { .palette = 1 };
    for (int i = 0; i < 8; i++) { c.colsb[i] = i == 4 || i == 5 ? 32 : 64; c.rows[i] = i >= 6 ? 8 : 16; }
    FENCE(); _tile_loadconfig(&c);
}
TX static void amx_thread_done(void) { _tile_release(); }

#define MUL(C, A, B, b) do { _tile_zero(C); _tile_loadd(A, q + (b) * 32, k); \
    _tile_loadd(B, bq + (size_t)(b) * 512, 64); \
    if (type == BK_Q4) _tile_dpbsud(C, A, B); else _tile_dpbssd(C, A, B); } while (0)
TX INL void amx_scale(int type, __m512 acc[16], const int32_t *c, const float *dm, const float *s, const float *ss) {
    __m512 d = _mm512_load_ps(dm), mi = _mm512_load_ps(dm + 16);
    UNROLL for (int r = 0; r < 16; r++) {
        acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_load_si512(c + r * 16)), _mm512_mul_ps(d, _mm512_set1_ps(s[r])), acc[r]);
        if (type == BK_Q4) acc[r] = _mm512_fmadd_ps(mi, _mm512_set1_ps(ss[r]), acc[r]);
    }
}
TX INL void amx_rows(int type, const uint8_t *bq, const float *dm, const acts *a, int m, float *y, int ldy, int nb) {
    int32_t c[2][256] __attribute__((aligned(64)));
    const int8_t *q = ACT(0, 0);
    const float *s = a->s + m, *ss = a->ss + m;
    size_t k = (size_t)a->k, ms = (size_t)a->ms;
    __m512 acc[16];
    UNROLL for (int r = 0; r < 16; r++) acc[r] = _mm512_setzero_ps();
    MUL(0, 4, 6, 0); _tile_stored(0, c[0], 64);
    if (nb > 1) MUL(1, 5, 7, 1);
    for (int b = 0; b < nb; b += 2, s += 2 * ms, ss += 2 * ms, dm += 64) {
        if (b + 2 < nb) MUL(0, 4, 6, b + 2);
        if (b + 1 < nb) _tile_stored(1, c[1], 64);
        FENCE(); amx_scale(type, acc, c[0], dm, s, ss); FENCE();
        if (b + 3 < nb) MUL(1, 5, 7, b + 3);
        if (b + 2 < nb) _tile_stored(0, c[0], 64);
        FENCE(); if (b + 1 < nb) amx_scale(type, acc, c[1], dm + 32, s + ms, ss + ms); FENCE();
    }
    UNROLL for (int r = 0; r < 16; r++) _mm512_storeu_ps(y + (size_t)(m + r) * ldy, acc[r]);
}
TX static void mm_amx(const wmat *w, const acts *a, float *y, int ldy, int t0, int t1) {
    static __thread uint8_t bq[KMAX * 16] __attribute__((aligned(64)));
    static __thread float dm[KMAX] __attribute__((aligned(64)));
    int nb = w->k / 32, m16 = a->m & ~15;
    amx_thread_init();                                    /* per call: a goroutine may change threads between two */
    for (int t = t0; t < t1 && m16; t++) {
        for (int b = 0; b < nb; b++) {                    /* unpack one tile, once for all rows */
            __m512i g[8];
            if (w->type == BK_Q4) {
                const uint8_t *p = q4_tile(w, t) + b * B4;
                load_q4(p, g);
                _mm512_store_ps(dm + b * 32, ph16(p + 256)); _mm512_store_ps(dm + b * 32 + 16, ph16(p + 288));
            } else {
                for (int i = 0; i < 8; i++) g[i] = _mm512_xor_si512(_mm512_load_si512(q8_q(q8_tile(w, t), b) + i * 64), _mm512_set1_epi8(-128));
                _mm512_store_ps(dm + b * 32, ph16(q8_d(q8_tile(w, t), b)));
            }
            for (int i = 0; i < 8; i++) _mm512_store_si512(bq + b * 512 + i * 64, g[i]);
        }
        FENCE();
        for (int m = 0; m < m16; m += 16)
            if (w->type == BK_Q4) amx_rows(BK_Q4, bq, dm, a, m, y + t * 16, ldy, nb);
            else                 amx_rows(BK_Q8, bq, dm, a, m, y + t * 16, ldy, nb);
    }
    amx_thread_done();
    if (m16 < a->m) mm_vnni(w, a, y, ldy, t0, t1, m16);   /* same bits, so any split is allowed */
}

void bk_matmul(int level, const wmat *w, const acts *a, float *y, int ldy, int t0, int t1) {
    if (level == BK_AMX && a->m >= 16 && w->k <= KMAX) mm_amx(w, a, y, ldy, t0, t1);
    else if (level >= BK_VNNI) mm_vnni(w, a, y, ldy, t0, t1, 0);
    else if (level == BK_AVX2) mm_avx2(w, a, y, ldy, t0, t1);
    else mm_ref(w, a, y, ldy, t0, t1);
}

