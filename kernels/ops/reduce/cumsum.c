/* CumSum: running sum along one axis.
 *
 * Math: z_i = sum of x_j for j <= i (exclusive: j < i; reverse: from the end). Shapes:
 * [outer, n, inner]. Floats accumulate in double. Nothing is saved: the gradient is the running sum
 * of dz in the opposite direction. */
#include <string.h>

#include "kernels/contract/kernel.h"
#include "kernels/cpu/pick.h"
#include "kernels/describe/dispatch.h"
#include "kernels/describe/lanes.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rules.h"

/* ---- kernels -------------------------------------------------------------------------------- */

static gradd_status_t axis_of(const gradd_view_t *view, int rank, int *out_axis) {
    return gradd_axis(gradd_pick_index(view, 0), rank, false, out_axis);
}

gradd_status_t gradd_lanes_of_cumsum(const gradd_launch_t *r, gradd_lanes_t *out) {
    int axis;
    GRADD_TRY(axis_of(&r->in[1], r->in[0].type.rank, &axis));
    *out = gradd_lanes_of(&r->in[0].type, axis);
    return GRADD_OK;
}

/* Neighbouring lanes that are walked together, row by row: so an axis that is not the last takes
 * the time of memory, too. */
enum { BLOCK = 256 };

typedef union lane_sum_u {
    GRADD_ACC(double) real;
    GRADD_ACC(int64_t) whole;
} lane_sum_t;

/* Some steps of the sums of a block of lanes. */
typedef struct stretch_s {
    int64_t base, lanes;    /* element of the first lane; neighbours */
    int64_t from, to, step; /* steps along the axis, of so many elements */
    int64_t n;              /* of the whole axis */
    bool exclusive, reverse;
} stretch_t;

#define STRETCH(T, name, WRAPS)                                                                    \
    static void name(const stretch_t *s, const T *x, T *z, GRADD_ACC(T) * sums) {                  \
        for (int64_t i = s->from; i < s->to; i++) {                                                \
            const int64_t at = s->base + (s->reverse ? s->n - 1 - i : i) * s->step;                \
            for (int64_t k = 0; k < s->lanes; k++) {                                               \
                const GRADD_ACC(T) before = sums[k];                                               \
                sums[k] = WRAPS(GRADD_ACC(T), before, x[at + k]);                                  \
                z[at + k] = (T)(s->exclusive ? before : sums[k]);                                  \
            }                                                                                      \
        }                                                                                          \
    }
#define ADD(ACC, a, b)  ((a) + (b))
#define WRAP(ACC, a, b) ((ACC)((uint64_t)(a) + (uint64_t)(b)))
STRETCH(float, stretch_f32, ADD)
STRETCH(double, stretch_f64, ADD)
STRETCH(int32_t, stretch_i32, WRAP)
STRETCH(int64_t, stretch_i64, WRAP)

static void add_up(gradd_dtype_t dtype, const stretch_t *s, const void *x, void *z, void *sums) {
    switch (dtype) {
    case GRADD_DT_F32:
        stretch_f32(s, x, z, sums);
        break;
    case GRADD_DT_F64:
        stretch_f64(s, x, z, sums);
        break;
    case GRADD_DT_I32:
        stretch_i32(s, x, z, sums);
        break;
    default:
        stretch_i64(s, x, z, sums);
    }
}

static int64_t blocks_of(const gradd_lanes_t *l) {
    return l->outer * ((l->inner + BLOCK - 1) / BLOCK);
}

/* Parts are blocks of lanes, where there are enough; else steps of all of them, whose sums wait in
 * the workspace for the next part. */
static bool parts_are_blocks(const gradd_lanes_t *l, int parts) {
    return blocks_of(l) >= parts;
}

static gradd_status_t compute_cumsum(const gradd_launch_t *r) {
    const gradd_type_t *t = &r->in[0].type;
    const bool exclusive = gradd_attr_int(r->attrs, "exclusive", 0);
    const bool reverse = gradd_attr_int(r->attrs, "reverse", 0);
    gradd_lanes_t l;
    GRADD_TRY(gradd_lanes_of_cumsum(r, &l));
    const int64_t parts = r->parts > 1 ? r->parts : 1, across = (l.inner + BLOCK - 1) / BLOCK;
    const bool by_blocks = parts_are_blocks(&l, (int)parts);
    const int64_t blocks = blocks_of(&l), first = by_blocks ? blocks * r->part / parts : 0;
    const int64_t last = by_blocks ? blocks * (r->part + 1) / parts : blocks;
#pragma omp parallel for schedule(static) if (gradd_type_count(t) >= GRADD_PARALLEL_MIN)
    for (int64_t block = first; block < last; block++) {
        lane_sum_t own[BLOCK], *sums = by_blocks ? own : (lane_sum_t *)r->workspace + block * BLOCK;
        const int64_t lane = block % across * BLOCK;
        const stretch_t s = {block / across * l.n * l.inner + lane,
                             l.inner - lane < BLOCK ? l.inner - lane : BLOCK,
                             by_blocks ? 0 : l.n * r->part / parts,
                             by_blocks ? l.n : l.n * (r->part + 1) / parts,
                             l.inner,
                             l.n,
                             exclusive,
                             reverse};
        if (by_blocks || !r->part) memset(sums, 0, sizeof own);
        add_up(t->dtype, &s, r->in[0].data, r->out[0].data, sums);
    }
    return GRADD_OK;
}

/* Where the axis is known. */
static gradd_status_t prepare_cumsum(const gradd_infer_t *c, gradd_prepared_t *out) {
    int axis;
    *out = (gradd_prepared_t){0};
    if (c->parts < 2 || !c->in[1].data) return GRADD_OK;
    GRADD_TRY(axis_of(&c->in[1], c->in[0].type.rank, &axis));
    const gradd_lanes_t l = gradd_lanes_of(&c->in[0].type, axis);
    out->parts = c->parts;
    if (!parts_are_blocks(&l, c->parts))
        out->workspace = sizeof(lane_sum_t) * BLOCK * (size_t)blocks_of(&l);
    return GRADD_OK;
}

/* A sum along the last axis waits for each addition, as long as 60 bytes take to move; a thread has
 * one such sum at a time, and without as many of them as threads some threads have none. Along
 * another axis the rows of a block lie apart in memory, which takes about three times as long. */
static void cost_cumsum(const gradd_infer_t *c, gradd_cost_t *cost) {
    int axis;
    if (!c->in[1].data || axis_of(&c->in[1], c->in[0].type.rank, &axis)) return;
    const gradd_lanes_t l = gradd_lanes_of(&c->in[0].type, axis);
    const int64_t threads = c->threads > 1 ? c->threads : 1;
    const int64_t blocks = blocks_of(&l), working = blocks < threads ? blocks : threads;
    if (!working) return;
    const double idle = (double)threads / (double)working;
    cost->again = (l.inner > 1 ? 150 : 60) * idle * (double)gradd_type_count(&c->in[0].type);
}

/* ---- shape rule ----------------------------------------------------------------------------- */

static gradd_status_t infer_cumsum(gradd_infer_t *c) {
    int axis;
    if (gradd_type_count(&c->in[1].type) != 1) return GRADD_FAIL(GRAPH, "axis must be one number");
    if (!c->in[0].type.rank) return GRADD_FAIL(GRAPH, "a scalar has no axis");
    if (c->in[1].data) GRADD_TRY(axis_of(&c->in[1], c->in[0].type.rank, &axis));
    return gradd_infer_same(c);
}

/* ---- gradient rule -------------------------------------------------------------------------- */

static gradd_status_t grad_cumsum(gradd_grad_t *g) {
    gradd_attr_t attrs[2] = {gradd_make_int("exclusive", gradd_attr_int(g->attrs, "exclusive", 0)),
                             gradd_make_int("reverse", !gradd_attr_int(g->attrs, "reverse", 0))};
    gradd_val_t in[2] = {g->dout[0], g->in[1]};
    if (g->need[0]) g->din[0] = gradd_emit_attrs(g->b, "CumSum", in, 2, attrs, 2);
    return g->b->status;
}

/* ---- cases and row -------------------------------------------------------------------------- */

GRADD_OPS(
    cumsum,
    GRADD_OP(
        "CumSum", "", 11, (2, 2), (1, 1), .types = {GRADD_T_NUM, GRADD_T_INDEX},
        .attrs = GRADD_ATTR_LIST({"exclusive", GRADD_ATTR_INT, false},
                                 {"reverse", GRADD_ATTR_INT, false}),
        .infer = infer_cumsum, .grad = grad_cumsum, .ref = GRADD_REF(compute_cumsum),
        .cases = GRADD_CASES(
            {.text = "f32[2,3,4] i64[]={1}"}, {.text = "f32[5] i32[]={0}"},
            {.text = "f32[2,3] i64[1]={-1} | exclusive=1"},
            {.text = "f32[2,3] i64[]={0} | reverse=1"},
            {.text = "f32[2,4] i64[]={1} | exclusive=1 reverse=1"}, {.text = "i64[2,5] i64[]={1}"},
            {.text = "i32[4] i64[]={-1}"}, {.text = "f32[0,3] i64[]={0}"},
            {.text = "f32[3,0] i64[]={1}"}, {.text = "f32[3,2500] i64[]={1}", .grad_tol = -1},
            {.text =
                 "i64[70,300]:(-9000000000000000000,9000000000000000000) i64[]={1} | reverse=1"},
            {.text = "i32[2,2049]:(0,2000000000) i64[]={1} | exclusive=1"},
            {.text = "f32[20,2,90] i64[]={0} | reverse=1", .grad_tol = -1},
            {.text = "f32[2,700,3] i64[]={1} | exclusive=1", .grad_tol = -1},
            {.text = "f32[5]={1,inf,2,-inf,3} i64[]={0}", .grad_tol = -1},
            {.text = "f32[2,1,7] i64[]={1} | exclusive=1", .grad_tol = -1})));

GRADD_KERNELS(cpu, cumsum,
              GRADD_KERNEL("CumSum", "loop",
                           .types = {GRADD_T_F32_F64 | GRADD_T_INT, GRADD_T_INDEX}, .inplace = 1,
                           .prepare = prepare_cumsum, .makes_parts = true,
                           .compute = compute_cumsum, .cost = cost_cumsum));
