/* PairDistance: the p-norm of each difference of two rows, torch.cdist, a composite.
 *
 * x is [..., P, M], y [..., R, M], the result [..., P, R]; the leading axes are equal.
 *
 * With p = 2 and more than 25 rows on a side, torch expands the squares, |a|^2 + |b|^2 - 2 ab, and
 * so does this: one product, in place of all differences. Otherwise the differences are formed,
 * which takes P R M elements. The derivative is 0 where a distance is 0.
 */
#include "kernels/contract/op.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rules.h"

enum { FEW_ROWS = 25 };

/* ---- shape rules ----------------------------------------------------------------------------- */

static gradd_status_t check_norm(gradd_attrs_t attrs) {
    const double p = gradd_attr_float(attrs, "p", 2);
    if (!(p > 0 && p <= 1e6))
        return GRADD_FAIL(UNSUPPORTED, "distances with p = %g, expected more than 0, and finite",
                          p);
    return GRADD_OK;
}

static gradd_status_t infer_pair(gradd_infer_t *c) {
    const gradd_type_t *x = &c->in[0].type, *y = &c->in[1].type;
    GRADD_TRY(check_norm(c->attrs));
    const int last = x->rank - 1;
    bool fits = x->rank == y->rank && x->rank >= 2 && x->dims[last] == y->dims[last];
    for (int i = 0; fits && i < last - 1; i++)
        fits = x->dims[i] == y->dims[i];
    if (!fits) return GRADD_FAIL(GRAPH, "rows of rank %d and %d do not fit", x->rank, y->rank);
    c->out[0] = *x;
    c->out[0].dims[last] = y->dims[last - 1];
    return gradd_type_check(&c->out[0]);
}

/* ---- expansions ------------------------------------------------------------------------------ */

static gradd_val_t number(gradd_builder_t *b, gradd_val_t like, double value) {
    return gradd_const_scalar(b, gradd_val_type(b, like)->dtype, value);
}

/* v to the power of e > 0, or of a root, of v >= 0; the slope of 0 is 0. */
static gradd_val_t power(gradd_builder_t *b, gradd_val_t v, double e) {
    const gradd_val_t zero = number(b, v, 0);
    const gradd_val_t none = GRADD_EMIT(b, "Equal", v, zero);
    gradd_val_t some = GRADD_EMIT(b, "Where", none, number(b, v, 1), v);
    some = e == 0.5 ? GRADD_EMIT(b, "Sqrt", some) : GRADD_EMIT(b, "Pow", some, number(b, v, e));
    return GRADD_EMIT(b, "Where", none, zero, some);
}

/* The p-norm along the last axis. */
static gradd_val_t norm(gradd_builder_t *b, gradd_val_t v, double p) {
    const int last = gradd_val_type(b, v)->rank - 1;
    gradd_type_t kept = *gradd_val_type(b, v);
    kept.rank--;
    gradd_val_t d;
    if (p == 2) {
        d = gradd_reduce_from(b, "ReduceL2", v, last);
    } else {
        v = GRADD_EMIT(b, "Abs", v);
        d = gradd_reduce_from(b, "ReduceSum", p == 1 ? v : power(b, v, p), last);
        if (p != 1) d = power(b, d, 1 / p);
    }
    return gradd_reshape_to(b, d, kept.dims, kept.rank);
}

/* |a|^2 + |b|^2 - 2 ab, and its root. */
static gradd_val_t by_product(gradd_builder_t *b, gradd_val_t x, gradd_val_t y) {
    const gradd_type_t type = *gradd_val_type(b, y);
    const int rank = type.rank;
    int64_t perm[GRADD_MAX_RANK], row[GRADD_MAX_RANK];
    for (int i = 0; i < rank; i++)
        perm[i] = i, row[i] = type.dims[i];
    perm[rank - 2] = rank - 1, perm[rank - 1] = rank - 2;
    row[rank - 1] = row[rank - 2], row[rank - 2] = 1;
    gradd_val_t left = gradd_reduce_from(b, "ReduceSumSquare", x, rank - 1);
    gradd_val_t right = gradd_reduce_from(b, "ReduceSumSquare", y, rank - 1);
    gradd_val_t both = GRADD_EMIT(b, "MatMul", x, gradd_transpose(b, y, perm, rank));
    both = GRADD_EMIT(b, "Mul", both, number(b, both, -2));
    right = gradd_reshape_to(b, right, row, rank);
    gradd_val_t square = GRADD_EMIT(b, "Add", GRADD_EMIT(b, "Add", left, right), both);
    const gradd_val_t zero = number(b, square, 0);
    square = GRADD_EMIT(b, "Where", GRADD_EMIT(b, "Less", square, zero), zero, square);
    return power(b, square, 0.5);
}

static gradd_status_t expand_pair(gradd_expand_t *x) {
    gradd_builder_t *b = x->b;
    const gradd_type_t type = *gradd_val_type(b, x->in[0]), other = *gradd_val_type(b, x->in[1]);
    const double p = gradd_attr_float(x->attrs, "p", 2);
    const int rank = type.rank;
    gradd_val_t one = gradd_wide(b, x->in[0]), two = gradd_wide(b, x->in[1]), d;
    if (p == 2 && (type.dims[rank - 2] > FEW_ROWS || other.dims[rank - 2] > FEW_ROWS)) {
        d = by_product(b, one, two);
    } else {
        int64_t left[GRADD_MAX_RANK], right[GRADD_MAX_RANK];
        if (rank >= GRADD_MAX_RANK) return GRADD_FAIL(LIMIT, "rows of rank %d", rank);
        for (int i = 0; i < rank - 1; i++)
            left[i] = type.dims[i], right[i] = other.dims[i];
        left[rank - 1] = 1, right[rank - 1] = right[rank - 2], right[rank - 2] = 1;
        left[rank] = right[rank] = type.dims[rank - 1];
        one = gradd_reshape_to(b, one, left, rank + 1);
        two = gradd_reshape_to(b, two, right, rank + 1);
        d = norm(b, GRADD_EMIT(b, "Sub", one, two), p);
    }
    x->out[0] = gradd_cast(b, d, type.dtype);
    return b->status;
}

/* ---- row ------------------------------------------------------------------------------------- */

GRADD_OPS(distance,
          GRADD_OP("PairDistance", "com.gradd", 1, (2, 2), (1, 1), .types = {GRADD_T_FLOAT},
                   .attrs = GRADD_ATTR_LIST({"p", GRADD_ATTR_FLOAT, false}), .infer = infer_pair,
                   .expand = expand_pair,
                   .cases = GRADD_CASES({.text = "f32[3,4] f32[2,4]"},
                                        {.text = "f32[2,3,4] f32[2,5,4] | p=1.0"},
                                        {.text = "f32[3,4] f32[2,4] | p=3.0"},
                                        {.text = "f32[2,30,4]:(0,1) f32[2,3,4]:(2,3)"},
                                        {.text = "f32[3,0] f32[2,0]", .grad_tol = -1},
                                        {.text = "f32[0,4] f32[2,4]"})));
