/* One slice of a tensor in the order in which PyTorch's CPU kernels leave it.
 *
 * Elements are read as sort keys, whatever their type, and ordered as entries
 * (kernels/math/select.h, which says what ties have to do with it).
 *
 * Threading: pure functions of their arguments.
 */
#ifndef GRADD_KERNELS_DESCRIBE_SLICE_ORDER_H
#define GRADD_KERNELS_DESCRIBE_SLICE_ORDER_H

#include "kernels/contract/op.h"
#include "kernels/math/select.h"
#include "shm/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum gradd_order_e {
    GRADD_ORDER_PARTIAL,     /* the first k sorted by a heap */
    GRADD_ORDER_SELECT,      /* the first k as introselect leaves them */
    GRADD_ORDER_SELECT_SORT, /* and then sorted */
    GRADD_ORDER_SORT,        /* all sorted; k = n */
    GRADD_ORDER_SORT_STABLY, /* k < n: the first k of that */
} gradd_order_t;

typedef struct gradd_slice_s {
    int64_t n, k, stride; /* stride in elements */
    int64_t flip;         /* -1 for the largest first, else 0 */
    gradd_dtype_t dtype;  /* F32, F64, BF16, I32 or I64 */
    gradd_order_t how;
} gradd_slice_t;

/* How many entries `out` of gradd_slice_order must have room for. */
int64_t gradd_slice_room(const gradd_slice_t *s);
/* Orders the slice that begins at x; the result is the first k entries of `out`. k > 0. */
void gradd_slice_order(const gradd_slice_t *s, const char *x, gradd_entry_t *out);

/* What TopK, TorchTopK and TorchSort make of a slice of x. */
gradd_status_t gradd_slice_of(const gradd_op_t *op, gradd_attrs_t attrs, const gradd_type_t *x,
                              const gradd_type_t *y, gradd_slice_t *out);

#ifdef __cplusplus
}
#endif

#endif
