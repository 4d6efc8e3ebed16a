/* Dropout, RandomNormalLike and RandomUniformLike.
 *
 * y = x * m / (1 - p), where the mask m is 1 with probability 1 - p; without training_mode, or with
 * the run's flag dropout_off, y = x. The mask is a function of (seed, node, element), see rng.h:
 * backward saves nothing and computes it again. DropoutGrad(dy, ratio, training_mode) is internal
 * and carries the forward node's index in the attribute "node". p = 1 gives zeros, as in PyTorch.
 */
#include <math.h>
#include <string.h>

#include "kernels/cpu/copy.h"
#include "kernels/cpu/rng.h"
#include "kernels/dispatch.h"
#include "kernels/infer.h"
#include "kernels/op.h"
#include "kernels/rules.h"

/* ---- kernels --------------------------------------------------------------------------------- */

typedef struct drop_s {
    uint64_t seed, node;
    uint64_t limit; /* an element is kept if its word is not below */
    double scale;   /* 1 / (1 - p) */
    bool active;
} drop_t;

static bool given(const gradd_view_t *in, int n_in, int input) {
    return input < n_in && in[input].type.dtype != GRADD_DT_NONE;
}

static double ratio_at(const gradd_view_t *v) {
    return v->type.dtype == GRADD_DT_F64 ? *(const double *)v->data : *(const float *)v->data;
}

static gradd_status_t read_drop(const gradd_run_t *r, drop_t *d) {
    *d = (drop_t){.seed = r->seed};
    double p = given(r->in, r->n_in, 1) ? ratio_at(&r->in[1]) : 0.5;
    bool training = given(r->in, r->n_in, 2) && *(const uint8_t *)r->in[2].data;
    if (!(p >= 0 && p <= 1)) return GRADD_FAIL(INDEX, "the ratio is %g, not within 0 and 1", p);
    d->node = (uint64_t)gradd_attr_int(r->attrs, "node", (int64_t)r->node);
    d->limit = (uint64_t)(p * 0x1p32);
    d->scale = p < 1 ? 1 / (1 - p) : 0;
    d->active = training && !r->dropout_off && p > 0;
    return GRADD_OK;
}

/* Elements [first, end) of one group of 64, whose first element is 64 * group. */
#define DROP_RANGE(T)                                                                              \
    static void drop_range_##T(const drop_t *d, int64_t first, int64_t end, T *y, const T *x,      \
                               uint8_t *mask) {                                                    \
        uint32_t words[GRADD_RNG_GROUP];                                                           \
        T scale = (T)d->scale;                                                                     \
        uint32_t limit = (uint32_t)d->limit;                                                       \
        for (int64_t base = first; base < end; base += GRADD_RNG_GROUP) {                          \
            int64_t n = end - base < GRADD_RNG_GROUP ? end - base : GRADD_RNG_GROUP;               \
            gradd_rng_group(d->seed, d->node, (uint64_t)base / GRADD_RNG_GROUP, words);            \
            for (int64_t i = 0; i < n; i++)                                                        \
                y[base + i] = words[i] >= limit ? x[base + i] * scale : (T)0;                      \
            for (int64_t i = 0; i < n && mask; i++)                                                \
                mask[base + i] = words[i] >= limit;                                                \
        }                                                                                          \
    }

DROP_RANGE(float)
DROP_RANGE(double)

static void drop_chunk(const drop_t *d, gradd_dtype_t dtype, int64_t first, int64_t end, void *y,
                       const void *x, uint8_t *mask) {
    if (dtype == GRADD_DT_F32)
        drop_range_float(d, first, end, y, x, mask);
    else
        drop_range_double(d, first, end, y, x, mask);
}

#define CHUNK (64 * GRADD_RNG_GROUP)

static gradd_status_t run_dropout(const gradd_run_t *r) {
    const gradd_type_t *x = &r->in[0].type;
    int64_t n = gradd_type_count(x);
    uint8_t *mask = r->n_out > 1 ? r->out[1].data : NULL;
    drop_t d;
    GRADD_TRY(read_drop(r, &d));
    if (!d.active) {
        gradd_copy_bytes(r->out[0].data, r->in[0].data, (size_t)gradd_type_bytes(x));
        if (mask && n) memset(mask, 1, (size_t)n);
        return GRADD_OK;
    }
    if (d.limit > UINT32_MAX) { /* p = 1 */
        gradd_copy_zero(r->out[0].data, (size_t)gradd_type_bytes(x));
        if (mask) gradd_copy_zero(mask, (size_t)n);
        return GRADD_OK;
    }
#pragma omp parallel for schedule(static) if (n >= GRADD_PARALLEL_MIN)
    for (int64_t first = 0; first < n; first += CHUNK)
        drop_chunk(&d, x->dtype, first, first + CHUNK < n ? first + CHUNK : n, r->out[0].data,
                   r->in[0].data, mask);
    return GRADD_OK;
}

static gradd_status_t ref_dropout(const gradd_run_t *r) {
    int64_t n = gradd_type_count(&r->in[0].type);
    uint8_t *mask = r->n_out > 1 ? r->out[1].data : NULL;
    drop_t d;
    GRADD_TRY(read_drop(r, &d));
    GRADD_SWITCH_FLOAT(r->in[0].type.dtype, T, {
        T *y = r->out[0].data;
        const T *x = r->in[0].data;
        for (int64_t i = 0; i < n; i++) {
            bool keep = !d.active || gradd_rng_word(d.seed, d.node, (uint64_t)i) >= d.limit;
            y[i] = !d.active ? x[i] : keep ? x[i] * (T)d.scale : (T)0;
            if (mask) mask[i] = keep;
        }
    });
    return GRADD_OK;
}

/* Normal numbers by Box and Muller from two words: those of elements i and i + 16 of a group, for
 * i % 32 < 16; the pair gives both elements theirs. */
static double normal_at(uint64_t seed, uint64_t node, uint64_t element) {
    uint64_t low = element & ~(uint64_t)16;
    double u = ((double)gradd_rng_word(seed, node, low) + 1) * 0x1p-32;
    double v = (double)gradd_rng_word(seed, node, low + 16) * 0x1p-32;
    double radius = sqrt(-2 * log(u)), angle = 6.283185307179586 * v;
    return element & 16 ? radius * sin(angle) : radius * cos(angle);
}

static gradd_status_t run_random(const gradd_run_t *r) {
    int64_t n = gradd_type_count(&r->out[0].type);
    bool normal = !strcmp(r->op->name, "RandomNormalLike");
    const gradd_attr_t *fixed = gradd_attr_find(r->attrs, "seed");
    uint64_t seed = r->seed;
    float own = fixed ? (float)fixed->f : 0;
    if (fixed) seed = 0, memcpy(&seed, &own, sizeof own);
    double a =
        normal ? gradd_attr_float(r->attrs, "mean", 0) : gradd_attr_float(r->attrs, "low", 0);
    double b =
        normal ? gradd_attr_float(r->attrs, "scale", 1) : gradd_attr_float(r->attrs, "high", 1) - a;
    GRADD_SWITCH_FLOAT(r->out[0].type.dtype, T, {
        T *y = r->out[0].data;
        for (int64_t i = 0; i < n; i++) {
            uint64_t e = (uint64_t)i;
            double unit = normal ? normal_at(seed, r->node, e)
                                 : gradd_rng_uniform(gradd_rng_word(seed, r->node, e));
            y[i] = (T)(a + b * unit);
        }
    });
    return GRADD_OK;
}

/* ---- shape rules ----------------------------------------------------------------------------- */

static gradd_status_t infer_dropout(gradd_infer_t *c) {
    for (int i = 1; i < 3; i++)
        if (given(c->in, c->n_in, i) && gradd_type_count(&c->in[i].type) != 1)
            return GRADD_FAIL(GRAPH, "ratio and training_mode must be scalars");
    c->out[0] = c->in[0].type;
    if (c->n_out > 1) {
        c->out[1] = c->in[0].type;
        c->out[1].dtype = GRADD_DT_BOOL;
    }
    return GRADD_OK;
}

static gradd_status_t infer_random(gradd_infer_t *c) {
    gradd_dtype_t otherwise = c->in[0].type.dtype;
    c->out[0] = c->in[0].type;
    GRADD_TRY(gradd_dtype_check(gradd_attr_int(c->attrs, "dtype", otherwise), &c->out[0].dtype));
    if (!(1u << c->out[0].dtype & GRADD_T_FLOAT))
        return GRADD_FAIL(UNSUPPORTED, "random numbers of type %s",
                          gradd_dtype_name(c->out[0].dtype));
    return GRADD_OK;
}

/* ---- gradient rules -------------------------------------------------------------------------- */

static gradd_status_t grad_dropout(gradd_grad_t *g) {
    gradd_builder_t *b = g->b;
    if (!g->need[0]) return GRADD_OK;
    bool has_mode = g->n_in > 2 && g->in[2] != GRADD_NONE;
    const uint8_t *training = has_mode ? b->data(b, g->in[2]) : NULL;
    if (!has_mode || (training && !*training)) {
        g->din[0] = g->dout[0];
        return b->status;
    }
    gradd_val_t in[3] = {g->dout[0], g->in[1], g->in[2]};
    int64_t node = gradd_attr_int(g->attrs, "node", (int64_t)g->node);
    gradd_attr_t attr = gradd_make_int("node", node);
    g->din[0] = gradd_emit_attrs(b, "DropoutGrad", in, 3, &attr, 1);
    return b->status;
}

/* ---- rows ------------------------------------------------------------------------------------ */

/* PyTorch's exporter writes no seed; one that is given would make every step alike: ignored. */
static const gradd_attr_spec_t dropout_attrs[] = {
    {"seed", GRADD_ATTR_INT, false},
    {0}
};

GRADD_OPS(
    dropout,
    {
        .name = "Dropout",
        .domain = "",
        .since = 12,
        .min_in = 1,
        .max_in = 3,
        .min_out = 1,
        .max_out = 2,
        .flags = GRADD_OP_RANDOM,
        .inplace = 1,
        .no_diff = 6,
        .types = {GRADD_T_FLOAT, GRADD_T_FLOAT, GRADD_T_BOOL},
        .attrs = dropout_attrs,
        .infer = infer_dropout,
        .grad = grad_dropout,
        .run = run_dropout,
        .ref = ref_dropout,
        .cases = GRADD_CASES({.text = "f32[3,45] f32[]={0.3} bool[]={1}"},
                             {.text = "f32[3,45] f32[]={0.3} bool[]={1} -> 2"},
                             {.text = "f32[9,31] - bool[]={1} -> 2"},
                             {.text = "f32[5] f32[]={0.3}"},
          {.text = "f32[5] -> 2"},
                             {.text = "f32[70] f32[]={0.9} bool[]={0} -> 2"},
                             {.text = "f32[70] f32[]={1} bool[]={1} -> 2"},
                             {.text = "f32[2,2] f32[]={0} bool[]={1}"},
                             {.text = "f32[50001] f32[]={0.1} bool[]={1} -> 2"},
                             {.text = "f32[0,3] f32[]={0.5} bool[]={1}"}
          )
},
    {.name = "DropoutGrad",
     .domain = "com.gradd",
     .since = 1,
     .min_in = 1,
     .max_in = 3,
     .min_out = 1,
     .max_out = 1,
     .flags = GRADD_OP_RANDOM | GRADD_OP_INTERNAL,
     .inplace = 1,
     .no_diff = 6,
     .types = {GRADD_T_FLOAT, GRADD_T_FLOAT, GRADD_T_BOOL},
     .attrs = GRADD_ATTR_LIST({"node", GRADD_ATTR_INT, true}),
     .infer = infer_dropout,
     .grad = grad_dropout,
     .run = run_dropout,
     .ref = ref_dropout,
     .cases = GRADD_CASES({.text = "f32[3,45] f32[]={0.3} bool[]={1} | node=7"},
                          {.text = "f32[200] - bool[]={1} | node=0"})},
    {.name = "RandomNormalLike",
     .domain = "",
     .since = 1,
     .min_in = 1,
     .max_in = 1,
     .min_out = 1,
     .max_out = 1,
     .flags = GRADD_OP_RANDOM | GRADD_OP_NO_GRAD,
     .attrs = GRADD_ATTR_LIST({"dtype", GRADD_ATTR_INT, false}, {"mean", GRADD_ATTR_FLOAT, false},
                              {"scale", GRADD_ATTR_FLOAT, false},
                              {"seed", GRADD_ATTR_FLOAT, false}),
     .infer = infer_random,
     .run = run_random,
     .cases = GRADD_CASES({.text = "f32[3,5]", .tol = -1},
                          {.text = "i64[40] | dtype=1 mean=2.0 scale=0.5", .tol = -1},
                          {.text = "f32[2] | seed=3.0", .tol = -1})},
    {.name = "RandomUniformLike",
     .domain = "",
     .since = 1,
     .min_in = 1,
     .max_in = 1,
     .min_out = 1,
     .max_out = 1,
     .flags = GRADD_OP_RANDOM | GRADD_OP_NO_GRAD,
     .attrs = GRADD_ATTR_LIST({"dtype", GRADD_ATTR_INT, false}, {"low", GRADD_ATTR_FLOAT, false},
                              {"high", GRADD_ATTR_FLOAT, false}, {"seed", GRADD_ATTR_FLOAT, false}),
     .infer = infer_random,
     .run = run_random,
     .cases = GRADD_CASES({.text = "f32[3,5]", .tol = -1},
                          {.text = "f32[40] | low=-1.0 high=3.0", .tol = -1})});
