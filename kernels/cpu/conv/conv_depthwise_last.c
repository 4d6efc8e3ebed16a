/* Depthwise convolutions over channels-last tensors: vectors of channels. See conv.h.
 *
 * A table for each axis has, for every result index and tap, the index that is read, or -1: such a
 * tap reads a line of zeros. So paddings, strides and dilations, of y and of dx, are the same
 * loops: four positions of a row at a time, which share the weights of a tap, by two vectors of
 * channels. Positions that read the same taps are made together (those of dx by their remainder of
 * the stride). dW is a sum over positions, in f32 along a few rows and in double over these, for
 * each of a number of groups of images; the groups are added in order, so threads change no bit. */
#include "kernels/cpu/conv/conv.h"

#include <omp.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/parts.h"
#include "kernels/describe/dispatch.h"
#include "kernels/math/bf16.h"

enum {
    AXES = GRADD_CONV_AXES,
    SIDE = 4,     /* positions that are made at once */
    TAPS = 4,     /* of dW, the same */
    SEGMENT = 64, /* positions of a task */
    LEAST = 32,   /* positions of a sum in f32, where there are so many */
    CHUNK = 64,   /* channels of a task of dW */
    GROUPS = 8,   /* of images, at most */
    ZEROS = 64    /* channels that are read at once, at most */
};

typedef struct last_s {
    gradd_conv_t v;
    gradd_conv_made_t made;
    int threads;
    int64_t channels, taps, groups;
    const int64_t *from, *to;             /* sizes of what is read and of the result; dW: dy's */
    int64_t *reads[AXES];                 /* per axis: [to][kernel] */
    int64_t *order;                       /* positions of the last axis */
    size_t zeros_at, weights_at, sums_at; /* in the workspace */
    int64_t table[];
} last_t;

/* ---- preparation ----------------------------------------------------------------------------- */

static bool describe(const gradd_infer_t *c, gradd_conv_t *v, gradd_conv_made_t *made) {
    return !gradd_conv_of_node(c, v, made) && gradd_conv_is_depthwise(v) && v->in == v->out;
}

bool gradd_conv_depthwise_last_accepts(const gradd_infer_t *c) {
    gradd_conv_t v;
    gradd_conv_made_t made;
    return describe(c, &v, &made);
}

static int64_t read_at(const last_t *k, int axis, int64_t at, int64_t tap) {
    if (k->made == GRADD_CONV_MAKES_X) return gradd_conv_reader(&k->v, axis, at, tap);
    const int64_t i = gradd_conv_at(&k->v, axis, at, tap);
    return i < 0 || i >= k->v.x[axis] ? -1 : i;
}

static void fill_tables(last_t *k) {
    const int64_t step = k->made == GRADD_CONV_MAKES_X ? k->v.stride[AXES - 1] : 1;
    int64_t *next = k->table;
    for (int a = 0; a < AXES; a++) {
        k->reads[a] = next;
        for (int64_t at = 0; at < k->to[a]; at++)
            for (int64_t tap = 0; tap < k->v.kernel[a]; tap++)
                *next++ = read_at(k, a, at, tap);
    }
    k->order = next;
    for (int64_t first = 0; first < step; first++)
        for (int64_t at = first; at < k->to[AXES - 1]; at += step)
            *next++ = at;
}

static size_t put_room(int64_t bytes, size_t *workspace) {
    const size_t at = *workspace;
    *workspace += ((size_t)bytes + 63) & ~(size_t)63;
    return at;
}

gradd_status_t gradd_conv_depthwise_last_prepare(const gradd_infer_t *c, gradd_prepared_t *out) {
    gradd_conv_t v;
    gradd_conv_made_t made;
    size_t workspace = 0;
    if (!describe(c, &v, &made)) return GRADD_FAIL(INTERNAL, "a convolution that is not depthwise");
    const int64_t *to = made == GRADD_CONV_MAKES_X ? v.x : v.y;
    int64_t entries = to[AXES - 1];
    for (int a = 0; a < AXES; a++)
        entries += to[a] * v.kernel[a];
    const size_t bytes = sizeof(last_t) + (size_t)entries * sizeof(int64_t);
    last_t *k = calloc(1, bytes);
    if (!k) return GRADD_FAIL(NOMEM, "convolution");
    k->v = v, k->made = made;
    k->from = made == GRADD_CONV_MAKES_X ? k->v.y : k->v.x;
    k->to = made == GRADD_CONV_MAKES_X ? k->v.x : k->v.y;
    k->threads = c->threads ? c->threads : omp_get_max_threads();
    k->channels = v.in, k->taps = gradd_conv_volume(v.kernel);
    k->groups = v.images < GROUPS ? v.images : GROUPS;
    fill_tables(k);
    k->zeros_at = put_room(ZEROS * (int64_t)sizeof(float), &workspace);
    const int64_t each = k->taps * k->channels;
    if (made == GRADD_CONV_MAKES_W)
        k->sums_at = put_room(k->groups * each * (int64_t)sizeof(double), &workspace);
    else
        k->weights_at = put_room(each * (int64_t)sizeof(float), &workspace);
    *out = (gradd_prepared_t){.workspace = workspace, .state = k, .bytes = bytes};
    if (made == GRADD_CONV_MAKES_W)
        out->parts = gradd_parts_of_tasks(c, k->groups * ((k->channels + CHUNK - 1) / CHUNK));
    return GRADD_OK;
}

void gradd_conv_depthwise_last_unprepare(gradd_prepared_t *prepared) {
    free(prepared->state);
}

/* ---- launches -------------------------------------------------------------------------------- */

/* An image, and indices along the first two axes. */
typedef struct conv_row_s {
    int64_t image, at[2];
} conv_row_t;

/* Positions of a row of the result; of dW rows of dy, of all images. */
typedef struct task_s {
    const void *from, *zeros; /* x, or dy for dx */
    conv_row_t row;
    int64_t begin, end;
    const float *w;   /* [taps, channels] */
    const void *bias; /* NULL: none */
    void *to;         /* the row */
    const void *dy;
    double *sums; /* [taps, channels] */
} task_t;

/* Channels by two vectors, by one, and one by one. */
typedef struct steps_s {
    int64_t begin[4], width[3];
} steps_t;

static steps_t steps_of(bool wide, int64_t channels) {
    const int64_t one = (wide ? GRADD_WIDE_BYTES : GRADD_VECTOR_BYTES) / (int64_t)sizeof(float);
    const int64_t two = channels / (2 * one) * 2 * one, most = channels / one * one;
    return (steps_t){
        {0, two, most, channels},
        {2 * one, one, 1}
    };
}

static conv_row_t row_of(const int64_t *sizes, int64_t i) {
    return (conv_row_t){
        i / (sizes[0] * sizes[1]), {i / sizes[1] % sizes[0], i % sizes[1]}
    };
}

#define VECTOR(type, size, n)                                                                      \
    typedef type __attribute__((vector_size((size) * (n)), aligned(size), may_alias))
#define VECTORS_OF(n) VECTOR(float, 4, n) vec_t
#define T             float
#define NAME(x)       x##_f32
#define WIDE(x)       (x)
#define NARROW(x)     (x)
#define LOAD(p)       (*(const vec_t *)(p))
#include "kernels/cpu/conv/conv_depthwise_last_of.h"
#undef T
#undef NAME
#undef WIDE
#undef NARROW
#undef LOAD
#undef VECTORS_OF
#define VECTORS_OF(n)                                                                              \
    VECTOR(float, 4, n) vec_t;                                                                     \
    VECTOR(uint16_t, 2, n) half_t;                                                                 \
    VECTOR(uint32_t, 4, n) bits_t
#define T         gradd_bf16_t
#define NAME(x)   x##_bf16
#define WIDE(x)   gradd_bf16_f32(x)
#define NARROW(x) gradd_f32_bf16(x)
#define LOAD(p)   ((vec_t)(__builtin_convertvector(*(const half_t *)(p), bits_t) << 16))
#include "kernels/cpu/conv/conv_depthwise_last_of.h"
#undef T
#undef NAME
#undef WIDE
#undef NARROW
#undef LOAD

static bool is_f32(const last_t *k) {
    return k->v.dtype == GRADD_DT_F32;
}

static void turn_weights(const last_t *k, const void *w, float *to) {
    for (int64_t i = 0; i < k->channels * k->taps; i++) {
        float *at = &to[i % k->taps * k->channels + i / k->taps];
        *at = is_f32(k) ? ((const float *)w)[i] : gradd_bf16_f32(((const gradd_bf16_t *)w)[i]);
    }
}

/* y or dx. */
static void make_positions(const last_t *k, const gradd_conv_memory_t *m) {
    const bool back = k->made == GRADD_CONV_MAKES_X;
    const int64_t length = k->to[2], segments = (length + SEGMENT - 1) / SEGMENT;
    const int64_t n = k->v.images * k->to[0] * k->to[1] * segments;
    const bool many = n > 1 && n * SEGMENT * k->channels * k->taps >= GRADD_PARALLEL_MIN;
    const size_t row_bytes = (size_t)(length * k->channels) * gradd_dtype_bytes(k->v.dtype);
    float *w = (float *)(void *)((char *)m->workspace + k->weights_at);
    turn_weights(k, m->w, w);
#pragma omp parallel for schedule(static) num_threads(k->threads) if (many)
    for (int64_t i = 0; i < n; i++) {
        const int64_t row = i / segments, begin = i % segments * SEGMENT;
        const task_t t = {.from = back ? m->y : m->x,
                          .zeros = (char *)m->workspace + k->zeros_at,
                          .row = row_of(k->to, row),
                          .begin = begin,
                          .end = begin + SEGMENT < length ? begin + SEGMENT : length,
                          .w = w,
                          .bias = m->bias,
                          .to = (char *)(back ? m->x : m->y) + (size_t)row * row_bytes};
        (is_f32(k) ? make_row_f32 : make_row_bf16)(k, &t);
    }
}

static void add_groups(const last_t *k, const double *sums, void *w) {
    const int64_t each = k->taps * k->channels;
    for (int64_t i = 0; i < each; i++) {
        const int64_t at = i % k->taps * k->channels + i / k->taps;
        double sum = 0;
        for (int64_t g = 0; g < k->groups; g++)
            sum += sums[g * each + at];
        if (is_f32(k))
            ((float *)w)[i] = (float)sum;
        else
            ((gradd_bf16_t *)w)[i] = gradd_f32_bf16((float)sum);
    }
}

static void make_weights(const last_t *k, const gradd_launch_t *r, const gradd_conv_memory_t *m) {
    const int64_t chunks = (k->channels + CHUNK - 1) / CHUNK, each = k->taps * k->channels;
    const int64_t rows = k->to[0] * k->to[1];
    const gradd_range_t part = gradd_part_of(r, k->groups * chunks);
    double *sums = (double *)(void *)((char *)m->workspace + k->sums_at);
    const bool many = k->v.images * rows * k->to[2] * each >= GRADD_PARALLEL_MIN;
#pragma omp parallel for schedule(static) num_threads(k->threads) if (many)
    for (int64_t i = part.from; i < part.to; i++) {
        const int64_t group = i / chunks, first = i % chunks * CHUNK;
        const int64_t n = first + CHUNK < k->channels ? CHUNK : k->channels - first;
        const task_t t = {.from = m->x,
                          .zeros = (char *)m->workspace + k->zeros_at,
                          .begin = k->v.images * group / k->groups * rows,
                          .end = k->v.images * (group + 1) / k->groups * rows,
                          .dy = m->y,
                          .sums = sums + group * each};
        for (int64_t tap = 0; tap < k->taps; tap++)
            memset(&t.sums[tap * k->channels + first], 0, (size_t)n * sizeof(double));
        (is_f32(k) ? make_sums_f32 : make_sums_bf16)(k, &t, first, n);
    }
    if (gradd_part_is_last(r)) add_groups(k, sums, m->w);
}

gradd_status_t gradd_conv_depthwise_last(const gradd_launch_t *r) {
    const last_t *k = r->state;
    const gradd_conv_memory_t m = gradd_conv_memory(r, k->made);
    memset((char *)m.workspace + k->zeros_at, 0, ZEROS * sizeof(float));
    if (k->made == GRADD_CONV_MAKES_W)
        make_weights(k, r, &m);
    else
        make_positions(k, &m);
    return GRADD_OK;
}
