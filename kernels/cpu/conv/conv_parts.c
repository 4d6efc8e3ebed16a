/* Convolutions by oneDNN in parts: of some images each, or of a band of rows of one. See conv.h.
 *
 * Rows are those along the outermost axis, which lie one behind the other where x and y are
 * channels-last. A band of the result is a convolution of its own, of the rows of the other tensor
 * that it touches. Those within an image are alike, so that few primitives serve all parts.
 */
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/conv/conv.h"
#include "kernels/cpu/half.h"
#include "kernels/cpu/parts.h"
#include "kernels/describe/dispatch.h"

/* Operations of a part for each byte of the weight, which the library reorders for each, or of
 * which there is one more sum: that costs less than a fiftieth of them. */
#define LEAST_FLOPS 1500.0
#define LEAST_ROWS  2 /* of a band */
#define KINDS       5 /* the first band, the last one, those beside them, and all others */

typedef struct conv_parts_s {
    gradd_conv_t v;
    gradd_conv_made_t made;
    int64_t each;        /* images of each part but the last; 1 if there are bands */
    int64_t bands, rows; /* of an image; of each band but the last */
    int64_t parts;
    bool wide;               /* parts of a weight's gradient are f32, which the last one rounds */
    size_t sum_at, total_at; /* in the workspace: a part's own, and that of all if it is wide */
    gradd_conv_t kind[KINDS];
    gradd_prepared_t prepared[KINDS];
    int n_kinds;
} conv_parts_t;

static int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}
static int64_t larger(int64_t a, int64_t b) {
    return a > b ? a : b;
}
static int64_t over(int64_t a, int64_t b) { /* rounded up; b > 0 */
    return a > 0 ? (a + b - 1) / b : -(-a / b);
}

/* ---- what a part is -------------------------------------------------------------------------- */

static int outermost(const gradd_conv_t *v) {
    return GRADD_CONV_AXES - v->axes;
}

/* Of the result, or of y for a weight's gradient. */
static int64_t row_count(const conv_parts_t *k) {
    return (k->made == GRADD_CONV_MAKES_X ? k->v.x : k->v.y)[outermost(&k->v)];
}

/* A relation between some of the images or rows of x and y, and where these begin. */
typedef struct conv_piece_s {
    gradd_conv_t v;
    int64_t x_image, x_row, y_image, y_row;
} conv_piece_t;

/* Rows [from, to) of x, and all of y that reads them. */
static void take_x(conv_piece_t *p, int64_t from, int64_t to) {
    gradd_conv_t *v = &p->v;
    const int a = outermost(v);
    const int64_t reach = (v->kernel[a] - 1) * v->dilation[a], begin = v->begin[a];
    p->x_row = from;
    p->y_row = larger(0, over(from + begin - reach, v->stride[a]));
    const int64_t end = smaller(v->y[a], over(to + begin, v->stride[a]));
    v->x[a] = to - from, v->y[a] = end - p->y_row;
    v->begin[a] = begin + from - p->y_row * v->stride[a];
}

/* Rows [from, to) of y, and all of x that they read. */
static void take_y(conv_piece_t *p, int64_t from, int64_t to) {
    gradd_conv_t *v = &p->v;
    const int a = outermost(v);
    const int64_t first = gradd_conv_at(v, a, from, 0);
    const int64_t end = gradd_conv_at(v, a, to - 1, v->kernel[a] - 1) + 1;
    p->y_row = from, p->x_row = larger(0, first);
    v->y[a] = to - from, v->x[a] = smaller(v->x[a], end) - p->x_row;
    v->begin[a] = p->x_row - first;
}

static conv_piece_t piece_of(const conv_parts_t *k, int64_t part) {
    conv_piece_t p = {.v = k->v};
    const int64_t image = part / k->bands * k->each, from = part % k->bands * k->rows;
    p.x_image = p.y_image = image;
    p.v.images = smaller(k->each, k->v.images - image);
    if (k->bands == 1) return p;
    const int64_t to = smaller(from + k->rows, row_count(k));
    if (k->made == GRADD_CONV_MAKES_X)
        take_x(&p, from, to);
    else
        take_y(&p, from, to);
    return p;
}

/* The kind of a part that is prepared; n_kinds: none. */
static int kind_of(const conv_parts_t *k, const gradd_conv_t *v) {
    const int a = outermost(v);
    int i = 0;
    while (i < k->n_kinds && (k->kind[i].images != v->images || k->kind[i].x[a] != v->x[a] ||
                              k->kind[i].y[a] != v->y[a] || k->kind[i].begin[a] != v->begin[a]))
        i++;
    return i;
}

/* ---- preparation ----------------------------------------------------------------------------- */

static size_t weight_bytes(const gradd_conv_t *v) {
    const gradd_type_t w = gradd_conv_w_type(v);
    return sizeof(float) * (size_t)gradd_type_count(&w);
}

/* So many parts are worth it, of those that are asked for. */
static int64_t worth(const gradd_infer_t *c, const gradd_conv_t *v) {
    gradd_cost_t cost = {0};
    gradd_conv_cost(c, &cost);
    const double most = cost.flops / (LEAST_FLOPS * ((double)weight_bytes(v) + 1));
    return most < c->parts ? (int64_t)most : c->parts;
}

static void choose_whole(conv_parts_t *k) {
    k->each = k->v.images, k->bands = k->parts = 1;
    k->wide = false;
}

/* Images are apart, but for a weight's gradient, which is a sum over them. */
static void choose_images(conv_parts_t *k, const gradd_infer_t *c) {
    const bool sums = k->made == GRADD_CONV_MAKES_W;
    const int64_t parts = sums ? worth(c, &k->v) : c->parts;
    choose_whole(k);
    if (c->parts < 2 || parts < 2 || k->v.images < 2) return;
    k->each = over(k->v.images, parts), k->parts = over(k->v.images, k->each);
    k->wide = sums && k->parts > 1 && k->v.dtype != GRADD_DT_F32;
}

/* False: there are images enough, or too few rows. */
static bool choose_bands(conv_parts_t *k, const gradd_infer_t *c) {
    const int64_t step = k->made == GRADD_CONV_MAKES_X ? k->v.stride[outermost(&k->v)] : 1;
    const int64_t parts = c->parts < 2 ? 0 : worth(c, &k->v), rows = row_count(k);
    if (!k->v.last || !k->v.images || parts < 2 * k->v.images) return false;
    k->rows = larger(LEAST_ROWS, over(rows, parts / k->v.images));
    k->rows = over(k->rows, step) * step;
    k->each = 1, k->bands = over(rows, k->rows), k->parts = k->bands * k->v.images;
    k->wide = k->made == GRADD_CONV_MAKES_W && k->v.dtype != GRADD_DT_F32;
    return k->bands > 1;
}

static gradd_status_t prepare_part(conv_parts_t *k, int64_t part, bool *out_fits) {
    const gradd_conv_t v = piece_of(k, part).v;
    const gradd_dtype_t dtype = k->wide ? GRADD_DT_F32 : v.dtype;
    const int kind = kind_of(k, &v);
    if (kind < k->n_kinds) return GRADD_OK;
    *out_fits = kind < KINDS && (k->parts == 1 || gradd_conv_onednn_has(&v, k->made, dtype));
    if (!*out_fits) return GRADD_OK;
    GRADD_TRY(gradd_conv_onednn_prepare(&v, k->made, dtype, &k->prepared[kind]));
    k->kind[k->n_kinds++] = v;
    return GRADD_OK;
}

static void unprepare(conv_parts_t *k) {
    while (k->n_kinds)
        gradd_conv_onednn_unprepare(&k->prepared[--k->n_kinds]);
}

static gradd_status_t prepare_all(conv_parts_t *k, bool *out_fits) {
    gradd_status_t status = GRADD_OK;
    *out_fits = true;
    for (int64_t part = 0; part < k->parts && !status && *out_fits; part++)
        status = prepare_part(k, part, out_fits);
    if (status || !*out_fits) unprepare(k);
    return status;
}

static gradd_status_t prepare(conv_parts_t *k, const gradd_infer_t *c) {
    bool fits = false;
    if (choose_bands(k, c)) GRADD_TRY(prepare_all(k, &fits));
    if (fits) return GRADD_OK;
    choose_images(k, c);
    GRADD_TRY(prepare_all(k, &fits));
    if (fits) return GRADD_OK;
    choose_whole(k);
    return prepare_all(k, &fits);
}

static size_t aligned(size_t bytes) {
    return (bytes + 63) & ~(size_t)63;
}

static void describe(conv_parts_t *k, gradd_prepared_t *out) {
    const size_t sum = k->made == GRADD_CONV_MAKES_W && k->parts > 1 ? weight_bytes(&k->v) : 0;
    out->bytes = sizeof *k;
    for (int i = 0; i < k->n_kinds; i++) {
        out->bytes += k->prepared[i].bytes;
        if (k->sum_at < k->prepared[i].workspace) k->sum_at = k->prepared[i].workspace;
    }
    k->sum_at = aligned(k->sum_at);
    k->total_at = k->sum_at + aligned(sum);
    out->workspace = k->total_at + (k->wide ? sum : 0);
    out->parts = k->parts > 1 ? (int)k->parts : 0;
}

gradd_status_t gradd_conv_parts_prepare(const gradd_infer_t *c, gradd_prepared_t *out) {
    conv_parts_t *k = calloc(1, sizeof *k);
    if (!k) return GRADD_FAIL(NOMEM, "convolution");
    gradd_status_t status = gradd_conv_of_node(c, &k->v, &k->made);
    if (!status) status = prepare(k, c);
    if (status) {
        free(k);
        return status;
    }
    *out = (gradd_prepared_t){.state = k};
    describe(k, out);
    return GRADD_OK;
}

void gradd_conv_parts_unprepare(gradd_prepared_t *prepared) {
    unprepare(prepared->state);
    free(prepared->state);
}

/* ---- launches -------------------------------------------------------------------------------- */

static void add(float *to, const float *from, int64_t n) {
#pragma omp parallel for simd schedule(static) if (n >= GRADD_PARALLEL_MIN)
    for (int64_t i = 0; i < n; i++)
        to[i] += from[i];
}

/* Where an image and a row of it lie, in bytes from the first; `size` is that of a channel. */
static int64_t place(const gradd_conv_t *v, const int64_t *size, int64_t channels, int64_t image,
                     int64_t row) {
    const int64_t all = gradd_conv_volume(size) * channels, rows = size[outermost(v)];
    return (image * all + (row ? all / rows * row : 0)) * (int64_t)gradd_dtype_bytes(v->dtype);
}

gradd_status_t gradd_conv_parts(const gradd_launch_t *r) {
    const conv_parts_t *k = r->state;
    const gradd_conv_t *v = &k->v;
    const conv_piece_t p = piece_of(k, r->part);
    gradd_conv_memory_t m = gradd_conv_memory(r, k->made);
    void *out = m.w, *total = k->wide ? (char *)r->workspace + k->total_at : m.w;
    m.x = (char *)m.x + place(v, v->x, v->in, p.x_image, p.x_row);
    m.y = (char *)m.y + place(v, v->y, v->out, p.y_image, p.y_row);
    if (k->made != GRADD_CONV_MAKES_W)
        return gradd_conv_onednn(k->prepared[kind_of(k, &p.v)].state, &m);
    m.w = r->part ? (char *)r->workspace + k->sum_at : total;
    GRADD_TRY(gradd_conv_onednn(k->prepared[kind_of(k, &p.v)].state, &m));
    const int64_t n = (int64_t)(weight_bytes(v) / sizeof(float));
    if (r->part) add(total, m.w, n);
    if (k->wide && gradd_part_is_last(r)) gradd_half_narrow(out, total, v->dtype, n);
    return GRADD_OK;
}
