/* Einsum: sums of products by named axes, a composite of ReduceSum, Transpose and MatMul.
 *
 * "bij,bjk->bik": a letter is an axis, and one that the result lacks is summed over; "..." stands
 * for the axes that have no letter. Operands are multiplied from left to right, two at a time: axes
 * that both have and later ones need are the batch of the product, those that nothing needs behind
 * it are summed.
 * Refused: a letter that one operand has twice (a diagonal), and broadcasting.
 * Source: https://onnx.ai/onnx/operators/onnx__Einsum.html
 */
#include <string.h>

#include "kernels/contract/op.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rules.h"

/* Names of axes: letters by their code, and behind them the axes of "..." from the last on. */
enum { DOTS = 128, N_AXES = DOTS + GRADD_MAX_RANK };

typedef struct term_s {
    int n;
    int axis[GRADD_MAX_RANK];
} term_t;

typedef struct einsum_s {
    int n;
    term_t in[GRADD_OP_MAX_IN], out;
    int64_t size[N_AXES]; /* -1 = no operand has it */
} einsum_t;

static bool is_letter(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

static bool has(const term_t *t, int axis) {
    for (int i = 0; i < t->n; i++)
        if (t->axis[i] == axis) return true;
    return false;
}

/* ---- the equation ---------------------------------------------------------------------------- */

static gradd_status_t add_axis(term_t *t, int axis) {
    if (t->n == GRADD_MAX_RANK)
        return GRADD_FAIL(LIMIT, "the equation has more than %d axes in a term", GRADD_MAX_RANK);
    if (has(t, axis))
        return GRADD_FAIL(UNSUPPORTED, "the equation has an axis twice in a term (a diagonal)");
    t->axis[t->n++] = axis;
    return GRADD_OK;
}

/* A term from *at to a comma, an arrow or the end; `dots`: how many axes "..." stands for. */
static gradd_status_t read_term(const char **at, int dots, term_t *t) {
    bool seen = false;
    for (; **at && **at != ',' && **at != '-'; ++*at) {
        if (**at == ' ') continue;
        if (is_letter(**at)) {
            GRADD_TRY(add_axis(t, **at));
        } else if (!strncmp(*at, "...", 3) && !seen) {
            for (int k = dots; k > 0; k--)
                GRADD_TRY(add_axis(t, DOTS + k - 1));
            seen = true;
            *at += 2;
        } else {
            return GRADD_FAIL(GRAPH, "the equation has '%.3s' where a letter is expected", *at);
        }
    }
    return GRADD_OK;
}

static int count_letters(const char *at) {
    int n = 0;
    for (; *at && *at != ',' && *at != '-'; at++)
        n += is_letter(*at);
    return n;
}

static gradd_status_t read_operand(einsum_t *e, const char **at, const gradd_type_t *type) {
    term_t *t = &e->in[e->n];
    const int letters = count_letters(*at);
    GRADD_TRY(read_term(at, type->rank > letters ? type->rank - letters : 0, t));
    if (t->n != type->rank)
        return GRADD_FAIL(GRAPH, "the equation has %d axes for input %d, which has %d", t->n, e->n,
                          type->rank);
    for (int i = 0; i < t->n; i++) {
        int64_t *size = &e->size[t->axis[i]];
        if (*size >= 0 && *size != type->dims[i])
            return GRADD_FAIL(GRAPH,
                              "axis %d of input %d has %lld elements, others of that name "
                              "have %lld",
                              i, e->n, (long long)type->dims[i], (long long)*size);
        *size = type->dims[i];
    }
    e->n++;
    return GRADD_OK;
}

/* Without an arrow: the axes of "...", then letters that stand once, in the order of their codes.
 */
static gradd_status_t implied(einsum_t *e) {
    for (int k = GRADD_MAX_RANK; k > 0; k--)
        if (e->size[DOTS + k - 1] >= 0) GRADD_TRY(add_axis(&e->out, DOTS + k - 1));
    for (int letter = 0; letter < DOTS; letter++) {
        int n = 0;
        for (int i = 0; i < e->n; i++)
            n += has(&e->in[i], letter);
        if (n == 1) GRADD_TRY(add_axis(&e->out, letter));
    }
    return GRADD_OK;
}

static gradd_status_t describe(const char *equation, const gradd_type_t *types, int n,
                               einsum_t *e) {
    const char *at = equation;
    int dots = 0;
    *e = (einsum_t){0};
    for (int i = 0; i < N_AXES; i++)
        e->size[i] = -1;
    for (int i = 0; at[i]; i++) /* messages show parts of it */
        if (at[i] < ' ' || at[i] > '~')
            return GRADD_FAIL(GRAPH, "the equation has a byte %d, where a letter is expected",
                              (unsigned char)at[i]);
    for (int i = 0; i < n; i++) {
        if (i && *at++ != ',')
            return GRADD_FAIL(GRAPH, "the equation has %d terms for %d inputs", i, n);
        GRADD_TRY(read_operand(e, &at, &types[i]));
    }
    if (!*at) return implied(e);
    if (strncmp(at, "->", 2))
        return GRADD_FAIL(GRAPH, "the equation goes on with '%.8s' behind its %d terms", at, n);
    while (dots < GRADD_MAX_RANK && e->size[DOTS + dots] >= 0)
        dots++;
    at += 2;
    GRADD_TRY(read_term(&at, dots, &e->out));
    if (*at) return GRADD_FAIL(GRAPH, "the equation goes on with '%.8s' behind its result", at);
    for (int i = 0; i < e->out.n; i++)
        if (e->size[e->out.axis[i]] < 0)
            return GRADD_FAIL(GRAPH, "the result has an axis '%c' that no input has",
                              e->out.axis[i]);
    return GRADD_OK;
}

static gradd_status_t infer_einsum(gradd_infer_t *c) {
    gradd_type_t types[GRADD_OP_MAX_IN];
    einsum_t e;
    for (int i = 0; i < c->n_in; i++) {
        types[i] = c->in[i].type;
        if (types[i].dtype != types[0].dtype)
            return GRADD_FAIL(GRAPH, "inputs 0 and %d differ in element type: %s and %s", i,
                              gradd_dtype_name(types[0].dtype), gradd_dtype_name(types[i].dtype));
    }
    GRADD_TRY(describe(gradd_attr_string(c->attrs, "equation", ""), types, c->n_in, &e));
    c->out[0] = (gradd_type_t){.dtype = types[0].dtype, .rank = e.out.n};
    for (int i = 0; i < e.out.n; i++)
        c->out[0].dims[i] = e.size[e.out.axis[i]];
    return GRADD_OK;
}

/* ---- expansion ------------------------------------------------------------------------------- */

/* A value, and the names of its axes. */
typedef struct factor_s {
    gradd_val_t v;
    term_t axes;
} factor_t;

/* Sums over the axes that are not in `wanted`. */
static void sum_others(gradd_builder_t *b, factor_t *x, const bool *wanted) {
    const gradd_attr_t keep = gradd_make_int("keepdims", 0);
    int64_t axes[GRADD_MAX_RANK];
    term_t left = {0};
    int n = 0;
    for (int i = 0; i < x->axes.n; i++)
        if (wanted[x->axes.axis[i]])
            left.axis[left.n++] = x->axes.axis[i];
        else
            axes[n++] = i;
    if (!n) return;
    const gradd_val_t in[] = {x->v, gradd_const_i64s(b, axes, n)};
    *x = (factor_t){gradd_emit_attrs(b, "ReduceSum", in, 2, &keep, 1), left};
}

static gradd_val_t in_order(gradd_builder_t *b, const factor_t *x, const term_t *order) {
    int64_t perm[GRADD_MAX_RANK];
    bool moved = false;
    for (int i = 0; i < order->n; i++)
        for (int k = 0; k < x->axes.n; k++)
            if (x->axes.axis[k] == order->axis[i]) {
                perm[i] = k;
                moved = moved || k != i;
            }
    return moved ? gradd_transpose(b, x->v, perm, order->n) : x->v;
}

static void append(term_t *to, const term_t *from, int *room) {
    for (int i = 0; i < from->n; i++)
        if (to->n < GRADD_MAX_RANK)
            to->axis[to->n++] = from->axis[i];
        else
            ++*room; /* too many */
}

static int64_t elements(const einsum_t *e, const term_t *t) {
    int64_t n = 1;
    for (int i = 0; i < t->n; i++)
        n *= e->size[t->axis[i]];
    return n;
}

/* x and y multiplied, and summed over the axes that nothing behind wants. */
static gradd_status_t multiply(gradd_builder_t *b, const einsum_t *e, factor_t *x, factor_t *y,
                               const bool *wanted) {
    term_t batch = {0}, summed = {0}, left = {0}, right = {0}, first, second, result;
    int beyond = 0;
    bool kept[N_AXES];
    for (int i = 0; i < N_AXES; i++)
        kept[i] = wanted[i] || (has(&x->axes, i) && has(&y->axes, i));
    sum_others(b, x, kept);
    sum_others(b, y, kept);
    for (int i = 0; i < x->axes.n; i++) {
        const int axis = x->axes.axis[i];
        term_t *part = !has(&y->axes, axis) ? &left : wanted[axis] ? &batch : &summed;
        part->axis[part->n++] = axis;
    }
    for (int i = 0; i < y->axes.n; i++)
        if (!has(&x->axes, y->axes.axis[i])) right.axis[right.n++] = y->axes.axis[i];
    first = second = result = batch;
    append(&first, &left, &beyond);
    append(&first, &summed, &beyond);
    append(&second, &summed, &beyond);
    append(&second, &right, &beyond);
    append(&result, &left, &beyond);
    append(&result, &right, &beyond);
    if (beyond) return GRADD_FAIL(LIMIT, "a product has more than %d axes", GRADD_MAX_RANK);
    const int64_t n = elements(e, &batch), m = elements(e, &left), k = elements(e, &summed),
                  p = elements(e, &right);
    const gradd_val_t pair[] = {
        gradd_reshape_to(b, in_order(b, x, &first), (int64_t[]){n, m, k}, 3),
        gradd_reshape_to(b, in_order(b, y, &second), (int64_t[]){n, k, p}, 3)};
    int64_t dims[GRADD_MAX_RANK];
    for (int i = 0; i < result.n; i++)
        dims[i] = e->size[result.axis[i]];
    x->v = gradd_reshape_to(b, gradd_emit_n(b, "MatMul", 2, pair), dims, result.n);
    x->axes = result;
    return b->status;
}

static gradd_status_t expand_einsum(gradd_expand_t *x) {
    gradd_builder_t *b = x->b;
    gradd_type_t types[GRADD_OP_MAX_IN];
    einsum_t e;
    for (int i = 0; i < x->n_in; i++)
        types[i] = *gradd_val_type(b, x->in[i]);
    GRADD_TRY(describe(gradd_attr_string(x->attrs, "equation", ""), types, x->n_in, &e));
    factor_t now = {gradd_wide(b, x->in[0]), e.in[0]};
    for (int i = 0; i < e.n; i++) {
        factor_t next = {gradd_wide(b, x->in[i]), e.in[i]};
        bool wanted[N_AXES] = {false};
        for (int axis = 0; axis < N_AXES; axis++) {
            wanted[axis] = has(&e.out, axis);
            for (int later = i + 1; later < e.n; later++)
                wanted[axis] = wanted[axis] || has(&e.in[later], axis);
        }
        if (i) GRADD_TRY(multiply(b, &e, &now, &next, wanted));
        if (e.n == 1) sum_others(b, &now, wanted);
        GRADD_TRY(b->status);
    }
    x->out[0] = gradd_cast(b, in_order(b, &now, &e.out), types[0].dtype);
    return b->status;
}

/* ---- row ------------------------------------------------------------------------------------- */

GRADD_OPS(einsum, GRADD_OP("Einsum", "", 12, (1, GRADD_OP_MAX_IN), (1, 1), .types = {GRADD_T_FLOAT},
                           .attrs = GRADD_ATTR_LIST({"equation", GRADD_ATTR_STRING, true}),
                           .infer = infer_einsum, .expand = expand_einsum,
                           .cases = GRADD_CASES(
                               {.text = "f32[2,3,4] f32[2,4,5] | equation=\"bij,bjk->bik\""},
                               {.text = "f32[2,3] f32[4,3,5] | equation=\"bi,eij->bej\""},
                               {.text = "f32[2,3,4,5] f32[2,6,4,5] | equation=\"bqhd,bkhd->bhqk\""},
                               {.text = "f32[3,4] f32[4,2] f32[2,5] | equation=\"ij,jk,kl->li\""},
                               {.text = "f32[3,4] f32[2,5] | equation=\"ij,kl->kj\""},
                               {.text = "f32[3,4] | equation=\"ij->ji\""},
                               {.text = "f32[3,4] | equation=\"ij->\""},
                               {.text = "f32[3] f32[4] | equation=\"i,j\""},
                               {.text = "f32[4,3] f32[4,5] | equation=\"ba,bc\""},
                               {.text = "f32[2,3,4,5] f32[2,3,5] | equation=\"...ij,...j->...i\""},
                               {.text = "f32[2,0] f32[0,3] | equation=\"ij,jk->ik\""})));
