/* Operators that give the same bytes another shape, where these must move. See
 * kernels/ops/shape/reshape.c. */
#include "kernels/cuda/copy.h"
#include "kernels/describe/cost.h"

static gradd_status_t compute_view(const gradd_launch_t *r) {
    return gpu_copy_bytes(r->op->name, r->out[0].data, r->in[0].data,
                          (size_t)gradd_type_bytes(&r->out[0].type));
}

#define VIEW(op) GRADD_KERNEL(op, "move", .compute = compute_view, .cost = gradd_cost_move)

GRADD_KERNELS(cuda, reshape, VIEW("Reshape"), VIEW("Squeeze"), VIEW("Unsqueeze"), VIEW("Flatten"),
              VIEW("Identity"), VIEW("StopGradient"));
