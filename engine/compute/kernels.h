/* The C side of the engine: kernels at several levels, and a whole forward pass over them. The arithmetic is fixed by
 * the rule in doc.go; pages have layout 1 of package kv. Nothing here allocates but bk_new, and nothing is global. */
#ifndef BK_KERNELS_H
#define BK_KERNELS_H
#include <stddef.h>
#include <stdint.h>

enum { BK_REF, BK_AVX2, BK_VNNI, BK_AMX, BK_COUNT };     /* levels */
enum { BK_Q4, BK_Q8, BK_F32, BK_F16, BK_BF16 };          /* weights, in tiles of 16 columns */
enum { BK_PAGE = 16, BK_MAXHD = 256 };                   /* tokens of a page; largest head */

typedef struct { int type, n, k; void *data; } bk_mat;   /* n is padded to a multiple of 16 */
typedef bk_mat wmat;
typedef struct {                                         /* quantised activations */
    int m, k;
    int8_t *q;        /* [m][k], -127..127 */
    int ms;           /* stride of the three below: block b of row r is at [b * ms + r], */
    float *s, *ss;    /*   so that 16 rows' scales are neighbours. Scale; scale * block sum; */
    int32_t *c;       /*   -128 * block sum: takes back the offset of BK_Q8 */
} acts;

int  bk_cpu_level(void);                                 /* best level here; asks the kernel for AMX */
void bk_quant_row(int level, const float *x, const acts *a, int row);
/* Tiles t0..t1-1 (16 columns each) of y[m][ldy] = a * w^T. */
void bk_matmul(int level, const bk_mat *w, const acts *a, float *y, int ldy, int t0, int t1);
/* The same for weights that are not quantised, over x[m][ldx]. */
void bk_matmul_float(int level, const bk_mat *w, int m, const float *x, int ldx, float *y, int ldy, int t0, int t1);

typedef struct { int heads, kv_heads, hd, f16; size_t layer; } bk_shape;   /* layer: numbers before this layer in a page */
/* Attention of the query heads of one kv head, for nq consecutive queries of one sequence from position pos on.
 * pages[i] is the address of the page with positions 16i..16i+15. q is scaled already; rows are ld floats apart.
 * tmp has bk_attn_tmp floats. */
size_t bk_attn_tmp(const bk_shape *s);
void bk_attn(int level, const bk_shape *s, int kv_head, int pos, int nq, const uint64_t *pages, const float *q, float *out, int ld, float *tmp);
void bk_rmsnorm(int level, const float *x, const float *w, int n, float eps, float *y);
void bk_silu_mul(int level, const float *gate, const float *up, int n, float *y);
void bk_rope(int level, float *x, int heads, int hd, int rope, const float *cs, float scale);
void bk_store_kv(int level, const bk_shape *s, uint64_t page, int tok, const float *k, const float *v);
void bk_add(int level, float *x, const float *y, int n);

/* ---- the model ---- */
typedef struct bk_model bk_model;
enum { BK_WQ, BK_WK, BK_WV, BK_WO, BK_GATE, BK_UP, BK_DOWN, BK_MATS };
typedef struct {
    int level, threads, layers, dim, heads, kv_heads, hd, rope, hidden, vocab, f16, rows, context;
    float eps;
} bk_config;
/* NULL when memory or threads cannot be had. */
bk_model *bk_new(const bk_config *c);
void bk_free(bk_model *m);
void bk_set_layer(bk_model *m, int layer, const bk_mat mats[BK_MATS], const float *attn_norm, const float *ffn_norm);
void bk_set_head(bk_model *m, bk_mat head, const float *norm, const float *rope);  /* rope[context][rope/2][cos, sin] */
float *bk_x(bk_model *m);        /* [rows][dim]: the caller puts the embeddings here */
float *bk_logits(bk_model *m);   /* [rows][vocab padded to 16] */
/* One pass over rows. Row r is position pos[r] of sequence seq[r]; rows of a sequence are neighbours, their positions
 * consecutive. Pages of sequence s start at pages[first[s]]. wants lists nwant rows whose logits are wanted, in the
 * order in which bk_logits holds them. wrote[s] becomes the number of positions stored in every layer. */
void bk_forward(bk_model *m, int rows, const int32_t *pos, const int32_t *seq, int nseq, const int32_t *first,
                const uint64_t *pages, int nwant, const int32_t *wants, int32_t *wrote);
/* Where a pass over rows may have left numbers of a sequence: every buffer that bk_new makes but the counts. Returns
 * how many there are. */
typedef struct { void *p; size_t bytes; } bk_buf;
enum { BK_BUFS = 16 };
int bk_scratch(bk_model *m, int rows, bk_buf out[BK_BUFS]);
#endif
