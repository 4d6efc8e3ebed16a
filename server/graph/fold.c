/* Constant folding. See fold.h.
 *
 * A result that is small, as shape arithmetic is, is always folded. Larger ones are folded as long
 * as the graph's constants and the work for them stay within bounds, and computed at run time after
 * that: the 200000 nodes of a hostile model must not become 200000 times 4 MiB or minutes of
 * compiling.
 */
#include "server/graph/fold.h"

#include <math.h>

/* Larger results are computed at run time: holding them would cost memory for little time. */
#define FOLD_MAX_BYTES ((int64_t)4 << 20)
#define FOLD_SMALL     ((int64_t)1 << 10) /* of operands and results together */
/* Of one graph: bytes held, and bytes read and written, for results that are not small. */
#define FOLD_TOTAL_BYTES ((int64_t)64 << 20)
#define FOLD_TOTAL_COST  ((int64_t)1 << 30)

static bool is_known(const gradd_infer_t *c) {
    if (c->op->flags & GRADD_OP_RANDOM) return false;
    if (c->op->flags & GRADD_OP_SHAPE_ONLY) return true;
    for (int i = 0; i < c->n_in; i++)
        if (c->in[i].type.dtype != GRADD_DT_NONE && !c->in[i].data) return false;
    return true;
}

/* Bytes that computing the node touches. A product of m k by k n elements takes m n k steps, the
 * root of the product of the three sizes. */
static int64_t cost_of(const gradd_infer_t *c, int64_t out_bytes) {
    double sum = (double)out_bytes, product = (double)out_bytes;
    if (c->op->flags & GRADD_OP_SHAPE_ONLY) return out_bytes;
    for (int i = 0; i < c->n_in; i++) {
        if (c->in[i].type.dtype == GRADD_DT_NONE) continue;
        double bytes = (double)gradd_type_bytes(&c->in[i].type);
        sum += bytes;
        if (i < 2) product *= bytes;
    }
    if (c->op->flags & GRADD_OP_COSTLY) sum += sqrt(product);
    return sum < 0x1p62 ? (int64_t)sum : INT64_MAX / 2;
}

static bool foldable(graph_t *g, const gradd_infer_t *c) {
    if (!is_known(c) || !gradd_cpu_can(c)) return false; /* of a type that only the device has */
    int64_t total = 0;
    for (int j = 0; j < c->n_out; j++) {
        if (c->out[j].dtype == GRADD_DT_NONE) return false;
        int64_t bytes = gradd_type_bytes(&c->out[j]);
        if (bytes > FOLD_MAX_BYTES - total) return false;
        total += bytes;
    }
    int64_t cost = cost_of(c, total);
    if (cost <= FOLD_SMALL) return true;
    if (c->op->flags & GRADD_OP_UNPACKS) return false;
    if (total > FOLD_TOTAL_BYTES - g->fold_bytes || cost > FOLD_TOTAL_COST - g->fold_cost)
        return false;
    g->fold_bytes += total;
    g->fold_cost += cost;
    return true;
}

static gradd_status_t compute_now(const gradd_infer_t *c, const graph_emit_t *e,
                                  gradd_view_t *views) {
    gradd_launch_t launch = {.op = c->op,
                             .attrs = c->attrs,
                             .opset = c->opset,
                             .n_in = c->n_in,
                             .n_out = c->n_out,
                             .in = c->in,
                             .out = views,
                             .node = e->random};
    bool empty = true;
    for (int j = 0; j < c->n_out; j++)
        empty = empty && !gradd_type_count(&c->out[j]);
    if (empty) return GRADD_OK; /* of whatever shape: no loop over its rows */
    return gradd_cpu_call(c, &launch);
}

gradd_status_t graph_fold(graph_t *g, const gradd_infer_t *c, const graph_emit_t *e,
                          gradd_val_t *out, bool *out_folded) {
    *out_folded = false;
    if (!foldable(g, c)) return GRADD_OK;
    gradd_view_t views[GRADD_OP_MAX_OUT];
    for (int j = 0; j < c->n_out; j++) {
        int64_t bytes = gradd_type_bytes(&c->out[j]);
        views[j].type = c->out[j];
        views[j].data = arena_alloc_aligned(g->arena, (size_t)bytes, GRADD_TENSOR_ALIGN);
        if (!views[j].data) return GRADD_FAIL(NOMEM, "no memory to fold a constant");
    }
    GRADD_TRY(compute_now(c, e, views));
    for (int j = 0; j < c->n_out; j++) {
        graph_value_t value = {
            .type = views[j].type, .data = views[j].data, .kind = VALUE_CONST, .node = -1};
        GRADD_TRY(graph_new_value(g, &value, &out[j]));
    }
    *out_folded = true;
    return GRADD_OK;
}
