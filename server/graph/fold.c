/* Constant folding. See fold.h. */
#include "server/graph/fold.h"

#include <stdlib.h>

/* Larger results are computed at run time: holding them would cost memory for little time. */
#define FOLD_MAX_BYTES ((int64_t)4 << 20)

static bool foldable(const gradd_infer_t *c) {
    if (c->op->flags & GRADD_OP_RANDOM) return false;
    if (!(c->op->flags & GRADD_OP_SHAPE_ONLY))
        for (int i = 0; i < c->n_in; i++)
            if (c->in[i].type.dtype != GRADD_DT_NONE && !c->in[i].data) return false;
    int64_t total = 0;
    for (int j = 0; j < c->n_out; j++) {
        if (c->out[j].dtype == GRADD_DT_NONE) return false;
        int64_t bytes = gradd_type_bytes(&c->out[j]);
        if (bytes > FOLD_MAX_BYTES - total) return false;
        total += bytes;
    }
    return true;
}

static gradd_status_t run_now(const gradd_infer_t *c, const graph_emit_t *e, gradd_view_t *views) {
    gradd_run_t run = {.op = c->op,
                       .attrs = c->attrs,
                       .opset = c->opset,
                       .n_in = c->n_in,
                       .n_out = c->n_out,
                       .in = c->in,
                       .out = views,
                       .node = e->random};
    size_t work = c->op->work ? c->op->work(c) : 0;
    if (work) {
        run.work = aligned_alloc(GRADD_TENSOR_ALIGN, (work + 63) / 64 * 64);
        if (!run.work) return GRADD_FAIL(NOMEM, "no memory to fold a constant");
    }
    gradd_status_t status = c->op->run(&run);
    free(run.work);
    return status;
}

gradd_status_t graph_fold(graph_t *g, const gradd_infer_t *c, const graph_emit_t *e,
                          gradd_val_t *out, bool *out_folded) {
    *out_folded = false;
    if (!foldable(c)) return GRADD_OK;
    gradd_view_t views[GRADD_OP_MAX_OUT];
    for (int j = 0; j < c->n_out; j++) {
        int64_t bytes = gradd_type_bytes(&c->out[j]);
        views[j].type = c->out[j];
        views[j].data = arena_alloc_aligned(g->arena, (size_t)bytes, GRADD_TENSOR_ALIGN);
        if (!views[j].data) return GRADD_FAIL(NOMEM, "no memory to fold a constant");
    }
    GRADD_TRY(run_now(c, e, views));
    for (int j = 0; j < c->n_out; j++) {
        graph_value_t value = {
            .type = views[j].type, .data = views[j].data, .kind = VALUE_CONST, .node = -1};
        GRADD_TRY(graph_new_value(g, &value, &out[j]));
    }
    *out_folded = true;
    return GRADD_OK;
}
