/* Launches that are cut by rows, for kernels that make no parts of their own.
 *
 * An operator that makes each row of its results from that row of its operands alone (rowwise in
 * op.h) may compute some of the rows at a time: the kernel sees operands with the leading axes
 * (1, ..., 1, k) in place of all of them. Which rows belong to a part is a matter of types alone.
 */
#ifndef GRADD_KERNELS_CONTRACT_CUT_H
#define GRADD_KERNELS_CONTRACT_CUT_H

#include "kernels/contract/kernel.h"

#ifdef __cplusplus
extern "C" {
#endif

/* An operand of which a part has some rows. */
typedef struct gradd_cut_operand_s {
    int lead;      /* its first axes are the rows; 0 = each part has all of it */
    int64_t bytes; /* of a row */
} gradd_cut_operand_t;

typedef struct gradd_cut_s {
    int64_t rows, each; /* all, and those of each part but the last */
    int parts;
    gradd_prepared_t all, last; /* for parts of `each` rows, and for the last one if it has fewer */
    int n_in, n_out;
    gradd_cut_operand_t of[]; /* inputs, then outputs */
} gradd_cut_t;

/* How launches are cut that are to be made in c->parts parts, nothing prepared; NULL: not at all,
 * because rows are not independent of each other, are too few, or there is no memory. Owned by the
 * caller, to be freed with free(). */
gradd_cut_t *gradd_cut_find(const gradd_kernel_t *kernel, const gradd_infer_t *c);
/* The part r->part of a launch. */
gradd_status_t gradd_cut_compute(const gradd_kernel_t *kernel, const gradd_launch_t *r);
/* What the kernel sees when it prepares for so many rows; in and out are room for the operands. */
gradd_infer_t gradd_cut_describe(const gradd_cut_t *cut, const gradd_infer_t *c, int64_t rows,
                                 gradd_view_t *in, gradd_type_t *out);

#ifdef __cplusplus
}
#endif
#endif
