/* The cost of an operator call: arithmetic and bytes moved.
 *
 * For people (explain, estimate) and tools. Two decisions of the engine depend on it: whether a
 * plan is worth more than one thread (server/plan/threads.c), and which values are computed again
 * under a memory budget (server/plan/recompute.h). Products are counted exactly, 2 m n k;
 * everything else as one operation per element, which is what it costs next to them; operators that
 * only move elements count none.
 */
#ifndef GRADD_KERNELS_DESCRIBE_COST_H
#define GRADD_KERNELS_DESCRIBE_COST_H

#include "kernels/contract/kernel.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The cost of one call of the kernel with these types; c->out is set, absent operands have no
 * dtype. */
void gradd_kernel_cost(const gradd_kernel_t *kernel, const gradd_infer_t *c,
                       gradd_cost_t *out_cost);

/* For rows. It moves or makes elements: no arithmetic. */
void gradd_cost_move(const gradd_infer_t *c, gradd_cost_t *cost);
/* It picks elements out of in[0]: moves, and reads of in[0] no more than it writes. */
void gradd_cost_pick(const gradd_infer_t *c, gradd_cost_t *cost);

#ifdef __cplusplus
}
#endif

#endif
