/* The contract of WindowMax: how its operands are read. Pure functions, for every device. */
#ifndef GRADD_KERNELS_DESCRIBE_WINDOWMAX_H
#define GRADD_KERNELS_DESCRIBE_WINDOWMAX_H

#include "kernels/contract/op.h"

#define GRADD_WINDOW_AXES  3       /* at most */
#define GRADD_WINDOW_STEPS "steps" /* between the elements of a window, for each axis; 1 */

/* The last axes of x and y, with ones in front up to three. */
typedef struct gradd_plane_s {
    int64_t planes;               /* product of the other axes */
    int64_t n[GRADD_WINDOW_AXES]; /* of x, or of dx */
    int64_t m[GRADD_WINDOW_AXES]; /* of y, or of dy */
    int64_t step[GRADD_WINDOW_AXES];
    const int64_t *span[GRADD_WINDOW_AXES]; /* NULL = the one element of an axis of ones */
} gradd_plane_t;

/* Operands from `first` on are the spans of the last axes of x and y. */
static inline gradd_plane_t gradd_plane_of(const gradd_launch_t *r, const gradd_type_t *x,
                                           const gradd_type_t *y, int first) {
    const int axes = r->n_in - first;
    const gradd_attr_t *steps = gradd_attr_find(r->attrs, GRADD_WINDOW_STEPS);
    gradd_plane_t p = {
        1, {1,    1,    1   },
         {1,    1,    1   },
         {1,    1,    1   },
         {NULL, NULL, NULL}
    };
    for (int i = 0; i < x->rank - axes; i++)
        p.planes *= x->dims[i];
    for (int i = 0; i < axes; i++) {
        const int to = GRADD_WINDOW_AXES - axes + i, axis = x->rank - axes + i;
        p.n[to] = x->dims[axis];
        p.m[to] = y->dims[axis];
        if (steps) p.step[to] = steps->ints[i];
        p.span[to] = (const int64_t *)r->in[first + i].data;
    }
    return p;
}

#endif
