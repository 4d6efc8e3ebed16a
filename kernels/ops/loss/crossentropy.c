/* CrossEntropy: the loss of a classifier or language model over logits as the model made them.
 *
 * Math: row i has V logits x and a label l; loss_i = log sum exp(x) - (1 - e) x[l] - e mean(x) with
 * the label smoothing e (0 by default). Rows whose label is ignore_index do not count. With
 * `shift`, logits [..., S, V] at position s answer for the label at s + 1, and the last position
 * for none. "mean" divides by the rows that count (0 / 0 = NaN, as in torch); num_items, a scalar,
 * divides a "sum". With weights w [V], of mean m, loss_i = (1 - e) w[l] (log sum exp(x) - x[l]) +
 * e (m log sum exp(x) - mean(w x)), and "mean" divides by the sum of w[l] of the rows that count.
 * Logits may be bf16 or f16: calculations, weights and the loss are f32 then.
 *
 * Saved for backward: logits, labels, and per row the maximum and sum exp(x - maximum) - 1, which
 * keeps its digits where one class has all. CrossEntropyGrad writes the gradient once, in the
 * logits' type, over the logits if they are not needed any more; an ignored row costs no exp. */
#include "kernels/contract/kernel.h"
#include "kernels/cpu/loss_labels.h"
#include "kernels/cpu/parts.h"
#include "kernels/describe/cross_entropy.h"
#include "kernels/describe/dispatch.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rules.h"

#include <math.h>
#include <string.h>

static gradd_loss_operands_t operands_of(const gradd_view_t *in, int n, bool backward) {
    const int labels = backward ? GRADD_CE_GRAD_LABELS : GRADD_CE_LABELS;
    const int items = backward ? GRADD_CE_GRAD_ITEMS : GRADD_CE_ITEMS;
    const int weights = backward ? GRADD_CE_GRAD_WEIGHTS : GRADD_CE_WEIGHTS;
    return (gradd_loss_operands_t){&in[labels], n > items ? &in[items] : NULL,
                                   n > weights ? &in[weights] : NULL};
}

/* What the first part has read, labels behind it, is in the workspace for the others: a client may
 * change them meanwhile. */
static gradd_status_t read_loss(const gradd_launch_t *r, bool backward, gradd_loss_t *l) {
    const gradd_loss_operands_t operands = operands_of(r->in, r->n_in, backward);
    gradd_loss_t *kept = r->workspace;
    if (r->part) {
        *l = *kept;
        return GRADD_OK;
    }
    GRADD_TRY(gradd_loss_read(&r->in[backward ? GRADD_CE_GRAD_LOGITS : GRADD_CE_LOGITS].type,
                              r->attrs, &operands, (int64_t *)(kept + 1), l));
    *kept = *l;
    return GRADD_OK;
}

/* ---- forward -------------------------------------------------------------------------------- */

static gradd_loss_row_t plain_scan(const gradd_loss_t *l, const gradd_view_t *x, int64_t at) {
    const int64_t n = l->classes;
    gradd_loss_row_t row = {gradd_loss_number(x, at), 0, 0};
    for (int64_t i = 0; i < n; i++) {
        double v = gradd_loss_number(x, at + i);
        row.max = v > row.max || v != v ? v : row.max;
        row.plain += l->weights ? v * gradd_loss_number(l->weights, i) : v;
    }
    for (int64_t i = 0; i < n; i++)
        row.sum += exp(gradd_loss_number(x, at + i) - row.max);
    return row;
}

/* Loss of row i; statistics go to `stats` if it has memory. */
static double forward_row(const gradd_loss_t *l, const gradd_view_t *x, int64_t i,
                          const gradd_view_t *stats, bool ref) {
    bool used = l->labels[i] >= 0;
    int64_t at = i * l->classes;
    gradd_loss_row_t row = {0, 1, 0};
    if (used && ref)
        row = plain_scan(l, x, at);
    else if (used)
        row = gradd_loss_scan_row(l,
                                  (const char *)x->data + (size_t)at * gradd_dtype_bytes(l->dtype));
    if (stats) {
        gradd_loss_store(stats, 2 * i, row.max);
        gradd_loss_store(stats, 2 * i + 1,
                         row.sum - 1); /* of the maximum; the rest keeps its digits */
    }
    if (!used) return 0;
    return gradd_loss_of_row(l, &row, l->labels[i], gradd_loss_number(x, at + l->labels[i]));
}

static gradd_status_t forward(const gradd_launch_t *r, bool ref) {
    gradd_loss_t l;
    GRADD_TRY(read_loss(r, false, &l));
    double *each = (double *)(l.labels + l.rows), sum = 0;
    const gradd_range_t rows = gradd_part_of(r, l.rows);
    const gradd_view_t *stats =
        r->n_out > GRADD_CE_STATS && r->out[GRADD_CE_STATS].data ? &r->out[GRADD_CE_STATS] : NULL;
#pragma omp parallel for schedule(static) if (l.rows * l.classes >= GRADD_PARALLEL_MIN)
    for (int64_t i = rows.from; i < rows.to; i++)
        each[i] = forward_row(&l, &r->in[GRADD_CE_LOGITS], i, stats, ref);
    if (!gradd_part_is_last(r)) return GRADD_OK;
    for (int64_t i = 0; i < l.rows; i++) {
        sum += each[i];
        if (l.reduction == GRADD_REDUCE_NONE) gradd_loss_store(&r->out[0], i, each[i]);
    }
    if (l.reduction != GRADD_REDUCE_NONE) gradd_loss_store(&r->out[0], 0, sum / l.total);
    return GRADD_OK;
}

static gradd_status_t compute_loss(const gradd_launch_t *r) {
    return forward(r, false);
}

static gradd_status_t ref_loss(const gradd_launch_t *r) {
    return forward(r, true);
}

/* ---- backward ------------------------------------------------------------------------------- */

static void backward_row(const gradd_loss_t *l, const gradd_launch_t *r, int64_t i, bool ref) {
    const gradd_view_t *x = &r->in[GRADD_CE_GRAD_LOGITS], *z = &r->out[0];
    int64_t at = i * l->classes, label = l->labels[i];
    size_t bytes = gradd_dtype_bytes(l->dtype);
    if (label < 0) {
        memset((char *)z->data + (size_t)at * bytes, 0, (size_t)l->classes * bytes);
        return;
    }
    double factor =
        gradd_loss_number(&r->in[GRADD_CE_GRAD_DY], l->reduction == GRADD_REDUCE_NONE ? i : 0) /
        l->total;
    const gradd_loss_label_t own_label = {
        label, gradd_loss_number(x, at + label),
        gradd_loss_number(&r->in[GRADD_CE_GRAD_STATS], 2 * i),
        gradd_loss_number(&r->in[GRADD_CE_GRAD_STATS], 2 * i + 1)};
    /* of the label, before its place is written */
    const double own = gradd_loss_own_gradient(l, &own_label);
    const gradd_loss_spread_t s = gradd_loss_gradient(l, &own_label, factor);
    if (ref) {
        for (int64_t c = 0; c < l->classes; c++) {
            const double w = l->weights ? gradd_loss_number(l->weights, c) : 1;
            gradd_loss_store(z, at + c,
                             exp(gradd_loss_number(x, at + c) - s.max) * s.scale - s.shift * w);
        }
    } else {
        gradd_loss_spread(l->dtype, (const char *)x->data + (size_t)at * bytes,
                          (char *)z->data + (size_t)at * bytes, l->classes, &s);
    }
    gradd_loss_store(z, at + label, own * factor);
}

static gradd_status_t backward(const gradd_launch_t *r, bool ref) {
    gradd_loss_t l;
    GRADD_TRY(read_loss(r, true, &l));
    const gradd_range_t rows = gradd_part_of(r, l.rows);
#pragma omp parallel for schedule(static) if (l.rows * l.classes >= GRADD_PARALLEL_MIN)
    for (int64_t i = rows.from; i < rows.to; i++)
        backward_row(&l, r, i, ref);
    return GRADD_OK;
}

static gradd_status_t compute_loss_grad(const gradd_launch_t *r) {
    return backward(r, false);
}

static gradd_status_t ref_loss_grad(const gradd_launch_t *r) {
    return backward(r, true);
}

/* ---- shape rules ---------------------------------------------------------------------------- */

static gradd_status_t check_shapes(const gradd_infer_t *c, bool backward) {
    const gradd_loss_operands_t operands = operands_of(c->in, c->n_in, backward);
    return gradd_loss_check(&c->in[backward ? GRADD_CE_GRAD_LOGITS : GRADD_CE_LOGITS].type,
                            &operands, c->attrs);
}

static gradd_status_t infer_loss(gradd_infer_t *c) {
    const gradd_type_t *x = &c->in[GRADD_CE_LOGITS].type;
    GRADD_TRY(check_shapes(c, false));
    if (gradd_loss_reduction(c->attrs) == GRADD_REDUCE_NONE)
        c->out[GRADD_CE_LOSS] = c->in[GRADD_CE_LABELS].type;
    c->out[GRADD_CE_LOSS].dtype = gradd_loss_dtype(x->dtype);
    if (c->n_out > GRADD_CE_STATS)
        c->out[GRADD_CE_STATS] = (gradd_type_t){
            gradd_loss_dtype(x->dtype), 2, {gradd_type_count(x) / x->dims[x->rank - 1], 2}
        };
    return GRADD_OK;
}

static gradd_status_t infer_loss_grad(gradd_infer_t *c) {
    c->out[GRADD_CE_DLOGITS] = c->in[GRADD_CE_GRAD_LOGITS].type;
    GRADD_TRY(check_shapes(c, true));
    const gradd_type_t *x = &c->in[GRADD_CE_GRAD_LOGITS].type;
    if (gradd_type_count(&c->in[GRADD_CE_GRAD_STATS].type) !=
        2 * gradd_type_count(x) / x->dims[x->rank - 1])
        return GRADD_FAIL(GRAPH, "the statistics do not have two entries per row");
    return GRADD_OK;
}

/* The label of each row, and in forward its loss. */
static size_t workspace_loss(const gradd_infer_t *c) {
    return sizeof(gradd_loss_t) + (sizeof(int64_t) + sizeof(double)) *
                                      (size_t)gradd_type_count(&c->in[GRADD_CE_LABELS].type);
}

static size_t workspace_loss_grad(const gradd_infer_t *c) {
    return sizeof(gradd_loss_t) +
           sizeof(int64_t) * (size_t)gradd_type_count(&c->in[GRADD_CE_GRAD_LABELS].type);
}

static int parts_loss(const gradd_infer_t *c) {
    return gradd_parts_of_tasks(c, gradd_type_count(&c->in[GRADD_CE_LABELS].type));
}

static int parts_loss_grad(const gradd_infer_t *c) {
    return gradd_parts_of_tasks(c, gradd_type_count(&c->in[GRADD_CE_GRAD_LABELS].type));
}

/* ---- gradient rule -------------------------------------------------------------------------- */

static gradd_status_t grad_loss(gradd_grad_t *g) {
    gradd_attr_t attrs[GRADD_CE_ATTRS];
    int n = 0;
    if (g->n_out > GRADD_CE_STATS && g->dout[GRADD_CE_STATS] != GRADD_NONE)
        return GRADD_FAIL(UNSUPPORTED, "a gradient arrives for a saved statistic");
    if (!g->need[GRADD_CE_LOGITS] || g->dout[GRADD_CE_LOSS] == GRADD_NONE) return GRADD_OK;
    for (int i = 0; i < g->attrs.n && n < GRADD_CE_ATTRS; i++)
        attrs[n++] = g->attrs.v[i];
    const int added = GRADD_CE_GRAD_ITEMS - GRADD_CE_ITEMS;
    gradd_val_t in[GRADD_CE_GRAD_INPUTS] = {[GRADD_CE_GRAD_DY] = g->dout[GRADD_CE_LOSS],
                                            [GRADD_CE_GRAD_LOGITS] = g->in[GRADD_CE_LOGITS],
                                            [GRADD_CE_GRAD_LABELS] = g->in[GRADD_CE_LABELS],
                                            [GRADD_CE_GRAD_STATS] = g->output(g, GRADD_CE_STATS)};
    for (int i = GRADD_CE_ITEMS; i < GRADD_CE_INPUTS; i++)
        in[i + added] = i < g->n_in ? g->in[i] : GRADD_NONE;
    g->din[GRADD_CE_LOGITS] =
        gradd_emit_attrs(g->b, "CrossEntropyGrad", in, g->n_in + added, attrs, n);
    return g->b->status;
}

/* ---- expansion ------------------------------------------------------------------------------ */

/* Per row [R, 1]: the label that it answers for, and whether it counts. */
typedef struct rows_s {
    gradd_val_t labels, used;
    gradd_val_t weights; /* [1, V]; GRADD_NONE = all one */
    gradd_val_t own;     /* [R, 1], the labels' */
    int64_t n, classes;
} rows_t;

/* Moves labels to the position in front; the last one, which gets the first, does not count. */
static gradd_val_t shifted(gradd_builder_t *b, gradd_val_t labels, int64_t n, int64_t positions,
                           gradd_val_t *out_inner) {
    labels = gradd_reshape_to(b, labels, (int64_t[]){n / positions, positions}, 2);
    gradd_val_t parts[2] = {gradd_slice(b, labels, 1, 1, positions, 1),
                            gradd_slice(b, labels, 1, 0, 1, 1)};
    gradd_val_t at[3] = {gradd_const_scalar(b, GRADD_DT_I64, 0),
                         gradd_const_scalar(b, GRADD_DT_I64, (double)positions),
                         gradd_const_scalar(b, GRADD_DT_I64, 1)};
    gradd_val_t last = gradd_const_scalar(b, GRADD_DT_I64, (double)(positions - 1));
    gradd_val_t inner = GRADD_EMIT(b, "Less", GRADD_EMIT(b, "Range", at[0], at[1], at[2]), last);
    gradd_val_t both[2] = {inner, gradd_const_i64s(b, (int64_t[]){n / positions, positions}, 2)};
    *out_inner =
        gradd_reshape_to(b, GRADD_EMIT(b, "Expand", both[0], both[1]), (int64_t[]){n, 1}, 2);
    return gradd_concat(b, parts, 2, 1);
}

static rows_t find_rows(gradd_expand_t *x) {
    gradd_builder_t *b = x->b;
    const gradd_type_t type = *gradd_val_type(b, x->in[GRADD_CE_LOGITS]);
    rows_t r = {.classes = type.dims[type.rank - 1],
                .used = GRADD_NONE,
                .weights = GRADD_NONE,
                .own = GRADD_NONE};
    r.n = gradd_type_count(&type) / r.classes;
    gradd_val_t labels = gradd_cast(b, x->in[GRADD_CE_LABELS], GRADD_DT_I64), counted;
    if (gradd_attr_int(x->attrs, GRADD_CE_SHIFT, 0) && r.n)
        labels = shifted(b, labels, r.n, type.dims[type.rank - 2], &r.used);
    labels = gradd_reshape_to(b, labels, (int64_t[]){r.n, 1}, 2);
    if (gradd_attr_find(x->attrs, GRADD_CE_IGNORE_INDEX)) {
        const int64_t ignore = gradd_attr_int(x->attrs, GRADD_CE_IGNORE_INDEX, 0);
        gradd_val_t none = gradd_const_i64s(b, &ignore, 1);
        counted = GRADD_EMIT(b, "Not", GRADD_EMIT(b, "Equal", labels, none));
        r.used = r.used == GRADD_NONE ? counted : GRADD_EMIT(b, "And", r.used, counted);
    }
    if (r.used != GRADD_NONE)
        labels = GRADD_EMIT(b, "Where", r.used, labels, gradd_const_scalar(b, GRADD_DT_I64, 0));
    r.labels =
        GRADD_EMIT(b, "CheckIndex", labels, gradd_const_scalar(b, GRADD_DT_I64, (double)r.classes));
    if (x->n_in <= GRADD_CE_WEIGHTS || x->in[GRADD_CE_WEIGHTS] == GRADD_NONE) return r;
    gradd_val_t weights =
        GRADD_EMIT(b, "StopGradient", x->in[GRADD_CE_WEIGHTS]); /* torch's have none */
    r.weights = gradd_reshape_to(b, weights, (int64_t[]){1, r.classes}, 2);
    r.own = GRADD_EMIT(b, "Gather", weights, r.labels);
    return r;
}

/* v where a row counts, else 0 */
static gradd_val_t where_used(gradd_builder_t *b, const rows_t *r, gradd_val_t v) {
    if (r->used == GRADD_NONE || b->status) return v;
    return GRADD_EMIT(b, "Where", r->used, v,
                      gradd_const_scalar(b, gradd_val_type(b, v)->dtype, 0));
}

/* Loss of each row, [R, 1]. */
static gradd_val_t loss_of_rows(gradd_expand_t *x, const rows_t *r, gradd_val_t logits) {
    gradd_builder_t *b = x->b;
    const double e = gradd_attr_float(x->attrs, GRADD_CE_SMOOTHING, 0);
    gradd_attr_t axis = gradd_make_int("axis", 1);
    gradd_val_t logs = gradd_emit_attrs(b, "LogSoftmax", &logits, 1, &axis, 1);
    gradd_val_t pick[2] = {logs, r->labels};
    gradd_val_t loss =
        GRADD_EMIT(b, "Neg", gradd_emit_attrs(b, "GatherElements", pick, 2, &axis, 1));
    if (r->own != GRADD_NONE) loss = GRADD_EMIT(b, "Mul", loss, r->own);
    if (e != 0) {
        if (r->weights != GRADD_NONE) logs = GRADD_EMIT(b, "Mul", logs, r->weights);
        gradd_val_t even = gradd_scaled(b, gradd_reduce_from(b, "ReduceMean", logs, 1), -e);
        loss = GRADD_EMIT(b, "Add", gradd_scaled(b, loss, 1 - e), even);
    }
    return where_used(b, r, loss);
}

/* The sum of [R, 1], divided as the reduction says. */
static gradd_val_t reduced(gradd_expand_t *x, const rows_t *r, gradd_val_t each) {
    gradd_builder_t *b = x->b;
    const gradd_dtype_t dtype = gradd_val_type(b, each)->dtype;
    const gradd_reduction_t reduction = gradd_loss_reduction(x->attrs);
    if (reduction == GRADD_REDUCE_NONE) {
        const gradd_type_t labels = *gradd_val_type(b, x->in[GRADD_CE_LABELS]);
        return gradd_reshape_to(b, each, labels.dims, labels.rank);
    }
    gradd_val_t sum = gradd_reduce_from(b, "ReduceSum", each, 0), total = GRADD_NONE;
    if (reduction == GRADD_REDUCE_MEAN && r->own != GRADD_NONE)
        total = gradd_reduce_from(b, "ReduceSum", where_used(b, r, r->own), 0);
    else if (reduction == GRADD_REDUCE_MEAN && r->used != GRADD_NONE)
        total = gradd_reduce_from(b, "ReduceSum", gradd_cast(b, r->used, dtype), 0);
    else if (reduction == GRADD_REDUCE_MEAN)
        total = gradd_const_scalar(b, dtype, (double)r->n);
    else if (x->n_in > GRADD_CE_ITEMS && x->in[GRADD_CE_ITEMS] != GRADD_NONE)
        total =
            gradd_reshape_to(b, gradd_cast(b, x->in[GRADD_CE_ITEMS], dtype), (int64_t[]){1, 1}, 2);
    if (total != GRADD_NONE) sum = GRADD_EMIT(b, "Div", sum, total);
    return gradd_reshape_to(b, sum, (int64_t[]){0}, 0);
}

static gradd_status_t expand_loss(gradd_expand_t *x) {
    gradd_builder_t *b = x->b;
    const rows_t r = find_rows(x);
    if (b->status) return b->status;
    gradd_val_t logits = gradd_wide(b, x->in[GRADD_CE_LOGITS]);
    logits = gradd_reshape_to(b, logits, (int64_t[]){r.n, r.classes}, 2);
    x->out[GRADD_CE_LOSS] = reduced(x, &r, loss_of_rows(x, &r, logits));
    if (x->n_out < 2) return b->status;
    gradd_val_t max = gradd_reduce_from(b, "ReduceMax", logits, 1), pair[2];
    gradd_val_t parts = GRADD_EMIT(b, "Exp", GRADD_EMIT(b, "Sub", logits, max));
    gradd_val_t one = gradd_const_scalar(b, gradd_val_type(b, max)->dtype, 1);
    pair[0] = where_used(b, &r, max);
    pair[1] = GRADD_EMIT(b, "Sub", gradd_reduce_from(b, "ReduceSum", parts, 1), one);
    pair[1] = where_used(b, &r, pair[1]);
    x->out[GRADD_CE_STATS] = gradd_concat(b, pair, 2, 1);
    return b->status;
}

/* ---- cases and rows ------------------------------------------------------------------------- */

#define LOSS_ATTRS                                                                                 \
    GRADD_ATTR_LIST({GRADD_CE_REDUCTION, GRADD_ATTR_STRING, false},                                \
                    {GRADD_CE_IGNORE_INDEX, GRADD_ATTR_INT, false},                                \
                    {GRADD_CE_SHIFT, GRADD_ATTR_INT, false},                                       \
                    {GRADD_CE_SMOOTHING, GRADD_ATTR_FLOAT, false})
#define LABELS4 "i64[4]={0,-100,2,1}"

GRADD_OPS(
    crossentropy,
    GRADD_OP(
        "CrossEntropy", "com.gradd", 1, (GRADD_CE_ITEMS, GRADD_CE_INPUTS), (1, GRADD_CE_OUTPUTS),
        .no_rule = 1 << GRADD_CE_ITEMS | 1 << GRADD_CE_WEIGHTS,
        .types = {GRADD_T_FLOAT, GRADD_T_INDEX, GRADD_T_NUM, GRADD_T_FLOAT}, .attrs = LOSS_ATTRS,
        .infer = infer_loss, .grad = grad_loss, .expand = expand_loss, .ref = GRADD_REF(ref_loss),
        .cases = GRADD_CASES(
            {.text = "f32[4,3] i64[4]:(0,2)"},
            {.text = "f32[4,3] i32[4]:(0,2) | reduction=\"sum\""},
            {.text = "f32[4,3] " LABELS4 " | ignore_index=-100"},
            {.text = "f32[4,3] " LABELS4 " | ignore_index=-100 -> 2", .grad_tol = -1},
            {.text = "f32[2,2,3] " LABELS4 " | ignore_index=-100 reduction=\"none\""},
            {.text = "f32[2,4,3] i64[2,4]:(0,2) | shift=1"},
            {.text = "f32[2,4,3] i64[2,4]={0,1,2,0,2,1,0,2} | shift=1 ignore_index=0"},
            {.text = "f32[1,3] i64[1]={1} | shift=1 reduction=\"sum\""},
            {.text = "f32[2,4,3] i64[2,4]:(0,2) i64[]={5} | shift=1 reduction=\"sum\""},
            {.text = "f32[4,3] i64[4]:(0,2) i32[1]={3} | reduction=\"sum\""},
            {.text = "f32[4,3] " LABELS4 " | ignore_index=-100 smoothing=0.1"},
            {.text = "f32[2,4,7] i64[2,4]:(0,6) | shift=1 smoothing=0.3 reduction=\"sum\""},
            {.text = "f32[2,3] i64[2]={-1,-1} | ignore_index=-1", .grad_tol = -1},
            {.text = "f32[4,3] i64[4]:(0,2) - f32[3]:(0.1,2)"},
            {.text = "f32[2,4,3] i64[2,4]={0,1,2,0,2,1,0,2} - f32[3]:(0.1,2) | shift=1 "
                     "ignore_index=0"},
            {.text = "f32[4,3] " LABELS4 " - f32[3]={0.5,0,2} | ignore_index=-100 "
                     "smoothing=0.1"},
            {.text = "f32[2,2,3] " LABELS4 " - f32[3]:(0.1,2) | ignore_index=-100 "
                     "smoothing=0.3 reduction=\"none\""},
            {.text = "f32[4,3] i64[4]:(0,2) i32[1]={3} f32[3]:(0.1,2) | reduction=\"sum\" "
                     "smoothing=0.2 -> 2",
             .grad_tol = -1},
            {.text = "f32[2,3] i64[2]={-1,-1} - f32[3] | ignore_index=-1", .grad_tol = -1},
            {.text = "f32[2,3] i64[2]={1,1} - f32[3]={1,0,1}", .grad_tol = -1},
            {.text = "f32[3,2500]:(-30,30) i64[3]:(0,2499) - f32[2500]:(0,2) | "
                     "smoothing=0.05"},
            {.text = "f32[1,1] i64[1]={0}"}, {.text = "f32[0,3] i64[0] | reduction=\"sum\""},
            {.text = "f32[67,1031]:(-9,9) i64[67]:(0,1030) | ignore_index=7"},
            {.text = "f32[3,2500]:(-30,30) i64[3]:(0,2499) | smoothing=0.05"},
            {.text = "f32[3,1024]:(-30,30) i64[3]:(0,1023) | smoothing=0.05 -> 2", .grad_tol = -1},
            {.text = "f32[2,9000]:(-30,30) i64[2]:(0,8999) - f32[9000]:(0,2) | "
                     "smoothing=0.05 -> 2",
             .grad_tol = -1},
            {.text = "f32[600,8] i64[600]:(0,7) -> 2", .grad_tol = -1},
            {.text = "f32[4,3]={1,nan,2,1,inf,1,-inf,-inf,-inf,-inf,1,2} i64[4]={0,0,1,1} | "
                     "reduction=\"none\" -> 2",
             .grad_tol = -1},
            {.text = "f32[2,2]={1000,0,0,-1000} i64[2]={1,1}", .grad_tol = -1})),
    GRADD_OP(
        "CrossEntropyGrad", "com.gradd", 1, (GRADD_CE_GRAD_ITEMS, GRADD_CE_GRAD_INPUTS), (1, 1),
        .flags = GRADD_OP_INTERNAL | GRADD_OP_NO_GRAD,
        .types = {GRADD_T_FLOAT, GRADD_T_FLOAT, GRADD_T_INDEX, GRADD_T_FLOAT, GRADD_T_NUM,
                  GRADD_T_FLOAT},
        .attrs = LOSS_ATTRS, .infer = infer_loss_grad, .ref = GRADD_REF(ref_loss_grad),
        .cases = GRADD_CASES(
            {.text = "f32[] f32[4,3] " LABELS4 " f32[4,2]:(0.5,1) | ignore_index=-100"},
            {.text = "f32[4] f32[4,3] i32[4]:(0,2) f32[4,2]:(0.5,1) | reduction=\"none\""},
            {.text =
                 "f32[] f32[2,3,4] i64[2,3]:(0,3) f32[6,2]:(0.5,1) i64[]={7} | reduction=\"sum\" "
                 "shift=1 smoothing=0.2"},
            {.text = "f32[] f32[67,1031]:(-3,3) i64[67]:(0,1030) f32[67,2]:(0.5,1) | "
                     "ignore_index=7"},
            {.text = "f32[] f32[67,1031]:(-3,3) i64[67]:(0,1030) f32[67,2]:(0.5,1) - f32[1031] | "
                     "ignore_index=7 smoothing=0.2"},
            {.text = "f32[] f32[3,1024]:(-3,3) i64[3]:(0,1023) f32[3,2]:(0.5,1) - f32[1024] | "
                     "smoothing=0.2"},
            {.text = "f32[] f32[2,9000]:(-3,3) i64[2]:(0,8999) f32[2,2]:(0.5,1)"})));

GRADD_KERNELS(cpu, crossentropy,
              GRADD_KERNEL("CrossEntropy", "loop",
                           .types = {GRADD_T_FLOAT, GRADD_T_INDEX, GRADD_T_F32_F64 | GRADD_T_INT,
                                     GRADD_T_F32_F64},
                           .compute = compute_loss, .workspace = workspace_loss,
                           .parts = parts_loss),
              GRADD_KERNEL("CrossEntropyGrad", "loop",
                           .types = {GRADD_T_F32_F64, GRADD_T_FLOAT, GRADD_T_INDEX, GRADD_T_F32_F64,
                                     GRADD_T_F32_F64 | GRADD_T_INT, GRADD_T_F32_F64},
                           .inplace = 1 << GRADD_CE_GRAD_LOGITS, .compute = compute_loss_grad,
                           .workspace = workspace_loss_grad, .parts = parts_loss_grad));
