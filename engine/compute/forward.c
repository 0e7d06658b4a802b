//go:build cgo && amd64

/* One forward pass over a batch of rows, all layers, in one call. Work is cut into tasks by rows, by tiles of columns or
 * by (sequence, kv head); how it is cut never shows in a result, because a row's arithmetic looks at nothing else. */
#define _GNU_SOURCE
#include "kernels.h"
#include "team.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct { bk_mat mat[BK_MATS]; const float *attn_norm, *ffn_norm; } layer;
struct bk_model {
    bk_config c;
    layer *layers;
    bk_mat head;
    const float *norm, *rope;
    team *team;
    int qdim, kvdim;
    int ldq, ldkv, ldh, ldx, ldv;                        /* floats from row to row */
    float *x, *n, *q, *k, *v, *o, *g, *u, *y, *logits, *tmp;
    size_t tmp_each;
    acts act;
    int32_t *wrote;
};

static int pad16(int n) { return (n + 15) & ~15; }
static void *floats(size_t n) {
    void *p = NULL;
    return posix_memalign(&p, 64, (n ? n : 1) * sizeof(float) + 64) ? NULL : memset(p, 0, (n ? n : 1) * sizeof(float) + 64);
}

bk_model *bk_new(const bk_config *c) {
    bk_model *m = calloc(1, sizeof *m);
    if (!m) return NULL;
    m->c = *c;
    size_t r = c->rows;
    m->qdim = c->heads * c->hd; m->kvdim = c->kv_heads * c->hd;
    m->ldx = pad16(c->dim); m->ldq = pad16(m->qdim); m->ldkv = pad16(m->kvdim); m->ldh = pad16(c->hidden); m->ldv = pad16(c->vocab);
    int widest = m->ldx > m->ldq ? m->ldx : m->ldq;
    if (m->ldh > widest) widest = m->ldh;
    bk_shape s = { c->heads, c->kv_heads, c->hd, c->f16, 0 };
    m->tmp_each = (bk_attn_tmp(&s) + 15) & ~(size_t)15;
    m->layers = calloc(c->layers, sizeof *m->layers);
    m->wrote = calloc((size_t)c->layers * r, sizeof *m->wrote);
    m->x = floats(r * m->ldx); m->n = floats(r * m->ldx); m->y = floats(r * m->ldx);
    m->q = floats(r * m->ldq); m->o = floats(r * m->ldq);
    m->k = floats(r * m->ldkv); m->v = floats(r * m->ldkv);
    m->g = floats(r * m->ldh); m->u = floats(r * m->ldh);
    m->logits = floats(r * m->ldv);
    m->tmp = floats(m->tmp_each * c->threads);
    m->act.ms = (int)r;
    m->act.q = floats(r * widest / 4 + 16); m->act.s = floats(r * widest / 32 + 16); m->act.ss = floats(r * widest / 32 + 16); m->act.c = floats(r * widest / 32 + 16);
    m->team = team_new(c->threads);
    if (!m->layers || !m->wrote || !m->x || !m->n || !m->y || !m->q || !m->o || !m->k || !m->v || !m->g || !m->u || !m->logits || !m->tmp ||
        !m->act.q || !m->act.s || !m->act.ss || !m->act.c || !m->team) { bk_free(m); return NULL; }
    return m;
}
void bk_free(bk_model *m) {
    if (!m) return;
    team_free(m->team);
    void *all[] = { m->layers, m->wrote, m->x, m->n, m->y, m->q, m->o, m->k, m->v, m->g, m->u, m->logits, m->tmp, m->act.q, m->act.s, m->act.ss, m->act.c };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    free(m);
}
void bk_set_layer(bk_model *m, int i, const bk_mat mats[BK_MATS], const float *attn_norm, const float *ffn_norm) {
    memcpy(m->layers[i].mat, mats, sizeof m->layers[i].mat);
    m->layers[i].attn_norm = attn_norm; m->layers[i].ffn_norm = ffn_norm;
}
void bk_set_head(bk_model *m, bk_mat head, const float *norm, const float *rope) { m->head = head; m->norm = norm; m->rope = rope; }
float *bk_x(bk_model *m) { return m->x; }
float *bk_logits(bk_model *m) { return m->logits; }

/* ---- one pass ---- */
typedef struct {
    bk_model *m;
    int rows, nseq;
    const int32_t *pos, *seq, *first, *wants;
    const uint64_t *pages;
    int nwant, layer;
    /* a group of products over one set of activations */
    const bk_mat *mat[3]; float *out[3]; int ld[3], tiles[3], nmat, m_rows, chunk;
    const float *in; int ldin, k;
    const float *norm, *other;
    int kind;
} pass;

/* Rows are prepared in runs, so that neighbouring scales are written by one thread. */
enum { RUN = 16 };
static int runs(int rows) { return (rows + RUN - 1) / RUN; }

static void products_task(void *arg, int task, int thread) {
    pass *p = arg; (void)thread;
    for (int i = 0; i < p->nmat; i++) {
        int chunks = (p->tiles[i] + p->chunk - 1) / p->chunk;
        if (task >= chunks) { task -= chunks; continue; }
        int t0 = task * p->chunk, t1 = t0 + p->chunk < p->tiles[i] ? t0 + p->chunk : p->tiles[i];
        if (p->mat[i]->type >= BK_F32) bk_matmul_float(p->m->c.level, p->mat[i], p->m_rows, p->in, p->ldin, p->out[i], p->ld[i], t0, t1);
        else {
            acts a = p->m->act; a.m = p->m_rows; a.k = p->k;
            bk_matmul(p->m->c.level, p->mat[i], &a, p->out[i], p->ld[i], t0, t1);
        }
        return;
    }
}
/* out[i] = in * mat[i]^T for up to three matrices; in was quantised by a prepare task if any of them is. */
static void products(pass *p, int rows, const float *in, int ldin, int k) {
    int tiles = 0, tasks = 0;
    p->m_rows = rows; p->in = in; p->ldin = ldin; p->k = k;
    for (int i = 0; i < p->nmat; i++) tiles += p->tiles[i] = p->mat[i]->n / 16;
    p->chunk = tiles / (8 * p->m->c.threads);            /* about eight chunks a thread: one of them always lags */
    if (p->chunk < 1) p->chunk = 1;
    for (int i = 0; i < p->nmat; i++) tasks += (p->tiles[i] + p->chunk - 1) / p->chunk;
    team_run(p->m->team, tasks, products_task, p);
}
static void use(pass *p, const bk_mat *w, float *out, int ld) { p->mat[p->nmat] = w; p->out[p->nmat] = out; p->ld[p->nmat++] = ld; }

enum { NORM, PLAIN, SILU, FINAL };
/* Makes the input of the next products for a run of rows: normalised, or as it is, or gated; and its int8 form. */
static void prepare_task(void *arg, int task, int thread) {
    pass *p = arg; bk_model *m = p->m; (void)thread;
    int quantised = 0;
    for (int i = 0; i < p->nmat; i++) quantised |= p->mat[i]->type < BK_F32;
    acts a = m->act; a.m = p->rows; a.k = p->k;
    int end = (task + 1) * RUN < p->m_rows ? (task + 1) * RUN : p->m_rows;
    for (int r = task * RUN; r < end; r++) {
        float *in = (float *)p->in + (size_t)r * p->ldin;
        switch (p->kind) {
        case NORM:                                       /* the output of the layer before, if any, joins the residual */
            if (p->other) bk_add(m->c.level, m->x + (size_t)r * m->ldx, p->other + (size_t)r * m->ldx, m->c.dim);
            bk_rmsnorm(m->c.level, m->x + (size_t)r * m->ldx, p->norm, m->c.dim, m->c.eps, in);
            break;
        case FINAL: bk_rmsnorm(m->c.level, m->x + (size_t)p->wants[r] * m->ldx, p->norm, m->c.dim, m->c.eps, in); break;
        case SILU: bk_silu_mul(m->c.level, in, m->u + (size_t)r * m->ldh, m->c.hidden, in); break;
        }
        if (quantised) bk_quant_row(m->c.level, in, &a, r);
    }
}
static void prepare(pass *p, int kind, int rows, float *in, int ldin, int k) {
    p->kind = kind; p->in = in; p->ldin = ldin; p->k = k; p->m_rows = rows;
    team_run(p->m->team, runs(rows), prepare_task, p);
}

static bk_shape shape(const pass *p) {
    const bk_config *c = &p->m->c;
    return (bk_shape){ c->heads, c->kv_heads, c->hd, c->f16, (size_t)p->layer * 2 * p->m->kvdim * BK_PAGE };
}
static void rope_task(void *arg, int task, int thread) {
    pass *p = arg; bk_model *m = p->m; (void)thread;
    bk_shape s = shape(p);
    float scale = 1.0f / sqrtf((float)m->c.hd);
    int end = (task + 1) * RUN < p->rows ? (task + 1) * RUN : p->rows;
    for (int r = task * RUN; r < end; r++) {
        const float *cs = m->rope + (size_t)p->pos[r] * m->c.rope;
        float *k = m->k + (size_t)r * m->ldkv;
        bk_rope(m->c.level, m->q + (size_t)r * m->ldq, m->c.heads, m->c.hd, m->c.rope, cs, scale);
        bk_rope(m->c.level, k, m->c.kv_heads, m->c.hd, m->c.rope, cs, 1);
        bk_store_kv(m->c.level, &s, p->pages[p->first[p->seq[r]] + p->pos[r] / BK_PAGE], p->pos[r] % BK_PAGE, k, m->v + (size_t)r * m->ldkv);
        __atomic_fetch_add(&m->wrote[p->layer * p->nseq + p->seq[r]], 1, __ATOMIC_RELAXED);
    }
}

/* Attention is cut into (run of rows of one sequence, kv head). */
enum { QRUN = 32 };
static void attn_task(void *arg, int task, int thread) {
    pass *p = arg; bk_model *m = p->m;
    bk_shape s = shape(p);
    int head = task % m->c.kv_heads, run = task / m->c.kv_heads;
    for (int r = 0; r < p->rows; ) {
        int n = 1;
        while (n < QRUN && r + n < p->rows && p->seq[r + n] == p->seq[r]) n++;
        if (run-- == 0) {
            bk_attn(m->c.level, &s, head, p->pos[r], n, p->pages + p->first[p->seq[r]], m->q + (size_t)r * m->ldq, m->o + (size_t)r * m->ldq, m->ldq, m->tmp + m->tmp_each * thread);
            return;
        }
        r += n;
    }
}
static int attn_runs(const pass *p) {
    int runs = 0;
    for (int r = 0, n; r < p->rows; r += n, runs++) for (n = 1; n < QRUN && r + n < p->rows && p->seq[r + n] == p->seq[r]; n++) { }
    return runs;
}

void bk_forward(bk_model *m, int rows, const int32_t *pos, const int32_t *seq, int nseq, const int32_t *first,
                const uint64_t *pages, int nwant, const int32_t *wants, int32_t *wrote) {
    pass p = { .m = m, .rows = rows, .nseq = nseq, .pos = pos, .seq = seq, .first = first, .pages = pages, .nwant = nwant, .wants = wants };
    const bk_config *c = &m->c;
    memset(m->wrote, 0, (size_t)c->layers * nseq * sizeof *m->wrote);
    int tasks = attn_runs(&p) * c->kv_heads;
    float *pending = NULL;                               /* what the residual still has to take in */
    for (int l = 0; l < c->layers; l++) {
        const layer *w = &m->layers[l];
        p.layer = l;
        p.nmat = 0; use(&p, &w->mat[BK_WQ], m->q, m->ldq); use(&p, &w->mat[BK_WK], m->k, m->ldkv); use(&p, &w->mat[BK_WV], m->v, m->ldkv);
        p.norm = w->attn_norm; p.other = pending;
        prepare(&p, NORM, rows, m->n, m->ldx, c->dim);
        products(&p, rows, m->n, m->ldx, c->dim);
        team_run(m->team, runs(rows), rope_task, &p);
        team_run(m->team, tasks, attn_task, &p);
        p.nmat = 0; use(&p, &w->mat[BK_WO], m->y, m->ldx);
        prepare(&p, PLAIN, rows, m->o, m->ldq, m->qdim);
        products(&p, rows, m->o, m->ldq, m->qdim);
        p.nmat = 0; use(&p, &w->mat[BK_GATE], m->g, m->ldh); use(&p, &w->mat[BK_UP], m->u, m->ldh);
        p.norm = w->ffn_norm; p.other = m->y;
        prepare(&p, NORM, rows, m->n, m->ldx, c->dim);
        products(&p, rows, m->n, m->ldx, c->dim);
        p.nmat = 0; use(&p, &w->mat[BK_DOWN], m->y, m->ldx);
        prepare(&p, SILU, rows, m->g, m->ldh, c->hidden);
        products(&p, rows, m->g, m->ldh, c->hidden);
        pending = m->y;
    }
    if (nwant) {
        for (int i = 0; i < nwant; i++) bk_add(c->level, m->x + (size_t)wants[i] * m->ldx, m->y + (size_t)wants[i] * m->ldx, c->dim);
        p.nmat = 0; use(&p, &m->head, m->logits, m->ldv);
        p.norm = m->norm;
        prepare(&p, FINAL, nwant, m->n, m->ldx, c->dim);
        products(&p, nwant, m->n, m->ldx, c->dim);
    }
    team_rest(m->team);
    for (int s = 0; s < nseq; s++) {
        wrote[s] = m->wrote[s];
        for (int l = 1; l < c->layers; l++) if (m->wrote[l * nseq + s] < wrote[s]) wrote[s] = m->wrote[l * nseq + s];
    }
}

int bk_scratch(bk_model *m, int rows, bk_buf out[BK_BUFS]) {
    size_t r = rows, widest = m->ldx > m->ldq ? m->ldx : m->ldq;
    if (m->ldh > (int)widest) widest = m->ldh;
    int n = 0;
    float *x[] = { m->x, m->n, m->y }, *q[] = { m->q, m->o }, *kv[] = { m->k, m->v }, *h[] = { m->g, m->u };
    for (int i = 0; i < 3; i++) out[n++] = (bk_buf){ x[i], r * m->ldx * sizeof(float) };
    for (int i = 0; i < 2; i++) out[n++] = (bk_buf){ q[i], r * m->ldq * sizeof(float) };
    for (int i = 0; i < 2; i++) out[n++] = (bk_buf){ kv[i], r * m->ldkv * sizeof(float) };
    for (int i = 0; i < 2; i++) out[n++] = (bk_buf){ h[i], r * m->ldh * sizeof(float) };
    out[n++] = (bk_buf){ m->logits, r * m->ldv * sizeof(float) };
    out[n++] = (bk_buf){ m->act.q, r * widest };
    float *scale[] = { m->act.s, m->act.ss, (float *)m->act.c };    /* strided: all of them */
    for (int i = 0; i < 3; i++) out[n++] = (bk_buf){ scale[i], (size_t)m->act.ms * (widest / 32) * sizeof(float) };
    out[n++] = (bk_buf){ m->tmp, m->tmp_each * m->c.threads * sizeof(float) };
    return n;
}
