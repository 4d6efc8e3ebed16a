/* The contract of WindowMax: how its operands are read, and its expansion. Pure functions, for
 * every device. */
#ifndef GRADD_KERNELS_DESCRIBE_WINDOWMAX_H
#define GRADD_KERNELS_DESCRIBE_WINDOWMAX_H

#include "kernels/contract/op.h"

#define GRADD_WINDOW_AXES  3       /* at most */
#define GRADD_WINDOW_STEPS "steps" /* between the elements of a window, for each axis; 1 */

/* Operands of the gradient; x and its spans are those of the forward. */
enum { GRADD_WINDOW_DY, GRADD_WINDOW_INDEX, GRADD_WINDOW_TURNED };

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

/* The span of window j: of an axis of ones its one element. */
static inline const int64_t *gradd_plane_span(const gradd_plane_t *p, int axis, int64_t j) {
    static const int64_t one[2] = {0, 1};
    return p->span[axis] ? p->span[axis] + 2 * j : one;
}

/* WindowMax and WindowMaxGrad in operators of ONNX (windowmax.c). Errors: NOMEM, and UNSUPPORTED
 * for a window without an element where there are others. */
gradd_status_t gradd_window_max_expand(gradd_expand_t *e);
gradd_status_t gradd_window_max_grad_expand(gradd_expand_t *e);

#endif
