/* RandomNormalLike, RandomUniformLike, RandomNormal, RandomUniform and Bernoulli.
 *
 * All draw from Philox at (seed of the forward, node, element), see rng.h: a number does not depend
 * on threads, and is the same when a step is run again. Bernoulli(x) is 1 with probability x, which
 * is read per element; x outside 0..1 is refused. Drawn numbers have no gradient, as in PyTorch.
 * Numbers are made in double and rounded once, to f32, f64, bf16 or f16; Bernoulli gives any of
 * them, an integer or a boolean. An attribute "seed" fixes the numbers, as ONNX wants. With the
 * run's flag dropout_off numbers are fixed: uniform ones in the middle, normal ones half a
 * deviation above the mean, and an event happens if p > 0.5. gradd/check/modes.py
 * fixes PyTorch's numbers in the same way, so that the two can be compared.
 */
#include <math.h>
#include <string.h>

#include "kernels/contract/fault.h"
#include "kernels/contract/kernel.h"
#include "kernels/contract/op.h"
#include "kernels/cpu/half.h"
#include "kernels/cpu/parts.h"
#include "kernels/describe/dispatch.h"
#include "kernels/math/rng.h"
#include "kernels/rules/infer.h"

/* ---- kernels --------------------------------------------------------------------------------- */

static double normal_at(uint64_t seed, uint64_t node, uint64_t element) {
    const uint64_t low = element & ~(uint64_t)16;
    return gradd_rng_normal(gradd_rng_word(seed, node, low), gradd_rng_word(seed, node, low + 16),
                            element & 16);
}

typedef struct draw_s {
    uint64_t seed, node;
    bool normal, still;
    double a, b; /* mean and deviation, or low and width */
} draw_t;

static uint64_t seed_of(const gradd_launch_t *r) {
    const gradd_attr_t *fixed = gradd_attr_find(r->attrs, "seed");
    if (!fixed) return r->seed;
    float own = (float)fixed->f;
    uint64_t seed = 0;
    memcpy(&seed, &own, sizeof own);
    return seed;
}

static double number_at(const draw_t *d, int64_t i) {
    uint64_t e = (uint64_t)i;
    if (d->still) return d->a + d->b * 0.5;
    double unit = d->normal ? normal_at(d->seed, d->node, e)
                            : gradd_rng_uniform(gradd_rng_word(d->seed, d->node, e));
    return d->a + d->b * unit;
}

static void put(const gradd_view_t *y, int64_t i, double x) {
    switch (y->type.dtype) {
    case GRADD_DT_F32:
        ((float *)y->data)[i] = (float)x;
        break;
    case GRADD_DT_F64:
        ((double *)y->data)[i] = x;
        break;
    case GRADD_DT_BF16:
    case GRADD_DT_F16:
        gradd_half_put((uint16_t *)y->data + i, y->type.dtype, (float)x);
        break;
    case GRADD_DT_I32:
        ((int32_t *)y->data)[i] = (int32_t)x;
        break;
    case GRADD_DT_I64:
        ((int64_t *)y->data)[i] = (int64_t)x;
        break;
    default:
        ((uint8_t *)y->data)[i] = x != 0;
    }
}

static gradd_status_t compute_random(const gradd_launch_t *r) {
    int64_t n = gradd_type_count(&r->out[0].type);
    draw_t d = {.seed = seed_of(r), .node = r->node, .still = r->dropout_off};
    d.normal = !strncmp(r->op->name, "RandomNormal", 12);
    d.a = gradd_attr_float(r->attrs, d.normal ? "mean" : "low", 0);
    d.b = d.normal ? gradd_attr_float(r->attrs, "scale", 1)
                   : gradd_attr_float(r->attrs, "high", 1) - d.a;
    const gradd_range_t some = gradd_part_of(r, n);
#pragma omp parallel for schedule(static) if (n >= GRADD_PARALLEL_MIN)
    for (int64_t i = some.from; i < some.to; i++)
        put(&r->out[0], i, number_at(&d, i));
    return GRADD_OK;
}

/* Each number is a function of its place alone. */
static int parts_random(const gradd_infer_t *c) {
    enum { FEW = 4096 };
    return gradd_parts_of_tasks(c, gradd_type_count(&c->out[0]) / FEW);
}

/* A number takes as long as so many bytes take to move. */
static void cost_uniform(const gradd_infer_t *c, gradd_cost_t *cost) {
    cost->again = 150 * (double)gradd_type_count(&c->out[0]);
}
static void cost_normal(const gradd_infer_t *c, gradd_cost_t *cost) {
    cost->again = 600 * (double)gradd_type_count(&c->out[0]);
}

static double probability_at(const gradd_view_t *x, int64_t i) {
    if (x->type.dtype == GRADD_DT_F32) return (double)((const float *)x->data)[i];
    if (x->type.dtype == GRADD_DT_F64) return ((const double *)x->data)[i];
    return (double)gradd_half_f32((const uint16_t *)x->data + i, x->type.dtype);
}

static gradd_status_t compute_bernoulli(const gradd_launch_t *r) {
    int64_t n = gradd_type_count(&r->out[0].type), bad = n;
    uint64_t seed = seed_of(r);
    const gradd_range_t some = gradd_part_of(r, n);
#pragma omp parallel for schedule(static) reduction(min : bad) if (n >= GRADD_PARALLEL_MIN)
    for (int64_t i = some.from; i < some.to; i++) {
        double p = probability_at(&r->in[0], i);
        uint32_t drawn = gradd_rng_word(seed, r->node, (uint64_t)i);
        double word = r->dropout_off ? 0x1p31 : (double)drawn;
        if (!(p >= 0 && p <= 1) && i < bad) bad = i;
        put(&r->out[0], i, word < p * 0x1p32);
    }
    if (bad == n) return GRADD_OK;
    const double p = probability_at(&r->in[0], bad);
    gradd_fault_t fault = {.kind = GRADD_FAULT_PROBABILITY, .position = bad};
    memcpy(&fault.value, &p, sizeof p);
    return gradd_fault_fail(&fault);
}

/* ---- shape rules ----------------------------------------------------------------------------- */

#define T_DRAWN (GRADD_T_FLOAT)

static gradd_status_t check_dtype(const gradd_infer_t *c, gradd_dtype_t otherwise,
                                  uint32_t accepted) {
    GRADD_TRY(gradd_dtype_check(gradd_attr_int(c->attrs, "dtype", otherwise), &c->out[0].dtype));
    if (!(1u << c->out[0].dtype & accepted))
        return GRADD_FAIL(UNSUPPORTED, "random numbers of type %s",
                          gradd_dtype_name(c->out[0].dtype));
    return GRADD_OK;
}

static gradd_status_t infer_like(gradd_infer_t *c) {
    c->out[0] = c->in[0].type;
    return check_dtype(c, c->in[0].type.dtype, T_DRAWN);
}

static gradd_status_t infer_bernoulli(gradd_infer_t *c) {
    c->out[0] = c->in[0].type;
    return check_dtype(c, c->in[0].type.dtype, T_DRAWN | GRADD_T_INT | GRADD_T_BOOL);
}

static gradd_status_t infer_shape(gradd_infer_t *c) {
    const gradd_attr_t *shape = gradd_attr_find(c->attrs, "shape");
    if (shape->n > GRADD_MAX_RANK) return GRADD_FAIL(LIMIT, "rank %zu", shape->n);
    c->out[0].rank = (int)shape->n;
    memcpy(c->out[0].dims, shape->ints, sizeof shape->ints[0] * shape->n);
    return check_dtype(c, GRADD_DT_F32, T_DRAWN);
}

/* ---- rows ------------------------------------------------------------------------------------ */

#define DTYPE_SEED                                                                                 \
    {"dtype", GRADD_ATTR_INT, false}, {                                                            \
        "seed", GRADD_ATTR_FLOAT, false                                                            \
    }
#define NORMAL                                                                                     \
    {"mean", GRADD_ATTR_FLOAT, false}, {                                                           \
        "scale", GRADD_ATTR_FLOAT, false                                                           \
    }
#define UNIFORM                                                                                    \
    {"low", GRADD_ATTR_FLOAT, false}, {                                                            \
        "high", GRADD_ATTR_FLOAT, false                                                            \
    }
#define SHAPE {"shape", GRADD_ATTR_INTS, true}

/* Random numbers have no plain definition to compare with (tol = -1):
 * tests/c/kernels/test_dropout.c checks their distribution. */
GRADD_OPS(
    random,
    GRADD_OP("RandomNormalLike", "", 1, (1, 1), (1, 1), .flags = GRADD_OP_RANDOM | GRADD_OP_NO_GRAD,
             .attrs = GRADD_ATTR_LIST(DTYPE_SEED, NORMAL), .infer = infer_like,
             .ref = GRADD_REF(compute_random),
             .cases = GRADD_CASES({.text = "f32[3,5]", .tol = -1},
                                  {.text = "i64[40] | dtype=1 mean=2.0 scale=0.5", .tol = -1},
                                  {.text = "f32[2] | seed=3.0", .tol = -1},
                                  {.text = "f32[3,1001] | dtype=16", .tol = -1})),
    GRADD_OP("RandomUniformLike", "", 1, (1, 1), (1, 1),
             .flags = GRADD_OP_RANDOM | GRADD_OP_NO_GRAD,
             .attrs = GRADD_ATTR_LIST(DTYPE_SEED, UNIFORM), .infer = infer_like,
             .ref = GRADD_REF(compute_random),
             .cases = GRADD_CASES({.text = "f32[3,5]", .tol = -1},
                                  {.text = "f32[40] | low=-1.0 high=3.0", .tol = -1})),
    GRADD_OP("RandomNormal", "", 1, (0, 0), (1, 1), .flags = GRADD_OP_RANDOM | GRADD_OP_NO_GRAD,
             .attrs = GRADD_ATTR_LIST(DTYPE_SEED, NORMAL, SHAPE), .infer = infer_shape,
             .ref = GRADD_REF(compute_random),
             .cases = GRADD_CASES({.text = "| shape=[3,5]", .tol = -1},
                                  {.text = "| shape=[40] mean=2.0 scale=0.5 dtype=11", .tol = -1})),
    GRADD_OP("RandomUniform", "", 1, (0, 0), (1, 1), .flags = GRADD_OP_RANDOM | GRADD_OP_NO_GRAD,
             .attrs = GRADD_ATTR_LIST(DTYPE_SEED, UNIFORM, SHAPE), .infer = infer_shape,
             .ref = GRADD_REF(compute_random),
             .cases = GRADD_CASES({.text = "| shape=[3,50001]", .tol = -1},
                                  {.text = "| shape=[] low=-1.0 high=3.0", .tol = -1})),
    GRADD_OP("Bernoulli", "", 15, (1, 1), (1, 1),
             .flags = GRADD_OP_RANDOM | GRADD_OP_NO_GRAD | GRADD_OP_FLAT,
             .attrs = GRADD_ATTR_LIST(DTYPE_SEED), .infer = infer_bernoulli,
             .ref = GRADD_REF(compute_bernoulli), .types = {GRADD_T_FLOAT},
             .cases = GRADD_CASES({.text = "f32[3,5]:(0,1)", .tol = -1},
                                  {.text = "f32[50001]:(0,1) | dtype=9", .tol = -1},
                                  {.text = "f32[4]={0,1,0.5,0.25} | dtype=7", .tol = -1},
                                  {.text = "f32[3,100]:(0,1) | dtype=16", .tol = -1},
                                  {.text = "f32[3,100]:(0,1) | dtype=6", .tol = -1})));

#define DRAWS(title, measure)                                                                      \
    GRADD_KERNEL(title, "loop", .compute = compute_random, .parts = parts_random, .cost = measure)

GRADD_KERNELS(cpu, random, DRAWS("RandomNormalLike", cost_normal),
              DRAWS("RandomUniformLike", cost_uniform), DRAWS("RandomNormal", cost_normal),
              DRAWS("RandomUniform", cost_uniform),
              GRADD_KERNEL("Bernoulli", "loop", .types = {GRADD_T_ANY},
                           .compute = compute_bernoulli, .parts = parts_random,
                           .cost = cost_uniform));
