/* The product of a head and its cross-entropy, chunk of rows by chunk of rows.
 *
 * The rows that count are gathered; the logits of a chunk of them lie in the workspace, become
 * their gradient there, and go into the gradients of rows and weight before the next chunk. So the
 * workspace has one chunk of logits, no product is computed twice, and rows that do not count cost
 * nothing. Of x only rows that count are read: those with a label, and those whose log-sum-exp has
 * a weight other than zero.
 *
 * A chunk is cut into pieces of a few sizes, for each of which the products are prepared. */
#ifndef GRADD_KERNELS_CPU_LINEAR_LOSS_H
#define GRADD_KERNELS_CPU_LINEAR_LOSS_H

#include "kernels/cpu/loss_labels.h"
#include "kernels/describe/head.h"

/* With a chunk of so many rows the products take twelve times as long as what goes through memory
 * once more per chunk, by the rates of server/plan/threads.c: 10 bytes per entry of the weight for
 * 6 operations per row in bf16, 16 in f32 at half the rate. A block stays in a cache. */
#define GRADD_CPU_HEAD_ROWS  512
#define GRADD_CPU_HEAD_BLOCK ((int64_t)2 << 20)

/* Those of the loss. */
gradd_loss_operands_t gradd_head_operands(const gradd_view_t *in, int n_in);

gradd_status_t gradd_head_prepare(const gradd_infer_t *c, gradd_prepared_t *out);
void gradd_head_unprepare(gradd_prepared_t *prepared);
gradd_status_t gradd_head_compute(const gradd_launch_t *r);
/* The definition: row by row, sums in double. */
gradd_status_t gradd_head_ref(const gradd_launch_t *r);

#endif
