/* StraightThrough on a GPU: a copy. See kernels/ops/elementwise/straight.c. */
#include "kernels/cuda/map.h"

#include "kernels/describe/cost.h"

static gradd_status_t compute_straight(const gradd_launch_t *r) {
    return gpu_copy("StraightThrough", r->out[0].data, r->in[0].data,
                    gradd_type_bytes(&r->out[0].type));
}

GRADD_KERNELS(cuda, straight,
              GRADD_KERNEL("StraightThrough", "move", .inplace = 1, .compute = compute_straight,
                           .cost = gradd_cost_move));
