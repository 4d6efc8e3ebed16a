/* Rules of live rows that many operators share: see gradd_rowwise_t in op.h. Pure functions.
 */
#ifndef GRADD_KERNELS_RULES_ROWWISE_H
#define GRADD_KERNELS_RULES_ROWWISE_H

#include "kernels/contract/op.h"

/* Elementwise with numpy broadcasting: what has this rule may have its axes in any order. */
bool gradd_rowwise_map(gradd_rowwise_t *r);
/* in[0] row by row along the attribute `axis` (default: the last) and behind it; further operands
 * serve all rows. */
bool gradd_rowwise_axis(gradd_rowwise_t *r);
/* Parts of in[0] along the attribute `axis`, and the other way round. */
bool gradd_rowwise_split(gradd_rowwise_t *r);
bool gradd_rowwise_join(gradd_rowwise_t *r);
/* in[0] times one matrix, and perhaps a bias of one axis. */
bool gradd_rowwise_product(gradd_rowwise_t *r);
/* The elements of in[0] in other sizes. */
bool gradd_rowwise_view(gradd_rowwise_t *r);
/* Rows of a table: in[0][in[1]] along axis 0. */
bool gradd_rowwise_lookup(gradd_rowwise_t *r);

/* Rules of launches (kernel.h), where the operator has none. Every operand has the rows, which are
 * in front of the attribute `axis` (default: the last). */
bool gradd_rowwise_all(gradd_rowwise_t *r);
/* in[0] is a batch of which the first axis alone counts; further operands serve all of it. */
bool gradd_rowwise_batch(gradd_rowwise_t *r);
/* in[0] without the axes that are folded, which are behind the rows. */
bool gradd_rowwise_fold(gradd_rowwise_t *r);

/* What broadcasting makes of operand i, `behind` axes of which the result has more at its end. */
void gradd_rowwise_align(gradd_rowwise_t *r, int i, int behind);
/* Operand i has the rows in front, as the result has. */
bool gradd_rowwise_leads(gradd_rowwise_t *r, int i);

#endif
