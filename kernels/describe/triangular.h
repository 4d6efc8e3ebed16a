/* What SolveTriangular solves, for all devices: sizes, and the order of the rows.
 *
 * A row of X follows from those before it: from the first on (`ascends`) with the lower triangle,
 * or the upper one of a transposed A; otherwise from the last on.
 */
#ifndef GRADD_KERNELS_DESCRIBE_TRIANGULAR_H
#define GRADD_KERNELS_DESCRIBE_TRIANGULAR_H

#include "kernels/contract/op.h"

typedef struct gradd_triangular_s {
    int64_t batch, n, k;       /* A [batch, n, n], B [batch, n, k] */
    int64_t by_row, by_column; /* elements of A from a row, or column, of the system to the next */
    bool ascends, unit;
} gradd_triangular_t;

/* `b`: the type of B, of rank 2 at least. */
static inline gradd_triangular_t gradd_triangular_of(const gradd_type_t *b, gradd_attrs_t attrs) {
    const bool transposed = gradd_attr_int(attrs, "transposed", 0);
    const bool upper = gradd_attr_int(attrs, "upper", 0);
    gradd_triangular_t s = {.batch = 1, .n = b->dims[b->rank - 2], .k = b->dims[b->rank - 1]};
    for (int i = 0; i < b->rank - 2; i++)
        s.batch *= b->dims[i];
    s.by_row = transposed ? 1 : s.n;
    s.by_column = transposed ? s.n : 1;
    s.ascends = upper == transposed;
    s.unit = gradd_attr_int(attrs, "unit", 0);
    return s;
}

#endif
