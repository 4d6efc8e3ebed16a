/* Recurrent layers on the CPU: the plain loops that define them, and the kernels. See
 * kernels/ops/recurrent/recurrence.c.
 *
 * Of each step the product of all sequences is one call of the library, and what follows it goes
 * over sequences and stretches of cells in parallel. The order of all sums depends on sizes alone.
 * Engine thread; parallel regions of OpenMP.
 */
#ifndef GRADD_KERNELS_CPU_RECURRENT_RECURRENT_H
#define GRADD_KERNELS_CPU_RECURRENT_RECURRENT_H

#include "kernels/contract/kernel.h"

/* Definitions, in f32 and f64. */
gradd_status_t gradd_rnn_ref(const gradd_launch_t *r);
gradd_status_t gradd_rnn_grad_ref(const gradd_launch_t *r);

gradd_status_t gradd_rnn_prepare(const gradd_infer_t *c, gradd_prepared_t *out);
gradd_status_t gradd_rnn_grad_prepare(const gradd_infer_t *c, gradd_prepared_t *out);
void gradd_rnn_unprepare(gradd_prepared_t *prepared);
gradd_status_t gradd_rnn(const gradd_launch_t *r);
gradd_status_t gradd_rnn_grad(const gradd_launch_t *r);

#endif
