/* WithSlope on a GPU, where a plan could not alias: a copy. See kernels/ops/elementwise/slope.c. */
#include "kernels/cuda/map.h"

#include "kernels/describe/cost.h"

static gradd_status_t compute_slope(const gradd_launch_t *r) {
    return gpu_copy("WithSlope", r->out[0].data, r->in[0].data, gradd_type_bytes(&r->out[0].type));
}

GRADD_KERNELS(cuda, slope,
              GRADD_KERNEL("WithSlope", "move", .compute = compute_slope, .cost = gradd_cost_move));
