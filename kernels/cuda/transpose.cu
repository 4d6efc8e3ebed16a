/* Transpose on a GPU. See kernels/ops/shape/transpose.c. */
#include "kernels/cuda/copy.h"
#include "kernels/describe/cost.h"

static gradd_status_t compute_transpose(const gradd_launch_t *r) {
    gradd_move_t move;
    GRADD_TRY(gradd_move_of_transpose(r, &move));
    return gpu_move(r, move);
}

GRADD_KERNELS(cuda, transpose,
              GRADD_KERNEL("Transpose", "move", .compute = compute_transpose,
                           .cost = gradd_cost_move));
