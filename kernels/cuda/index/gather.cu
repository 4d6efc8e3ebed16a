/* Gather, GatherND, GatherElements and their gradients on a GPU. See kernels/ops/index/gather.c,
 * pick.h and runs.h. */
#include "kernels/cuda/index/runs.h"
#include "kernels/describe/cost.h"

#include <string.h>

/* Of the node; `data` is the indexed tensor: x in forward, dx in backward. */
static gradd_status_t pick_of(const gradd_op_t *op, gradd_attrs_t attrs, const gradd_type_t &data,
                              const gradd_view_t &indices, gpu_pick *out) {
    int axis;
    if (!strncmp(op->name, "GatherND", 8)) {
        *out = gpu_pick_nd(data, (int)gradd_attr_int(attrs, "batch_dims", 0), indices);
        return GRADD_OK;
    }
    GRADD_TRY(gradd_axis(gradd_attr_int(attrs, "axis", 0), data.rank, false, &axis));
    *out = !strncmp(op->name, "GatherElements", 14) ? gpu_pick_elements(data, axis, indices)
                                                    : gpu_pick_axis(data, axis, indices);
    return GRADD_OK;
}

/* ---- forward --------------------------------------------------------------------------------- */

enum { MOST = 6, EACH = 4 }; /* 64 threads to a row, four packs each */

template <class P>
__global__ void GPU_BLOCK(GPU_GROUP_THREADS)
    gather_move(gpu_pick pick, gpu_groups l, P *to, const P *from, gpu_faults_t faults) {
    for (int64_t u = l.first(); u < l.units; u += l.all()) {
        const int64_t i = l.pieces(u), first = l.pack(u - i * l.pieces.by);
        if (first >= l.packs) continue;
        const int64_t row = pick(i, faults);
        if (row < 0) continue;
        gpu_part<EACH, P> x;
        x.load(from + row * l.packs + first, l.step(), l.left(first));
        x.store(to + i * l.packs + first, l.step(), l.left(first));
    }
}

static gradd_status_t compute_gather(const gradd_launch_t *r) {
    const gradd_view_t &x = r->in[0], &y = r->out[0];
    gpu_pick pick;
    if (!gradd_type_count(&y.type)) return GRADD_OK;
    GRADD_TRY(pick_of(r->op, r->attrs, x.type, r->in[1], &pick));
    const size_t bytes = (size_t)pick.size * gradd_dtype_bytes(x.type.dtype);
    return gpu_by_width(gpu_units(), (uintptr_t)x.data | (uintptr_t)y.data | bytes, [&](auto t) {
        typedef typename decltype(t)::type P;
        const gpu_groups l = gpu_groups_of(pick.n, (int64_t)(bytes / sizeof(P)), MOST, EACH);
        GPU_LAUNCH((gather_move<P>), l.blocks, GPU_GROUP_THREADS, pick, l, (P *)y.data,
                   (const P *)x.data, GPU_FAULTS);
        return gpu_launched(r->op->name);
    });
}

/* ---- backward -------------------------------------------------------------------------------- */

static gradd_status_t compute_gather_grad(const gradd_launch_t *r) {
    const gradd_view_t &dx = r->out[0];
    gpu_pick pick;
    GRADD_TRY(gpu_fill(r->op->name, dx.data, NULL, (size_t)gradd_type_bytes(&dx.type)));
    if (!gradd_type_count(&r->in[0].type)) return GRADD_OK;
    GRADD_TRY(pick_of(r->op, r->attrs, dx.type, r->in[1], &pick));
    const gpu_fold_rows_t sums = {.n = pick.n,
                                  .n_rows = pick.n_rows,
                                  .width = pick.size,
                                  .how = GPU_SCALED,
                                  .scale = 1,
                                  .clear = true,
                                  .to = dx.data,
                                  .from = r->in[0].data,
                                  .workspace = r->workspace};
    return gpu_switch(gpu_floats(), dx.type.dtype, [&](auto t) {
        return gpu_fold_rows<typename decltype(t)::type>(r->op->name, &sums, pick);
    });
}

static size_t workspace_gather_grad(const gradd_infer_t *c) {
    gpu_pick pick;
    if (!gradd_type_count(&c->in[0].type) ||
        pick_of(c->op, c->attrs, c->out[0], c->in[1], &pick) != GRADD_OK)
        return 0;
    return gpu_fold_workspace(c->out[0].dtype, pick.n, pick.n_rows, pick.size, true);
}

/* ---- rows ------------------------------------------------------------------------------------ */

#define MOVE(op) GRADD_KERNEL(op, "move", .compute = compute_gather, .cost = gradd_cost_pick)
#define SUM(op)                                                                                    \
    GRADD_KERNEL(op, "sum", .compute = compute_gather_grad, .workspace = workspace_gather_grad)

GRADD_KERNELS(cuda, gather, MOVE("Gather"), MOVE("GatherND"), MOVE("GatherElements"),
              SUM("GatherGrad"), SUM("GatherNDGrad"), SUM("GatherElementsGrad"));
