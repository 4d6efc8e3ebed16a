/* The default cost of a call, unless its kernel gives another. See cost.h. */
#include "kernels/describe/cost.h"

static int64_t larger(int64_t a, int64_t b) {
    return a > b ? a : b;
}

void gradd_kernel_cost(const gradd_kernel_t *kernel, const gradd_infer_t *c,
                       gradd_cost_t *out_cost) {
    gradd_cost_t cost = {0};
    int64_t elements = 0;
    for (int i = 0; i < c->n_in; i++) {
        if (c->in[i].type.dtype == GRADD_DT_NONE) continue;
        cost.read += gradd_type_bytes(&c->in[i].type);
        elements = larger(elements, gradd_type_count(&c->in[i].type));
    }
    for (int j = 0; j < c->n_out; j++) {
        if (c->out[j].dtype == GRADD_DT_NONE) continue;
        cost.written += gradd_type_bytes(&c->out[j]);
        elements = larger(elements, gradd_type_count(&c->out[j]));
    }
    cost.flops = (double)elements;
    if (kernel->cost) kernel->cost(c, &cost);
    *out_cost = cost;
}

void gradd_cost_move(const gradd_infer_t *c, gradd_cost_t *cost) {
    (void)c;
    cost->flops = 0;
}

void gradd_cost_pick(const gradd_infer_t *c, gradd_cost_t *cost) {
    int64_t whole = gradd_type_bytes(&c->in[0].type), taken = gradd_type_bytes(&c->out[0]);
    cost->flops = 0;
    if (taken < whole) cost->read -= whole - taken;
}
