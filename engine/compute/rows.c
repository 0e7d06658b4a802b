//go:build cgo && amd64

/* The kernels of rows.inc at three levels, and the choice between them. AMX has no part in them. */
#define _GNU_SOURCE
#include "kernels.h"
#include "vec.h"

enum { BK_QT = 8 };                                      /* queries that share one conversion of a page */

size_t bk_attn_tmp(const bk_shape *s) {
    size_t hdp = (s->hd + 15) & ~15, rows = (size_t)BK_QT * (s->heads / s->kv_heads);
    return s->hd * 16 + 16 * hdp + rows * (hdp + 16 + 2);
}

#define V v16
#define O(x) r_##x
#define TGT
#define FN(x) x##_ref
#include "rows.inc"

#define V y16
#define O(x) y_##x
#define TGT T2
#define FN(x) x##_avx2
#include "rows.inc"

#define V __m512
#define O(x) z_##x
#define TGT T5
#define FN(x) x##_512
#include "rows.inc"

#define PICK(f) (level >= BK_VNNI ? f##_512 : level == BK_AVX2 ? f##_avx2 : f##_ref)
void bk_attn(int level, const bk_shape *s, int kv_head, int pos, int nq, const uint64_t *pages, const float *q, float *out, int ld, float *tmp) {
    PICK(attn)(s, kv_head, pos, nq, pages, q, out, ld, tmp);
}
void bk_rmsnorm(int level, const float *x, const float *w, int n, float eps, float *y) { PICK(rmsnorm)(x, w, n, eps, y); }
void bk_silu_mul(int level, const float *g, const float *u, int n, float *y) { PICK(silu_mul)(g, u, n, y); }
void bk_rope(int level, float *x, int heads, int hd, int rope, const float *cs, float scale) { PICK(rope)(x, heads, hd, rope, cs, scale); }
void bk_store_kv(int level, const bk_shape *s, uint64_t page, int tok, const float *k, const float *v) { PICK(store_kv)(s, page, tok, k, v); }
void bk_add(int level, float *x, const float *y, int n) { PICK(add)(x, y, n); }
void bk_matmul_float(int level, const bk_mat *w, int m, const float *x, int ldx, float *y, int ldy, int t0, int t1) {
    PICK(matmul_float)(w, m, x, ldx, y, ldy, t0, t1);
}
