/* Running sums along an axis: CumSum.
 *
 * Math: X, Y[A, N, B] (N = the axis, A and B = the dimensions around it merged):
 * Y[a, n, b] = sum of X[a, i, b] over i <= n; `exclusive` leaves out i = n, `reverse` sums from the
 * end. Saved for backward: nothing. Gradient: the running sum of dY in the other direction. */
#include "kernels/dispatch.h"
#include "kernels/infer.h"
#include "kernels/rules.h"

/* ---- kernel ------------------------------------------------------------------------------------
 */

/* Row-wise over B, so that memory is walked in order; a sum of floats is kept in its own type, as
 * torch does, because every partial sum is a result. */
#define CUMSUM(T)                                                                                  \
    static void cumsum_##T(const T *x, T *y, int64_t n, int64_t b, bool reverse, bool exclusive) { \
        for (int64_t k = 0; k < n; k++) {                                                          \
            int64_t at = (reverse ? n - 1 - k : k) * b, before = reverse ? at + b : at - b;        \
            for (int64_t i = 0; i < b; i++) {                                                      \
                T sum = k ? y[before + i] : (T)0, next = exclusive ? (T)0 : x[at + i];             \
                if (exclusive && k) next = x[before + i];                                          \
                y[at + i] = (T)(sum + next);                                                       \
            }                                                                                      \
        }                                                                                          \
    }
CUMSUM(float)
CUMSUM(double)
CUMSUM(int32_t)
CUMSUM(int64_t)

typedef struct scan_s {
    const gradd_run_t *r;
    int64_t n, b;
    bool reverse, exclusive;
} scan_t;

static void scan_outer(const scan_t *s, int64_t outer) {
    const void *x = s->r->in[0].data;
    void *y = s->r->out[0].data;
    int64_t at = outer * s->n * s->b, n = s->n, b = s->b;
    bool reverse = s->reverse, exclusive = s->exclusive;
    switch (s->r->in[0].type.dtype) {
    case GRADD_DT_F32:
        cumsum_float((const float *)x + at, (float *)y + at, n, b, reverse, exclusive);
        break;
    case GRADD_DT_F64:
        cumsum_double((const double *)x + at, (double *)y + at, n, b, reverse, exclusive);
        break;
    case GRADD_DT_I32:
        cumsum_int32_t((const int32_t *)x + at, (int32_t *)y + at, n, b, reverse, exclusive);
        break;
    default: /* I64: the row admits no other */
        cumsum_int64_t((const int64_t *)x + at, (int64_t *)y + at, n, b, reverse, exclusive);
    }
}

static int64_t product(const gradd_type_t *type, int from, int to) {
    int64_t n = 1;
    for (int i = from; i < to; i++)
        n *= type->dims[i];
    return n;
}

static gradd_status_t read_axis(const gradd_view_t *axis, int rank, int *out_axis) {
    int64_t value = 0;
    if (gradd_type_count(&axis->type) != 1) return GRADD_FAIL(GRAPH, "the axis must be one number");
    GRADD_SWITCH_INT(axis->type.dtype, T, { value = *(const T *)axis->data; });
    return gradd_axis(value, rank, false, out_axis);
}

static gradd_status_t run_cumsum(const gradd_run_t *r) {
    const gradd_type_t *type = &r->in[0].type;
    int axis;
    bool reverse = gradd_attr_int(r->attrs, "reverse", 0);
    bool exclusive = gradd_attr_int(r->attrs, "exclusive", 0);
    GRADD_TRY(read_axis(&r->in[1], type->rank, &axis));
    int64_t a = product(type, 0, axis), n = type->dims[axis];
    int64_t b = product(type, axis + 1, type->rank);
    scan_t s = {r, n, b, reverse, exclusive};
#pragma omp parallel for schedule(static) if (a * n * b > GRADD_PARALLEL_MIN)
    for (int64_t outer = 0; outer < a; outer++)
        scan_outer(&s, outer);
    return GRADD_OK;
}

/* ---- shape rule
 * ---------------------------------------------------------------------------------- */

static gradd_status_t infer_cumsum(gradd_infer_t *c) {
    int axis;
    if (c->in[0].type.rank < 1) return GRADD_FAIL(GRAPH, "input 0 must have rank 1 at least");
    if (c->in[1].data) GRADD_TRY(read_axis(&c->in[1], c->in[0].type.rank, &axis));
    return gradd_infer_same(c);
}

/* ---- gradient rule
 * ------------------------------------------------------------------------------- */

static gradd_status_t grad_cumsum(gradd_grad_t *g) {
    gradd_attr_t attrs[2] = {
        gradd_make_int("exclusive", gradd_attr_int(g->attrs, "exclusive", 0)),
        gradd_make_int("reverse", !gradd_attr_int(g->attrs, "reverse", 0)),
    };
    gradd_val_t in[2] = {g->dout[0], g->in[1]};
    g->din[0] = gradd_emit_attrs(g->b, "CumSum", in, 2, attrs, 2);
    return g->b->status;
}

/* ---- cases and row
 * ------------------------------------------------------------------------------- */

GRADD_OPS(scan,
          {
              .name = "CumSum",
              .domain = "",
              .since = 11,
              .min_in = 2,
              .max_in = 2,
              .min_out = 1,
              .max_out = 1,
              .types = {GRADD_T_NUM, GRADD_T_INDEX},
              .attrs = GRADD_ATTR_LIST({"exclusive", GRADD_ATTR_INT, false},
                                       {"reverse", GRADD_ATTR_INT, false}
                ),
              .infer = infer_cumsum,
              .grad = grad_cumsum,
              .run = run_cumsum,
              .cases = GRADD_CASES({.text = "f32[5] i64[]={0}"},
                {.text = "f32[2,3,4] i64[]={1}"},
                                   {.text = "f32[2,3,4] i32[]={-1} | exclusive=1"},
                                   {.text = "f32[2,3,4] i64[]={0} | reverse=1"},
                                   {.text = "f32[3,7] i64[]={1} | exclusive=1 reverse=1"},
                                   {.text = "i64[3,4]:(0,9) i64[1]={1}"},
                                   {.text = "f32[2,0,3] i64[]={1}"},
                {.text = "f32[3,1] i64[]={1}"},
                                   {.text = "i32[40,1000]:(0,9) i64[]={1}"}
                )
});
