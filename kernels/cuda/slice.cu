/* Slice and its gradient on a GPU. See kernels/ops/shape/slice.c.
 *
 * A gradient without steps is a Pad, in one pass; with steps it is written into zeros. */
#include "kernels/cuda/copy.h"
#include "kernels/describe/cost.h"

static gradd_status_t compute_slice(const gradd_launch_t *r) {
    gradd_move_t move;
    GRADD_TRY(gradd_move_of_slice(r, &move));
    return gpu_move(r, move);
}

static gradd_status_t compute_slice_grad(const gradd_launch_t *r) {
    const gradd_type_t *dx = &r->out[0].type;
    const gradd_attr_t *steps = gradd_attr_find(r->attrs, "steps");
    gradd_move_t move;
    bool stepless = true;
    for (size_t i = 0; i < steps->n; i++)
        stepless &= steps->ints[i] == 1;
    if (stepless && gradd_type_count(&r->in[0].type)) {
        const int64_t *begin = gradd_attr_find(r->attrs, "starts")->ints;
        return gpu_put_around("SliceGrad", {&r->in[0], &r->out[0], begin, NULL});
    }
    GRADD_TRY(gradd_move_of_slice_grad(r, &move));
    GRADD_TRY(gpu_fill("SliceGrad", r->out[0].data, gradd_type_count(dx),
                       gradd_dtype_bytes(dx->dtype), 0));
    return gpu_move(r, move);
}

GRADD_KERNELS(cuda, slice,
              GRADD_KERNEL("Slice", "move", .host_in = 0x1e, .compute = compute_slice,
                           .cost = gradd_cost_move),
              GRADD_KERNEL("SliceGrad", "move", .compute = compute_slice_grad,
                           .cost = gradd_cost_move));
