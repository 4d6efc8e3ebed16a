/* Expand and Tile on a GPU. See kernels/ops/shape/expand.c. */
#include "kernels/cuda/copy.h"
#include "kernels/describe/cost.h"

static gradd_status_t compute_expand(const gradd_launch_t *r) {
    gradd_move_t move;
    GRADD_TRY(gradd_move_of_expand(r, &move));
    return gpu_move(r, move);
}

static gradd_status_t compute_tile(const gradd_launch_t *r) {
    gradd_move_t move;
    GRADD_TRY(gradd_move_of_tile(r, &move));
    return gpu_move(r, move);
}

GRADD_KERNELS(cuda, expand,
              GRADD_KERNEL("Expand", "move", .compute = compute_expand, .cost = gradd_cost_move),
              GRADD_KERNEL("Tile", "move", .compute = compute_tile, .cost = gradd_cost_move));
