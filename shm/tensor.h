/* Tensor types and descriptors: what two processes must agree on about one tensor.
 *
 * gradd_type_t is dtype and shape; gradd_tensor_t adds where the elements lie in a shared segment.
 * Tensors on the wire are contiguous and row-major. All size arithmetic is checked for overflow.
 */
#ifndef GRADD_SHM_TENSOR_H
#define GRADD_SHM_TENSOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "shm/dtype.h"
#include "shm/status.h"

#ifdef __cplusplus
extern "C" {
#endif

#define GRADD_MAX_RANK     8
#define GRADD_TENSOR_ALIGN 64

typedef struct gradd_type_s {
    gradd_dtype_t dtype;
    int rank;                     /* 0..GRADD_MAX_RANK */
    int64_t dims[GRADD_MAX_RANK]; /* elements, each >= 0; unused entries 0 */
} gradd_type_t;

typedef struct gradd_tensor_s {
    gradd_type_t type;
    uint64_t segment; /* id of the shared segment within the session */
    uint64_t offset;  /* bytes from the start of the segment, multiple of GRADD_TENSOR_ALIGN */
} gradd_tensor_t;

/* Fails with LIMIT if rank or a dimension is out of range or the byte size overflows int64. */
gradd_status_t gradd_type_check(const gradd_type_t *type);
/* Number of elements; the type must have passed gradd_type_check. 1 for rank 0. */
int64_t gradd_type_count(const gradd_type_t *type);
/* Bytes of all elements, without padding. */
int64_t gradd_type_bytes(const gradd_type_t *type);
bool gradd_type_equal(const gradd_type_t *a, const gradd_type_t *b);
/* Same rank and dims, whatever the dtype. */
bool gradd_type_same_shape(const gradd_type_t *a, const gradd_type_t *b);

#define GRADD_TYPE_TEXT 128
/* "f32[2,3]" into a caller's buffer of GRADD_TYPE_TEXT bytes; returns the buffer. */
const char *gradd_type_format(const gradd_type_t *type, char buffer[GRADD_TYPE_TEXT]);

#ifdef __cplusplus
}
#endif
#endif
