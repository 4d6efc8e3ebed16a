/* Convolutions as matrix products over columns: the patches of x, one row for each channel and tap.
 * See conv.h.
 *
 * With W as [M, C K] for each group,
 *     y  = W columns                   [C K, Y] of an image
 *     dx = sums of columns' = W^T dy   each element of which belongs to one of x
 *     dW = dy columns^T                [C K, positions of all images]
 * Columns are made piece by piece, so that they stay within some MiB: a piece has several images,
 * or some channels of one. Where taps are single and no position is left out, x is the matrix
 * itself. Tasks of a parallel loop write results of their own, and the order of the sums depends on
 * the relation alone. */
#include "kernels/cpu/conv/conv.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/gemm/gemm.h"
#include "kernels/cpu/parts.h"
#include "kernels/describe/dispatch.h"

/* Of all columns of a piece: about what the caches hold. */
#define PIECE_BYTES ((int64_t)8 << 20)

typedef struct columns_s {
    gradd_conv_t v;
    gradd_conv_made_t made;
    int64_t in, out, taps, y; /* channels of a group, taps, positions of an image */
    bool direct;              /* x is the matrix of columns */
    bool empty;               /* there is nothing to add up */
    int64_t images, channels; /* of a piece; channels of each group */
    int64_t length;           /* positions of a piece, of W alone */
    gradd_prepared_t product;
    size_t columns_at, y_at; /* in the workspace, behind that of the product */
} columns_t;

static int64_t larger(int64_t a, int64_t b) {
    return a > b ? a : b;
}
static int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* The largest divisor of n that is at most `most`, and at least 1. */
static int64_t divisor(int64_t n, int64_t most) {
    int64_t d = larger(1, smaller(n, most));
    while (n % d)
        d--;
    return d;
}

/* ---- preparation ----------------------------------------------------------------------------- */

static void choose_pieces(columns_t *k) {
    const gradd_conv_t *v = &k->v;
    const int64_t size = (int64_t)gradd_dtype_bytes(v->dtype);
    const int64_t channel = v->groups * k->taps * k->y * size; /* one of each group */
    const int64_t all = v->images * k->y;
    if (k->made == GRADD_CONV_MAKES_W) {
        const int64_t most = larger(64, PIECE_BYTES / (v->in * k->taps * size));
        const int64_t pieces = (all + most - 1) / most;
        k->length = (all + pieces - 1) / pieces;
        return;
    }
    k->images = v->images, k->channels = k->in;
    if (k->direct) return;
    k->channels = divisor(k->in, PIECE_BYTES / channel);
    k->images = k->channels < k->in ? 1 : divisor(v->images, PIECE_BYTES / (channel * k->in));
}

/* How many pieces W is made of, all positions of all images. */
static int64_t pieces_of_w(const columns_t *k) {
    if (k->made != GRADD_CONV_MAKES_W || k->empty) return 0;
    return (k->v.images * k->y + k->length - 1) / k->length;
}

/* [images, groups] products, of which W is the left operand. */
static gradd_gemm_t product_of(const columns_t *k) {
    const gradd_conv_t *v = &k->v;
    const int64_t row = k->in * k->taps, group = k->out * row;
    gradd_gemm_t g = {.dtype = v->dtype, .alpha = 1, .batch_rank = 2};
    g.batch[0] = k->images, g.batch[1] = v->groups;
    g.a_batch[1] = group;
    g.n = g.b_k = k->y, g.b_n = 1;
    if (k->made == GRADD_CONV_MAKES_Y) {
        g.m = k->out, g.k = k->channels * k->taps;
        g.a_m = row, g.a_k = 1;
        g.accumulate = v->has_bias || k->channels < k->in;
    } else {
        g.m = k->channels * k->taps, g.k = k->out;
        g.a_m = 1, g.a_k = row;
        g.accumulate = k->direct && v->has_bias;
    }
    g.b_batch[1] = g.k * k->y, g.b_batch[0] = v->groups * g.b_batch[1];
    return g;
}

/* One product for each group, dy on the left. */
static gradd_gemm_t product_of_w(const columns_t *k) {
    gradd_gemm_t g = {.dtype = k->v.dtype, .alpha = 1, .batch_rank = 1, .accumulate = true};
    g.batch[0] = k->v.groups;
    g.m = k->out, g.n = k->in * k->taps, g.k = k->length;
    g.a_m = k->length, g.a_k = 1, g.a_batch[0] = g.m * k->length;
    g.b_k = 1, g.b_n = k->length, g.b_batch[0] = g.n * k->length;
    return g;
}

static size_t aligned(int64_t bytes) {
    return ((size_t)bytes + 63) & ~(size_t)63;
}

static gradd_status_t prepare(columns_t *k, int threads) {
    const gradd_conv_t *v = &k->v;
    const int64_t size = (int64_t)gradd_dtype_bytes(v->dtype);
    k->in = v->in / v->groups, k->out = v->out / v->groups;
    k->taps = gradd_conv_volume(v->kernel), k->y = gradd_conv_volume(v->y);
    k->direct = gradd_conv_is_pointwise(v) && k->made != GRADD_CONV_MAKES_W;
    k->empty = !v->images || !k->in || !k->out || !k->y;
    if (k->empty) return GRADD_OK;
    choose_pieces(k);
    const bool of_w = k->made == GRADD_CONV_MAKES_W;
    gradd_gemm_t g = of_w ? product_of_w(k) : product_of(k);
    g.threads = threads;
    GRADD_TRY(gradd_gemm_prepare(&g, &k->product));
    const int64_t columns =
        of_w ? v->in * k->taps * k->length : k->images * v->groups * k->channels * k->taps * k->y;
    k->columns_at = aligned((int64_t)k->product.workspace);
    k->y_at = k->columns_at + (k->direct ? 0 : aligned(columns * size));
    return GRADD_OK;
}

gradd_status_t gradd_conv_columns_prepare(const gradd_infer_t *c, gradd_prepared_t *out) {
    columns_t *k = calloc(1, sizeof *k);
    if (!k) return GRADD_FAIL(NOMEM, "convolution");
    gradd_status_t status = gradd_conv_of_node(c, &k->v, &k->made);
    if (!status) status = prepare(k, c->threads);
    if (status) {
        free(k);
        return status;
    }
    const int64_t y = k->v.out * k->length * (int64_t)gradd_dtype_bytes(k->v.dtype);
    *out = (gradd_prepared_t){.workspace = k->y_at + aligned(y),
                              .state = k,
                              .bytes = sizeof *k + k->product.bytes,
                              .parts = gradd_parts_of_steps(c, pieces_of_w(k))};
    return GRADD_OK;
}

void gradd_conv_columns_unprepare(gradd_prepared_t *prepared) {
    columns_t *k = prepared->state;
    if (k->product.state) gradd_gemm_unprepare(&k->product);
    free(k);
}

/* ---- patches --------------------------------------------------------------------------------- */

/* What one tap reads: the tap itself, and which positions of the two inner axes read from x. */
typedef struct tap_s {
    int64_t at[GRADD_CONV_AXES];
    int64_t from, to;         /* innermost axis */
    int64_t from_row, to_row; /* the one around it */
} tap_t;

static tap_t tap_of(const gradd_conv_t *v, int64_t tap) {
    const int64_t *n = v->kernel;
    tap_t t = {
        {tap / (n[1] * n[2]), tap / n[2] % n[1], tap % n[2]},
        0, 0, 0, 0
    };
    gradd_conv_within(v, 2, t.at[2], &t.from, &t.to);
    gradd_conv_within(v, 1, t.at[1], &t.from_row, &t.to_row);
    return t;
}

/* The row of x that row (i, j) of positions reads by the tap, -1: zeros. */
static int64_t row_read(const gradd_conv_t *v, const tap_t *t, int64_t i, int64_t j) {
    const int64_t a = gradd_conv_at(v, 0, i, t->at[0]);
    if (a < 0 || a >= v->x[0] || j < t->from_row || j >= t->to_row) return -1;
    return (a * v->x[1] + gradd_conv_at(v, 1, j, t->at[1])) * v->x[2];
}

#define T       float
#define NAME(x) x##_f32
#include "kernels/cpu/conv/conv_columns_of.h"
#undef T
#undef NAME
#define T       double
#define NAME(x) x##_f64
#include "kernels/cpu/conv/conv_columns_of.h"
#undef T
#undef NAME

gradd_status_t gradd_conv_columns(const gradd_launch_t *r) {
    const columns_t *k = r->state;
    const gradd_conv_memory_t m = gradd_conv_memory(r, k->made);
    const gradd_range_t pieces = gradd_part_of(r, pieces_of_w(k));
    return k->v.dtype == GRADD_DT_F32 ? make_f32(k, &m, pieces) : make_f64(k, &m, pieces);
}
