/* Depthwise convolutions, channel by channel, without columns. See conv.h.
 *
 * A channel is put into a field: its elements between the zeros of the padding, and, with strides,
 * apart by their index modulo the stride (phases), so that every tap of all positions reads a
 * contiguous line of the field from an offset of its own on. All results of a channel are then one
 * line of sums; what lies between its rows is dropped. dx is the same of dy, spread by the strides,
 * with the taps the other way round. dW is a sum of products of two lines for each tap, per image
 * in lanes and over images in double. A thread has a field and a line of its own; its zeros are
 * written once. */
#include "kernels/cpu/conv/conv.h"

#include <omp.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/parts.h"
#include "kernels/describe/dispatch.h"

enum { AXES = GRADD_CONV_AXES, GROUP_BYTES = 256, LANE_BYTES = 64, TAPS = 4 };
#define MOST_EACH  4                   /* channels of y for one of x: each puts x once more */
#define MOST_BYTES ((int64_t)64 << 20) /* of a field */

/* What is put into the field: element i of an axis at i step + front. */
typedef struct depthwise_source_s {
    int64_t size[AXES], step[AXES], front[AXES];
    int64_t from, to; /* elements of the last axis that lie in the field */
} depthwise_source_t;

typedef struct depthwise_s {
    gradd_conv_t v;
    gradd_conv_made_t made;
    int threads;
    int64_t each; /* channels of y for one of x */
    int64_t x, y; /* elements of a channel */
    int64_t taps;
    int64_t phase[AXES], field[AXES]; /* phases, and sizes of each */
    int64_t block;                    /* elements of a phase */
    int64_t result[AXES], length;     /* sizes of the result (dW: of dy), its length as a line */
    depthwise_source_t source;
    size_t field_bytes, line_bytes, total_bytes; /* of a thread */
    int64_t offset[];                            /* of every tap in the field */
} depthwise_t;

/* Scratch of a thread. */
typedef struct depthwise_room_s {
    void *field, *line;
    double *total;
} depthwise_room_t;

/* ---- preparation ----------------------------------------------------------------------------- */

/* Sizes of the field along one axis; false: they are too large. */
static void place_axis(depthwise_t *k, int a) {
    const gradd_conv_t *v = &k->v;
    const int64_t reach = (v->kernel[a] - 1) * v->dilation[a];
    const bool back = k->made == GRADD_CONV_MAKES_X;
    k->phase[a] = back ? 1 : v->stride[a];
    k->result[a] = back ? v->x[a] : v->y[a];
    k->source.size[a] = back ? v->y[a] : v->x[a];
    k->source.step[a] = back ? v->stride[a] : 1;
    k->source.front[a] = back ? reach - v->begin[a] : v->begin[a];
    const int64_t all = (k->result[a] - 1) * k->phase[a] + reach + 1;
    k->field[a] = (all + k->phase[a] - 1) / k->phase[a];
}

static void place(depthwise_t *k) {
    for (int a = 0; a < AXES; a++)
        place_axis(k, a);
    const int64_t *f = k->field, *n = k->result;
    k->length = n[0] && n[1] && n[2] ? ((n[0] - 1) * f[1] + n[1] - 1) * f[2] + n[2] : 0;
    depthwise_source_t *s = &k->source;
    const int64_t step = s->step[2], front = s->front[2], room = f[2] * k->phase[2] - front;
    s->from = front < 0 ? (step - 1 - front) / step : 0;
    s->to = room > 0 ? (room + step - 1) / step : 0;
    if (s->to > s->size[2]) s->to = s->size[2];
    if (s->from > s->to) s->from = s->to;
}

/* Bytes of a field, 0: more than it may have. */
static int64_t field_bytes(const depthwise_t *k) {
    double all = (double)gradd_dtype_bytes(k->v.dtype);
    for (int a = 0; a < AXES; a++)
        all *= (double)k->field[a] * (double)k->phase[a];
    return all > (double)MOST_BYTES ? 0 : (int64_t)all + GROUP_BYTES;
}

static bool describe(depthwise_t *k, const gradd_infer_t *c) {
    if (gradd_conv_of_node(c, &k->v, &k->made)) return false;
    const gradd_conv_t *v = &k->v;
    if (!gradd_conv_is_depthwise(v) || v->out > v->in * MOST_EACH) return false;
    k->each = v->out / v->in;
    place(k);
    return field_bytes(k) > 0;
}

bool gradd_conv_depthwise_accepts(const gradd_infer_t *c) {
    depthwise_t k = {.taps = 0};
    return describe(&k, c);
}

/* Where an element of the field lies, by its indices along the padded axes. */
static int64_t field_at(const depthwise_t *k, const int64_t *at) {
    int64_t phase = 0, place = 0;
    for (int a = 0; a < AXES; a++) {
        phase = phase * k->phase[a] + at[a] % k->phase[a];
        place = place * k->field[a] + at[a] / k->phase[a];
    }
    return phase * k->block + place;
}

/* The first element of a row of the field, -1: there is no such row. */
static int64_t field_row(const depthwise_t *k, int64_t z, int64_t y) {
    if (z < 0 || y < 0 || z >= k->field[0] * k->phase[0] || y >= k->field[1] * k->phase[1])
        return -1;
    return field_at(k, (int64_t[]){z, y, 0});
}

static void find_offsets(depthwise_t *k) {
    const int64_t *n = k->v.kernel;
    for (int64_t tap = 0; tap < k->taps; tap++) {
        int64_t at[AXES] = {tap / (n[1] * n[2]), tap / n[2] % n[1], tap % n[2]};
        for (int a = 0; a < AXES; a++) {
            if (k->made == GRADD_CONV_MAKES_X) at[a] = n[a] - 1 - at[a];
            at[a] *= k->v.dilation[a];
        }
        k->offset[tap] = field_at(k, at);
    }
}

static size_t aligned(int64_t bytes) {
    return ((size_t)bytes + 63) & ~(size_t)63;
}

/* Each is a task. */
static int64_t plane_count(const depthwise_t *k) {
    const gradd_conv_t *v = &k->v;
    const int64_t planes[] = {[GRADD_CONV_MAKES_Y] = v->images * v->out,
                              [GRADD_CONV_MAKES_X] = v->images * v->in,
                              [GRADD_CONV_MAKES_W] = v->out};
    return planes[k->made];
}

gradd_status_t gradd_conv_depthwise_prepare(const gradd_infer_t *c, gradd_prepared_t *out) {
    gradd_conv_t v;
    gradd_conv_made_t made;
    GRADD_TRY(gradd_conv_of_node(c, &v, &made));
    const int64_t taps = gradd_conv_volume(v.kernel);
    const size_t bytes = sizeof(depthwise_t) + (size_t)taps * sizeof(int64_t);
    depthwise_t *k = calloc(1, bytes);
    if (!k) return GRADD_FAIL(NOMEM, "convolution");
    if (!describe(k, c)) {
        free(k);
        return GRADD_FAIL(INTERNAL, "a convolution that is not depthwise");
    }
    k->threads = c->threads ? c->threads : omp_get_max_threads();
    k->taps = taps;
    k->x = gradd_conv_volume(v.x), k->y = gradd_conv_volume(v.y);
    k->block = gradd_conv_volume(k->field);
    find_offsets(k);
    const int64_t size = (int64_t)gradd_dtype_bytes(v.dtype);
    k->field_bytes = aligned(field_bytes(k));
    k->line_bytes = aligned(k->length * size + GROUP_BYTES);
    k->total_bytes = aligned(taps * (int64_t)sizeof(double));
    const size_t room = k->field_bytes + k->line_bytes + k->total_bytes;
    *out = (gradd_prepared_t){.workspace = room * (size_t)k->threads,
                              .state = k,
                              .bytes = bytes,
                              .parts = gradd_parts_of_tasks(c, plane_count(k))};
    return GRADD_OK;
}

void gradd_conv_depthwise_unprepare(gradd_prepared_t *prepared) {
    free(prepared->state);
}

/* ---- launches -------------------------------------------------------------------------------- */

#define T       float
#define NAME(x) x##_f32
#include "kernels/cpu/conv/conv_depthwise_of.h"
#undef T
#undef NAME
#define T       double
#define NAME(x) x##_f64
#include "kernels/cpu/conv/conv_depthwise_of.h"
#undef T
#undef NAME

static depthwise_room_t room_of(const depthwise_t *k, void *workspace) {
    const size_t each = k->field_bytes + k->line_bytes + k->total_bytes;
    char *at = (char *)workspace + each * (size_t)omp_get_thread_num();
    memset(at, 0, k->field_bytes + k->line_bytes);
    return (depthwise_room_t){at, at + k->field_bytes,
                              (double *)(at + k->field_bytes + k->line_bytes)};
}

gradd_status_t gradd_conv_depthwise(const gradd_launch_t *r) {
    const depthwise_t *k = r->state;
    const gradd_conv_memory_t m = gradd_conv_memory(r, k->made);
    const int64_t n = plane_count(k);
    const gradd_range_t part = gradd_part_of(r, n);
    const bool many = n * k->length * k->taps >= GRADD_PARALLEL_MIN && n > 1;
#pragma omp parallel num_threads(k->threads) if (many)
    {
        const depthwise_room_t room = room_of(k, m.workspace);
#pragma omp for schedule(static)
        for (int64_t at = part.from; at < part.to; at++)
            (k->v.dtype == GRADD_DT_F32 ? plane_f32 : plane_f64)(k, &m, at, &room);
    }
    return GRADD_OK;
}
