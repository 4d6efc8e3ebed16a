/* The sum of several tensors of one shape in one pass; it adds the gradients of a value with
 * several readers. Operands are added from the left; bf16 and f16 in f32, rounded once. out may be
 * any of the operands. Called on the engine thread. */
#ifndef GRADD_KERNELS_CPU_SUM_H
#define GRADD_KERNELS_CPU_SUM_H

#include "kernels/contract/op.h"

/* Whether gradd_sum takes these operands: f32, bf16 or f16, all of the result's type. */
bool gradd_sum_fits(const gradd_view_t *out, const gradd_view_t *in, int n_in);
gradd_status_t gradd_sum(const gradd_view_t *out, const gradd_view_t *in, int n_in);

#endif
