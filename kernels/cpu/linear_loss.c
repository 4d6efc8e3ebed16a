/* The head of a language model with its loss, in chunks. See linear_loss.h.
 *
 * Workspace: labels, the numbers of the rows that count, their losses and the terms that their
 * log-sum-exps add, the sums of the bias's gradient; rows of x, then the logits of a chunk; the
 * lower bits of the sums of the weight's gradient and a block of them in f32; and the workspace of
 * the products; and how far a launch is that is made in parts. Those are parts of the products of
 * each chunk, and what lies between them. */
#include "kernels/cpu/linear_loss.h"

#include "kernels/cpu/bf16.h"
#include "kernels/cpu/gemm/gemm.h"
#include "kernels/cpu/map.h"
#include "kernels/describe/dispatch.h"
#include "kernels/math/split_sum.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { ALIGN = 64, SMALLEST = 16, MAX_SIZES = 40, MAX_PIECES = 64, BLOCK = 1024 };

/* Products of pieces of `rows` rows; the second of dw is of the last block. */
typedef struct sized_s {
    int64_t rows;
    gradd_prepared_t logits, dx, dw[2];
} sized_t;

typedef struct loss_head_s {
    gradd_head_t is;
    int64_t most;  /* rows that may count */
    int64_t chunk; /* rows of a chunk, at most */
    int64_t block; /* rows of a block of the weight's gradient */
    /* offsets in workspace */
    size_t labels, used, each, added, sums, x, z, low, wide, progress, products, end;
    double parts_per_flop;    /* 0 = a launch is made as a whole */
    sized_t sizes[MAX_SIZES]; /* ascending */
    int n_sizes;
    gradd_prepared_t first[2]; /* as dw of the largest size, over what is there before */
} loss_head_t;

/* What a chunk goes through, in this order. */
typedef enum stage_e { AT_SCORES, AT_LOSSES, AT_SUMS, AT_COLUMNS, AT_SLOPES, AT_END } stage_t;

/* How far a launch is. */
typedef struct progress_s {
    gradd_loss_t loss;
    int64_t n_used; /* rows that count */
    int64_t from;   /* so many of them are done, */
    stage_t stage;  /* and the next chunk is here: */
    int64_t row;    /* of the weight's gradient */
    int piece, sub; /* and part of its product */
} progress_t;

gradd_loss_operands_t gradd_head_operands(const gradd_view_t *in, int n_in) {
    return (gradd_loss_operands_t){&in[GRADD_HEAD_LABELS],
                                   n_in > GRADD_HEAD_ITEMS ? &in[GRADD_HEAD_ITEMS] : NULL,
                                   n_in > GRADD_HEAD_CLASSES ? &in[GRADD_HEAD_CLASSES] : NULL};
}

/* ---- sizes ----------------------------------------------------------------------------------- */

static int64_t up(int64_t n, int64_t step) {
    return (n + step - 1) / step * step;
}

static int64_t quotient_up(int64_t n, int64_t by) {
    return (n + by - 1) / by;
}

static void describe(const gradd_infer_t *c, loss_head_t *h) {
    *h = (loss_head_t){0};
    gradd_head_describe(c, &h->is);
    h->most = h->is.rows;
    if (h->is.rows && h->is.positions && !h->is.squares) h->most -= h->is.rows / h->is.positions;
    h->block = h->is.dtype == GRADD_DT_BF16 ? gradd_head_block(&h->is, GRADD_CPU_HEAD_BLOCK)
                                            : h->is.dw_rows;
    h->chunk = h->most ? gradd_head_chunk(c->attrs, h->most) : 1;
    if (h->chunk > SMALLEST && h->is.ignores) h->chunk = up(h->chunk, SMALLEST);
}

/* Where any number of rows may count, halves down to a few; else what is known to come. */
static void choose_sizes(loss_head_t *h) {
    int64_t rows[MAX_SIZES];
    int n = 0;
    rows[n++] = h->chunk;
    if (!h->is.ignores) {
        int64_t rest = h->most % h->chunk;
        if (rest) rows[n++] = rest;
    } else {
        while (rows[n - 1] > SMALLEST && n < MAX_SIZES) {
            rows[n] = up(quotient_up(rows[n - 1], 2), SMALLEST);
            if (rows[n] >= rows[n - 1]) break;
            n++;
        }
    }
    for (int i = 0; i < n; i++)
        h->sizes[i].rows = rows[n - 1 - i];
    h->n_sizes = n;
}

static void place(loss_head_t *h) {
    const size_t rows = (size_t)h->is.rows, chunk = (size_t)h->chunk;
    size_t at = 0;
#define PLACE(field, bytes) h->field = at, at = (at + (size_t)(bytes) + ALIGN - 1) / ALIGN * ALIGN
    PLACE(labels, sizeof(int64_t) * rows);
    PLACE(used, sizeof(int64_t) * rows);
    PLACE(each, sizeof(double) * rows);
    PLACE(added, h->is.squares ? sizeof(double) * rows : 0);
    PLACE(sums, h->is.dbias ? sizeof(double) * (size_t)h->is.v : 0);
    PLACE(x, chunk * (size_t)h->is.k * h->is.bytes);
    PLACE(z, chunk * (size_t)h->is.v * h->is.bytes);
    bool wide = h->is.dw && h->is.dtype == GRADD_DT_BF16;
    PLACE(low, wide && h->most > h->chunk ? (size_t)(h->is.k * h->is.v) : 0);
    PLACE(wide, wide ? (size_t)(h->block * h->is.dw_cols) * sizeof(float) : 0);
    PLACE(progress, h->parts_per_flop > 0 ? sizeof(progress_t) : 0);
#undef PLACE
    h->products = at;
    h->end = at;
}

/* ---- products -------------------------------------------------------------------------------- */

static gradd_status_t prepare_one(loss_head_t *h, gradd_gemm_t g, int threads,
                                  gradd_prepared_t *out) {
    g.threads = threads;
    g.parts = (int)ceil(2 * (double)g.m * (double)g.n * (double)g.k * h->parts_per_flop);
    GRADD_TRY(gradd_gemm_prepare(&g, out));
    if (h->products + out->workspace > h->end) h->end = h->products + out->workspace;
    return GRADD_OK;
}

static gradd_status_t prepare_size(loss_head_t *h, sized_t *s, int threads) {
    GRADD_TRY(prepare_one(h, gradd_head_logits_product(&h->is, s->rows), threads, &s->logits));
    if (h->is.dx)
        GRADD_TRY(prepare_one(h, gradd_head_rows_product(&h->is, s->rows), threads, &s->dx));
    if (!h->is.dw || !h->is.dw_rows || !h->is.dw_cols) return GRADD_OK;
    const int64_t blocks[2] = {h->block, h->is.dw_rows % h->block};
    const bool largest = s->rows == h->chunk;
    for (int i = 0; i < 2 && blocks[i]; i++) {
        gradd_gemm_t g = gradd_head_weight_product(&h->is, s->rows, blocks[i], false);
        GRADD_TRY(prepare_one(h, g, threads, &s->dw[i]));
        g = gradd_head_weight_product(&h->is, s->rows, blocks[i], true);
        if (largest) GRADD_TRY(prepare_one(h, g, threads, &h->first[i]));
    }
    return GRADD_OK;
}

static size_t unprepare_one(gradd_prepared_t *p, bool count_only) {
    const size_t bytes = p->bytes;
    if (p->state && !count_only) gradd_gemm_unprepare(p);
    return bytes;
}

static size_t unprepare_all(loss_head_t *h, bool count_only) {
    size_t bytes = sizeof *h;
    bytes += unprepare_one(&h->first[0], count_only) + unprepare_one(&h->first[1], count_only);
    for (int i = 0; i < h->n_sizes; i++) {
        sized_t *s = &h->sizes[i];
        bytes += unprepare_one(&s->logits, count_only) + unprepare_one(&s->dx, count_only);
        bytes += unprepare_one(&s->dw[0], count_only) + unprepare_one(&s->dw[1], count_only);
    }
    return bytes;
}

static void find_parts(const gradd_infer_t *c, loss_head_t *h) {
    gradd_cost_t cost = {0};
    gradd_head_cost(c, &cost);
    if (c->parts > 1 && cost.flops > 0) h->parts_per_flop = c->parts / cost.flops;
}

/* As many as a launch has steps where all rows count: with fewer the last ones have nothing to do,
 * with more the last one has what is left. */
static int count_parts(const loss_head_t *h) {
    const sized_t *s = &h->sizes[h->n_sizes - 1];
    const int64_t blocks = h->is.dw && h->block ? quotient_up(h->is.dw_rows, h->block) : 0;
    const int64_t steps = s->logits.parts + 1 + blocks * s->dw[0].parts + h->is.dbias + s->dx.parts;
    const int64_t parts = quotient_up(h->most, h->chunk) * steps;
    return h->parts_per_flop > 0 && parts < INT32_MAX ? (int)parts : 0;
}

gradd_status_t gradd_head_prepare(const gradd_infer_t *c, gradd_prepared_t *out) {
    loss_head_t *h = malloc(sizeof *h);
    if (!h) return GRADD_FAIL(NOMEM, "linear cross-entropy");
    describe(c, h);
    find_parts(c, h);
    choose_sizes(h);
    place(h);
    gradd_status_t status = GRADD_OK;
    for (int i = 0; i < h->n_sizes && !status; i++)
        status = prepare_size(h, &h->sizes[i], c->threads);
    if (status) {
        unprepare_all(h, false);
        free(h);
        return status;
    }
    *out = (gradd_prepared_t){
        .state = h, .workspace = h->end, .bytes = unprepare_all(h, true), .parts = count_parts(h)};
    return GRADD_OK;
}

void gradd_head_unprepare(gradd_prepared_t *prepared) {
    unprepare_all(prepared->state, false);
    free(prepared->state);
}

/* ---- a chunk --------------------------------------------------------------------------------- */

typedef struct piece_s {
    const sized_t *size;
    int64_t at; /* row of the chunk */
} piece_t;

typedef struct chunk_s {
    const loss_head_t *h;
    const gradd_launch_t *r;
    gradd_loss_t loss;
    char *x, *z, *products;
    uint8_t *low;
    float *wide;
    double *each, *added, *sums;
    const gradd_view_t *weights, *squares; /* NULL = none */
    int64_t *used;                         /* numbers of the rows that count */
    int64_t n_used;
    int64_t from, n; /* this chunk: of `used` */
    int64_t padded;  /* with rows of zeros */
    piece_t pieces[MAX_PIECES];
    int n_pieces;
    void *dx, *dw, *dbias; /* NULL = not wanted */
} chunk_t;

static const sized_t *next_size(const loss_head_t *h, int64_t rest) {
    for (int i = 0; i < h->n_sizes; i++) {
        const sized_t *s = &h->sizes[i];
        if (s->rows < rest) continue;
        return !i || s->rows - rest <= s->rows / 4 ? s : &h->sizes[i - 1];
    }
    return &h->sizes[h->n_sizes - 1];
}

static void cut(chunk_t *c) {
    const loss_head_t *h = c->h;
    c->padded = 0;
    c->n_pieces = 0;
    while (c->padded < c->n && c->n_pieces < MAX_PIECES) {
        const sized_t *size = next_size(h, c->n - c->padded);
        c->pieces[c->n_pieces++] = (piece_t){size, c->padded};
        c->padded += size->rows;
    }
    if (c->padded >= c->n && c->padded <= h->chunk) return;
    c->pieces[0] = (piece_t){&h->sizes[h->n_sizes - 1], 0};
    c->n_pieces = 1;
    c->padded = h->chunk;
}

static void gather(const chunk_t *c) {
    const size_t bytes = (size_t)c->h->is.k * c->h->is.bytes;
    const char *x = c->r->in[GRADD_HEAD_X].data;
    for (int64_t j = 0; j < c->n; j++)
        memcpy(c->x + (size_t)j * bytes, x + (size_t)c->used[c->from + j] * bytes, bytes);
    memset(c->x + (size_t)c->n * bytes, 0, (size_t)(c->padded - c->n) * bytes);
}

/* The next part of a product; true if it was the last one. */
static gradd_status_t multiply_part(const gradd_prepared_t *product, const gradd_gemm_operands_t *o,
                                    progress_t *p, bool *out_done) {
    GRADD_TRY(gradd_gemm_part(product->state, p->sub, o));
    *out_done = ++p->sub >= product->parts;
    if (*out_done) p->sub = 0;
    return GRADD_OK;
}

static void next_stage(progress_t *p) {
    p->stage++;
    p->row = p->piece = p->sub = 0;
}

static gradd_status_t multiply_logits(const chunk_t *c, progress_t *p) {
    const loss_head_t *h = c->h;
    const piece_t *piece = &c->pieces[p->piece];
    bool done;
    if (!p->piece && !p->sub) gather(c);
    const gradd_gemm_operands_t o = {
        c->x + (size_t)(piece->at * h->is.k) * h->is.bytes, c->r->in[GRADD_HEAD_W].data,
        h->is.bias ? c->r->in[GRADD_HEAD_BIAS].data : NULL,
        c->z + (size_t)(piece->at * h->is.v) * h->is.bytes, c->products};
    GRADD_TRY(multiply_part(&piece->size->logits, &o, p, &done));
    if (done && ++p->piece == c->n_pieces) next_stage(p);
    return GRADD_OK;
}

/* ---- rows of logits -------------------------------------------------------------------------- */

#define BEND(T, S)                                                                                 \
    GRADD_MULTIARCH static void bend_##S(T *z, int64_t n, double scale, double cap) {              \
        const T in = (T)(cap ? scale / cap : scale), out = (T)cap;                                 \
        if (!cap) {                                                                                \
            _Pragma("omp simd") for (int64_t i = 0; i < n; i++) z[i] *= in;                        \
            return;                                                                                \
        }                                                                                          \
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) z[i] = vtanh(z[i] * in) * out;         \
    }                                                                                              \
    /* dz times the slope at y, which bend() made */                                               \
    GRADD_MULTIARCH static void slope_##S(T *dz, const T *y, int64_t n, double scale,              \
                                          double cap) {                                            \
        const T in = (T)(cap ? 1 / cap : 0), slope = (T)scale;                                     \
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) dz[i] *=                               \
            (1 - (y[i] * in) * (y[i] * in)) * slope;                                               \
    }
BEND(float, f32)
BEND(double, f64)

static bool bends(const loss_head_t *h) {
    return h->is.softcap != 0 || h->is.scale != 1;
}

/* Logits as the product made them -> those that the loss is of. */
static void bend_row(const loss_head_t *h, void *z) {
    if (gradd_dtype_is_f64(h->is.dtype)) {
        bend_f64(z, h->is.v, h->is.scale, h->is.softcap);
        return;
    }
    if (h->is.dtype == GRADD_DT_F32) {
        bend_f32(z, h->is.v, h->is.scale, h->is.softcap);
        return;
    }
    float wide[BLOCK];
    for (int64_t at = 0; at < h->is.v; at += BLOCK) {
        const int64_t n = h->is.v - at < BLOCK ? h->is.v - at : BLOCK;
        gradd_bf16_widen(wide, (gradd_bf16_t *)z + at, n);
        bend_f32(wide, n, h->is.scale, h->is.softcap);
        gradd_bf16_narrow((gradd_bf16_t *)z + at, wide, n);
    }
}

/* The gradient over logits that were bent, block by block: y is needed beside it. */
static void spread_bent(const loss_head_t *h, char *z, const gradd_loss_spread_t *s) {
    double wide[BLOCK], kept[BLOCK];
    gradd_loss_spread_t part = *s;
    for (int64_t at = 0; at < h->is.v; at += BLOCK) {
        const int64_t n = h->is.v - at < BLOCK ? h->is.v - at : BLOCK;
        char *here = z + (size_t)at * h->is.bytes;
        if (s->weights)
            part.weights = (const char *)s->weights +
                           (size_t)at * gradd_dtype_bytes(gradd_loss_dtype(h->is.dtype));
        if (gradd_dtype_is_f64(h->is.dtype)) {
            memcpy(kept, here, (size_t)n * sizeof(double));
            gradd_loss_spread(GRADD_DT_F64, kept, here, n, &part);
            slope_f64((double *)here, kept, n, h->is.scale, h->is.softcap);
            continue;
        }
        float *y = (float *)kept, *dz = (float *)wide;
        if (h->is.dtype == GRADD_DT_BF16)
            gradd_bf16_widen(y, (gradd_bf16_t *)here, n);
        else
            memcpy(y, here, (size_t)n * sizeof(float));
        gradd_loss_spread(GRADD_DT_F32, y, dz, n, &part);
        slope_f32(dz, y, n, h->is.scale, h->is.softcap);
        if (h->is.dtype == GRADD_DT_BF16)
            gradd_bf16_narrow((gradd_bf16_t *)here, dz, n);
        else
            memcpy(here, dz, (size_t)n * sizeof(float));
    }
}

/* What a row counts, and what it has: `pull` is the derivative of its weighted square by its
 * log-sum-exp. */
typedef struct row_s {
    int64_t label; /* -1 = none */
    double weight; /* of its loss, in the loss of all */
    double own;    /* logit of the label */
    double pull;
    gradd_loss_row_t scan;
} row_t;

static row_t scan_row(const chunk_t *c, int64_t row, const gradd_view_t *z) {
    const gradd_loss_t *l = &c->loss;
    row_t r = {.label = l->labels[row]};
    r.scan = gradd_loss_scan_row(l, z->data);
    if (r.label < 0) return r;
    r.own = gradd_loss_number(z, r.label);
    r.weight = (c->weights ? gradd_loss_number(c->weights, row) : 1) / l->total;
    return r;
}

/* Logits z of the row become their gradient. */
static void form_gradient(const chunk_t *c, const row_t *r, const gradd_view_t *z) {
    const loss_head_t *h = c->h;
    const gradd_loss_t *l = &c->loss;
    gradd_loss_spread_t s = {.max = r->scan.max};
    double d = 0;
    if (r->label >= 0) {
        const gradd_loss_label_t at = {r->label, r->own, r->scan.max, r->scan.sum - 1};
        s = gradd_loss_gradient(l, &at, r->weight);
        d = gradd_loss_own_gradient(l, &at) * r->weight;
    }
    if (r->pull != 0) {
        s.scale += r->pull / r->scan.sum;
        if (r->label >= 0) d += exp(r->own - r->scan.max) * r->pull / r->scan.sum;
    }
    if (bends(h)) {
        const double y = h->is.softcap ? r->own / h->is.softcap : 0;
        d *= (1 - y * y) * h->is.scale;
        spread_bent(h, z->data, &s);
    } else {
        gradd_loss_spread(h->is.dtype, z->data, z->data, h->is.v, &s);
    }
    if (r->label >= 0) gradd_loss_store(z, r->label, d);
}

static void finish_row(const chunk_t *c, int64_t j) {
    const loss_head_t *h = c->h;
    const int64_t at = c->from + j, row = c->used[at];
    const gradd_view_t z = {.type = {.dtype = h->is.dtype},
                            .data = c->z + (size_t)(j * h->is.v) * h->is.bytes};
    if (bends(h)) bend_row(h, z.data);
    row_t r = scan_row(c, row, &z);
    c->each[at] = r.label < 0 ? 0 : gradd_loss_of_row(&c->loss, &r.scan, r.label, r.own);
    if (c->weights) c->each[at] *= gradd_loss_number(c->weights, row);
    if (c->squares) {
        const double lse = r.scan.max + log(r.scan.sum);
        const double weight = gradd_loss_number(c->squares, row);
        c->added[at] = weight ? weight * lse * lse : 0;
        r.pull = weight ? 2 * weight * lse : 0;
    }
    if (c->dx || c->dw || c->dbias) form_gradient(c, &r, &z);
}

static void finish_rows(const chunk_t *c) {
    const int64_t v = c->h->is.v;
#pragma omp parallel for schedule(static) if (c->n * v >= GRADD_PARALLEL_MIN)
    for (int64_t j = 0; j < c->n; j++)
        finish_row(c, j);
    memset(c->z + (size_t)(c->n * v) * c->h->is.bytes, 0,
           (size_t)((c->padded - c->n) * v) * c->h->is.bytes);
}

/* ---- gradients of the weight and the bias ---------------------------------------------------- */

/* A sum in f32 from the bits that were kept of it. */
GRADD_MULTIARCH static void join(float *wide, const gradd_bf16_t *high, const uint8_t *low,
                                 int64_t n) {
    const uint16_t *upper = (const uint16_t *)high;
    uint32_t *bits = (uint32_t *)wide;
    _Pragma("omp simd") for (int64_t i = 0; i < n; i++) bits[i] =
        gradd_parted_join(upper[i], low[i]);
}

GRADD_MULTIARCH static void part(const float *wide, gradd_bf16_t *high, uint8_t *low, int64_t n) {
    uint16_t *upper = (uint16_t *)high;
    const uint32_t *bits = (const uint32_t *)wide;
    _Pragma("omp simd") for (int64_t i = 0; i < n; i++) {
        const uint32_t x = gradd_parted_round(bits[i]);
        upper[i] = (uint16_t)(x >> 16);
        low[i] = (uint8_t)(x >> 8);
    }
}

/* Whether the first product of the chunk writes over the sums, which then need no zeros. */
static bool starts_whole(const chunk_t *c) {
    return !c->from && c->pieces[0].size->rows == c->h->chunk;
}

/* Before and after the products of a block of n elements. */
static void load_block(const chunk_t *c, int64_t at, int64_t n) {
    const int64_t pieces = quotient_up(n, GRADD_PARALLEL_MIN);
#pragma omp parallel for schedule(static) if (pieces > 1)
    for (int64_t p = 0; p < pieces; p++) {
        const int64_t from = p * GRADD_PARALLEL_MIN, rest = n - from;
        const int64_t m = rest < GRADD_PARALLEL_MIN ? rest : GRADD_PARALLEL_MIN;
        if (!c->from)
            memset(c->wide + from, 0, (size_t)m * sizeof(float));
        else
            join(c->wide + from, (gradd_bf16_t *)c->dw + at + from, c->low + at + from, m);
    }
}

static void store_block(const chunk_t *c, int64_t at, int64_t n) {
    const int64_t pieces = quotient_up(n, GRADD_PARALLEL_MIN);
    const bool last = c->from + c->n == c->n_used;
#pragma omp parallel for schedule(static) if (pieces > 1)
    for (int64_t p = 0; p < pieces; p++) {
        const int64_t from = p * GRADD_PARALLEL_MIN, rest = n - from;
        const int64_t m = rest < GRADD_PARALLEL_MIN ? rest : GRADD_PARALLEL_MIN;
        gradd_bf16_t *dw = (gradd_bf16_t *)c->dw + at + from;
        if (last)
            gradd_bf16_narrow(dw, c->wide + from, m);
        else
            part(c->wide + from, dw, c->low + at + from, m);
    }
}

static void clear(void *memory, size_t bytes) {
    const int64_t step = (int64_t)1 << 20, pieces = quotient_up((int64_t)bytes, step);
#pragma omp parallel for schedule(static) if (pieces > 1)
    for (int64_t p = 0; p < pieces; p++) {
        const size_t from = (size_t)(p * step), rest = bytes - from;
        memset((char *)memory + from, 0, rest < (size_t)step ? rest : (size_t)step);
    }
}

/* Before the products of the block that begins at p->row. */
static void begin_block(const chunk_t *c, const progress_t *p, int64_t rows) {
    const loss_head_t *h = c->h;
    if (starts_whole(c)) return;
    if (h->is.dtype == GRADD_DT_BF16)
        load_block(c, p->row * h->is.dw_cols, rows * h->is.dw_cols);
    else if (!c->from && !p->row)
        clear(c->dw, (size_t)(h->is.k * h->is.v) * h->is.bytes);
}

static gradd_status_t add_weight(const chunk_t *c, progress_t *p) {
    const loss_head_t *h = c->h;
    const char *left = h->is.trans ? c->z : c->x, *right = h->is.trans ? c->x : c->z;
    const bool parted = h->is.dtype == GRADD_DT_BF16, last = h->is.dw_rows - p->row < h->block;
    const int64_t rows = last ? h->is.dw_rows - p->row : h->block, at = p->row * h->is.dw_cols;
    const piece_t *piece = &c->pieces[p->piece];
    const bool first = starts_whole(c) && !p->piece;
    bool done;
    if (!p->piece && !p->sub) begin_block(c, p, rows);
    const gradd_gemm_operands_t o = {
        left + (size_t)(piece->at * h->is.dw_rows + p->row) * h->is.bytes,
        right + (size_t)(piece->at * h->is.dw_cols) * h->is.bytes, NULL,
        parted ? (void *)c->wide : (char *)c->dw + (size_t)at * h->is.bytes, c->products};
    GRADD_TRY(multiply_part(first ? &h->first[last] : &piece->size->dw[last], &o, p, &done));
    if (!done || ++p->piece < c->n_pieces) return GRADD_OK;
    if (parted) store_block(c, at, rows * h->is.dw_cols);
    p->piece = 0;
    p->row += rows;
    if (p->row == h->is.dw_rows) next_stage(p);
    return GRADD_OK;
}

/* Columns [from, from + n) of the chunk's gradients, row after row. */
static void add_columns(const chunk_t *c, int64_t from, int64_t n) {
    const loss_head_t *h = c->h;
    const gradd_view_t z = {.type = {.dtype = h->is.dtype}, .data = c->z};
    for (int64_t j = 0; j < c->n; j++)
        for (int64_t i = from; i < from + n; i++)
            c->sums[i] += gradd_loss_number(&z, j * h->is.v + i);
}

static void add_bias(const chunk_t *c) {
    const int64_t v = c->h->is.v, pieces = quotient_up(v, BLOCK);
#pragma omp parallel for schedule(static) if (c->n * v >= GRADD_PARALLEL_MIN)
    for (int64_t p = 0; p < pieces; p++)
        add_columns(c, p * BLOCK, v - p * BLOCK < BLOCK ? v - p * BLOCK : BLOCK);
}

/* The rows of x are not needed any more: their gradients take their room on the way to dX. */
static gradd_status_t write_rows(const chunk_t *c, progress_t *p) {
    const loss_head_t *h = c->h;
    const size_t bytes = (size_t)h->is.k * h->is.bytes;
    const piece_t *piece = &c->pieces[p->piece];
    bool done;
    const gradd_gemm_operands_t o = {c->z + (size_t)(piece->at * h->is.v) * h->is.bytes,
                                     c->r->in[GRADD_HEAD_W].data, NULL,
                                     c->x + (size_t)piece->at * bytes, c->products};
    GRADD_TRY(multiply_part(&piece->size->dx, &o, p, &done));
    if (!done || ++p->piece < c->n_pieces) return GRADD_OK;
    for (int64_t j = 0; j < c->n; j++)
        memcpy((char *)c->dx + (size_t)c->used[c->from + j] * bytes, c->x + (size_t)j * bytes,
               bytes);
    next_stage(p);
    return GRADD_OK;
}

static bool is_wanted(const chunk_t *c, stage_t stage) {
    if (stage == AT_SUMS) return c->dw && c->h->is.dw_rows && c->h->is.dw_cols;
    if (stage == AT_COLUMNS) return c->dbias;
    return stage != AT_SLOPES || c->dx;
}

/* One step of the next chunk: a product, a part of one, or what lies between two. */
static gradd_status_t step(chunk_t *c, progress_t *p) {
    c->from = p->from;
    c->n = c->n_used - c->from < c->h->chunk ? c->n_used - c->from : c->h->chunk;
    cut(c);
    if (p->stage == AT_LOSSES) finish_rows(c);
    if (p->stage == AT_COLUMNS) add_bias(c);
    if (p->stage == AT_LOSSES || p->stage == AT_COLUMNS)
        next_stage(p);
    else
        GRADD_TRY((p->stage == AT_SCORES ? multiply_logits
                   : p->stage == AT_SUMS ? add_weight
                                         : write_rows)(c, p));
    while (p->stage < AT_END && !is_wanted(c, p->stage))
        next_stage(p);
    if (p->stage < AT_END) return GRADD_OK;
    p->from += c->n;
    p->stage = AT_SCORES;
    return GRADD_OK;
}

/* ---- the launch ------------------------------------------------------------------------------ */

static const gradd_view_t *operand(const gradd_launch_t *r, int i) {
    return gradd_head_has(r->in, r->n_in, i) ? &r->in[i] : NULL;
}

static void *result(const gradd_launch_t *r, int j) {
    return r->n_out > j ? r->out[j].data : NULL;
}

static gradd_status_t read_loss(const gradd_launch_t *r, int64_t *labels, gradd_loss_t *out) {
    const gradd_type_t logits = gradd_head_logits(r->in, r->attrs);
    const gradd_loss_operands_t operands = gradd_head_operands(r->in, r->n_in);
    const gradd_view_t *weights = operand(r, GRADD_HEAD_WEIGHTS);
    GRADD_TRY(gradd_loss_read(&logits, r->attrs, &operands, labels, out));
    for (int64_t i = 0; weights && i < out->rows; i++)
        if (gradd_loss_number(weights, i) == 0) labels[i] = -1; /* as if it had no label */
    return GRADD_OK;
}

static bool counts(const chunk_t *c, int64_t row) {
    return c->loss.labels[row] >= 0 || (c->squares && gradd_loss_number(c->squares, row) != 0);
}

/* Lists the rows that count; the others have no gradient. */
static void find_used(chunk_t *c) {
    const size_t bytes = (size_t)c->h->is.k * c->h->is.bytes;
    for (int64_t i = 0; i < c->h->is.rows; i++) {
        if (counts(c, i))
            c->used[c->n_used++] = i;
        else if (c->dx)
            memset((char *)c->dx + (size_t)i * bytes, 0, bytes);
    }
}

/* The contribution of a row without a loss: nothing, unless its weight is not a finite number. */
static double nothing_times(double weight) {
    return 0 * weight;
}

static void write_sums(const chunk_t *c) {
    double loss = 0, added = 0;
    for (int64_t i = 0; i < c->n_used; i++)
        loss += c->each[i];
    for (int64_t i = 0; c->squares && i < c->n_used; i++)
        added += c->added[i];
    for (int64_t i = 0; c->weights && i < c->h->is.rows; i++)
        loss += nothing_times(gradd_loss_number(c->weights, i));
    gradd_loss_store(&c->r->out[GRADD_HEAD_LOSS], 0, loss / c->loss.total + added);
    for (int64_t i = 0; c->dbias && i < c->h->is.v; i++)
        gradd_loss_store(&c->r->out[GRADD_HEAD_DBIAS], i, c->sums[i]);
}

static chunk_t open_launch(const gradd_launch_t *r) {
    const loss_head_t *h = r->state;
    char *w = r->workspace;
    return (chunk_t){.h = h,
                     .r = r,
                     .x = w + h->x,
                     .z = w + h->z,
                     .products = w + h->products,
                     .low = (uint8_t *)(w + h->low),
                     .wide = (float *)(w + h->wide),
                     .each = (double *)(w + h->each),
                     .added = (double *)(w + h->added),
                     .sums = (double *)(w + h->sums),
                     .weights = operand(r, GRADD_HEAD_WEIGHTS),
                     .squares = operand(r, GRADD_HEAD_SQUARES),
                     .used = (int64_t *)(w + h->used),
                     .dx = result(r, GRADD_HEAD_DX),
                     .dw = result(r, GRADD_HEAD_DW),
                     .dbias = result(r, GRADD_HEAD_DBIAS)};
}

static gradd_status_t begin(chunk_t *c, progress_t *p) {
    const loss_head_t *h = c->h;
    GRADD_TRY(read_loss(c->r, (int64_t *)((char *)c->r->workspace + h->labels), &c->loss));
    find_used(c);
    if (c->dw && !c->n_used) clear(c->dw, (size_t)(h->is.k * h->is.v) * h->is.bytes);
    if (c->dbias) memset(c->sums, 0, sizeof(double) * (size_t)h->is.v);
    *p = (progress_t){.loss = c->loss, .n_used = c->n_used};
    return GRADD_OK;
}

gradd_status_t gradd_head_compute(const gradd_launch_t *r) {
    const loss_head_t *h = r->state;
    progress_t whole, *p = &whole;
    chunk_t c = open_launch(r);
    if (r->parts > 1) p = (progress_t *)((char *)r->workspace + h->progress);
    if (!r->part) GRADD_TRY(begin(&c, p));
    c.loss = p->loss;
    if (c.loss.weights) c.loss.weights = &r->in[GRADD_HEAD_CLASSES];
    c.n_used = p->n_used;
    const bool is_last = r->part + 1 >= r->parts;
    for (bool more = p->from < p->n_used; more; more = is_last && p->from < p->n_used)
        GRADD_TRY(step(&c, p));
    if (is_last) write_sums(&c);
    return GRADD_OK;
}

/* ---- the definition -------------------------------------------------------------------------- */

typedef struct plain_loss_s {
    const gradd_launch_t *r;
    gradd_loss_t loss;
    int64_t k;
    bool trans;
    double softcap, scale;
    gradd_view_t z; /* one row of logits */
} plain_loss_t;

static double weight_at(const plain_loss_t *p, int64_t v, int64_t k) {
    const int64_t at = p->trans ? v * p->k + k : k * p->loss.classes + v;
    return gradd_loss_number(&p->r->in[GRADD_HEAD_W], at);
}

static void add_to(const gradd_launch_t *r, int j, int64_t at, double value) {
    if (!result(r, j)) return;
    gradd_loss_store(&r->out[j], at, gradd_loss_number(&r->out[j], at) + value);
}

static void plain_logits(plain_loss_t *p, int64_t row) {
    const gradd_launch_t *r = p->r;
    const bool bias = operand(r, GRADD_HEAD_BIAS);
    for (int64_t v = 0; v < p->loss.classes; v++) {
        double sum = bias ? gradd_loss_number(&r->in[GRADD_HEAD_BIAS], v) : 0;
        for (int64_t k = 0; k < p->k; k++)
            sum += gradd_loss_number(&r->in[GRADD_HEAD_X], row * p->k + k) * weight_at(p, v, k);
        sum *= p->scale;
        if (p->softcap) sum = p->softcap * tanh(sum / p->softcap);
        gradd_loss_store(&p->z, v, sum);
    }
}

/* Adds what the gradient d of logit v of a row gives. */
static void plain_gradient(const plain_loss_t *p, int64_t row, int64_t v, double d) {
    const int64_t classes = p->loss.classes;
    if (p->softcap) {
        const double y = gradd_loss_number(&p->z, v) / p->softcap;
        d *= 1 - y * y;
    }
    d *= p->scale;
    add_to(p->r, GRADD_HEAD_DBIAS, v, d);
    for (int64_t k = 0; k < p->k; k++) {
        const double x = gradd_loss_number(&p->r->in[GRADD_HEAD_X], row * p->k + k);
        add_to(p->r, GRADD_HEAD_DX, row * p->k + k, d * weight_at(p, v, k));
        add_to(p->r, GRADD_HEAD_DW, p->trans ? v * p->k + k : k * classes + v, d * x);
    }
}

/* Adds up the loss of a row and what its log-sum-exp adds. */
static void plain_row(plain_loss_t *p, int64_t row, double *loss, double *added) {
    const gradd_loss_t *l = &p->loss;
    const gradd_view_t *weights = operand(p->r, GRADD_HEAD_WEIGHTS);
    const gradd_view_t *squares = operand(p->r, GRADD_HEAD_SQUARES);
    const int64_t label = l->labels[row];
    const double square = squares ? gradd_loss_number(squares, row) : 0;
    if (weights) *loss += nothing_times(gradd_loss_number(weights, row));
    const double weight = label < 0 ? 0 : weights ? gradd_loss_number(weights, row) : 1;
    if (label < 0 && !square) return;
    plain_logits(p, row);
    gradd_loss_row_t s = {gradd_loss_number(&p->z, 0), 0, 0};
    for (int64_t v = 0; v < l->classes; v++) {
        const double z = gradd_loss_number(&p->z, v);
        s.max = z > s.max || z != z ? z : s.max;
        s.plain += l->weights ? z * gradd_loss_number(l->weights, v) : z;
    }
    for (int64_t v = 0; v < l->classes; v++)
        s.sum += exp(gradd_loss_number(&p->z, v) - s.max);
    const double lse = s.max + log(s.sum);
    gradd_loss_label_t at = {label, 0, s.max, s.sum - 1};
    gradd_loss_spread_t spread = {.max = s.max};
    if (label >= 0) {
        at.own = gradd_loss_number(&p->z, label);
        spread = gradd_loss_gradient(l, &at, weight / l->total);
        *loss += weight * gradd_loss_of_row(l, &s, label, at.own);
    }
    for (int64_t v = 0; v < l->classes; v++) {
        const double e = exp(gradd_loss_number(&p->z, v) - s.max);
        const double w = l->weights ? gradd_loss_number(l->weights, v) : 1;
        double d = e * spread.scale - spread.shift * w;
        if (v == label) d = gradd_loss_own_gradient(l, &at) * weight / l->total;
        plain_gradient(p, row, v, d + (square ? 2 * square * lse * e / s.sum : 0));
    }
    if (square) *added += square * lse * lse;
}

gradd_status_t gradd_head_ref(const gradd_launch_t *r) {
    const gradd_type_t *x = &r->in[GRADD_HEAD_X].type;
    plain_loss_t p = {.r = r,
                      .k = x->dims[x->rank - 1],
                      .trans = gradd_attr_int(r->attrs, GRADD_HEAD_TRANS, 0),
                      .softcap = gradd_attr_float(r->attrs, GRADD_HEAD_SOFTCAP, 0),
                      .scale = gradd_attr_float(r->attrs, GRADD_HEAD_SCALE, 1)};
    double loss = 0, added = 0;
    GRADD_TRY(read_loss(r, r->workspace, &p.loss));
    p.z = (gradd_view_t){
        .type = {.dtype = x->dtype},
        .data = (int64_t *)r->workspace + p.loss.rows /* behind the labels */
    };
    for (int j = GRADD_HEAD_DX; j <= GRADD_HEAD_DBIAS; j++)
        if (result(r, j)) memset(result(r, j), 0, (size_t)gradd_type_bytes(&r->out[j].type));
    for (int64_t row = 0; row < p.loss.rows; row++)
        plain_row(&p, row, &loss, &added);
    gradd_loss_store(&r->out[GRADD_HEAD_LOSS], 0, loss / p.loss.total + added);
    return GRADD_OK;
}
