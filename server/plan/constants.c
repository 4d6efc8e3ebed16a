/* The values that launches read and that are known when the plan is made: initializers of the
 * model, folded values, constants of rules. See plan.h.
 *
 * A device that reads the process's memory takes them where they lie, so that many plans of a model
 * share its initializers. For another one they are copied into blocks of its memory; the graph's
 * own copies stay, because shape rules and folding read them when another backward is compiled. */
#include <stdlib.h>
#include <string.h>

#include "server/plan/plan.h"

static gradd_status_t no_memory(void) {
    return GRADD_FAIL(NOMEM, "no memory for the constants of a plan");
}

/* The graph has got more values since. */
static gradd_status_t widen(constants_t *c, int n) {
    if (n <= c->n) return GRADD_OK;
    loc_t *wider = realloc(c->loc, sizeof wider[0] * (size_t)n);
    if (!wider) return no_memory();
    memset(wider + c->n, 0, sizeof wider[0] * (size_t)(n - c->n));
    c->loc = wider;
    c->n = n;
    return GRADD_OK;
}

gradd_status_t constants_place(gradd_plan_t *p, gradd_val_t v, loc_t *out) {
    constants_t *c = &p->constants;
    const graph_value_t *value = p->graph->values[v];
    if (p->device->backend->host) {
        *out = (loc_t){LOC_HOST, 0, (int64_t)(intptr_t)value->data};
        return GRADD_OK;
    }
    GRADD_TRY(widen(c, p->graph->n_values));
    if (c->loc[v].kind == LOC_NONE) {
        const int64_t bytes = gradd_type_bytes(&value->type), align = GRADD_TENSOR_ALIGN;
        c->loc[v] = (loc_t){LOC_CONST, c->n_blocks, c->waiting_bytes};
        c->waiting_bytes += (bytes / align + 1) * align; /* of no bytes as well */
    }
    *out = c->loc[v];
    return GRADD_OK;
}

static gradd_status_t fill(const gradd_plan_t *p, char *block) {
    const constants_t *c = &p->constants;
    const gradd_device_t *d = p->device;
    GRADD_TRY(d->backend->queue_enter(d->queue, 0));
    for (int v = 0; v < c->n; v++) {
        const graph_value_t *value = p->graph->values[v];
        if (c->loc[v].kind != LOC_CONST || c->loc[v].index != c->n_blocks) continue;
        GRADD_TRY(d->backend->copy(d->queue, block + c->loc[v].offset, value->data,
                                   (size_t)gradd_type_bytes(&value->type)));
    }
    return GRADD_OK;
}

gradd_status_t constants_upload(gradd_plan_t *p) {
    constants_t *c = &p->constants;
    gradd_device_t *d = p->device;
    void *block;
    if (!c->waiting_bytes) return GRADD_OK;
    constant_block_t *wider = realloc(c->blocks, sizeof wider[0] * ((size_t)c->n_blocks + 1));
    if (!wider) return no_memory();
    c->blocks = wider;
    GRADD_TRY(device_alloc(d, c->waiting_bytes, &block));
    gradd_status_t status = fill(p, block);
    if (status) {
        d->backend->free(d->queue, block, (size_t)c->waiting_bytes);
        return status;
    }
    c->blocks[c->n_blocks++] = (constant_block_t){block, c->waiting_bytes};
    c->bytes += c->waiting_bytes;
    c->waiting_bytes = 0;
    return GRADD_OK;
}

void constants_finish(gradd_plan_t *p) {
    constants_t *c = &p->constants;
    for (int i = 0; i < c->n_blocks; i++)
        p->device->backend->free(p->device->queue, c->blocks[i].memory, (size_t)c->blocks[i].bytes);
    free(c->blocks);
    free(c->loc);
}
