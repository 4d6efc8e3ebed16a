/* Convolutions on the CPU: the plain loops that define them, and the ways in which they are
 * computed. See kernels/describe/conv.h for the relation and its three operators.
 *
 * All functions take a relation and the memory of its tensors: x, w and y, of which one is the
 * result, and the bias of the result (NULL: none). The same relation, operands and thread count
 * give the same bits. Engine thread; parallel regions of OpenMP.
 */
#ifndef GRADD_KERNELS_CPU_CONV_CONV_H
#define GRADD_KERNELS_CPU_CONV_CONV_H

#include "kernels/contract/kernel.h"
#include "kernels/describe/conv.h"

typedef struct gradd_conv_memory_s {
    void *x, *w, *y; /* operands are only read */
    const void *bias;
    void *workspace;
} gradd_conv_memory_t;

/* Of a node, a launch: the relation of its operator, and which tensor it makes. */
gradd_status_t gradd_conv_of_node(const gradd_infer_t *c, gradd_conv_t *out,
                                  gradd_conv_made_t *out_made);
gradd_status_t gradd_conv_of_launch(const gradd_launch_t *r, gradd_conv_t *out,
                                    gradd_conv_made_t *out_made);
gradd_conv_memory_t gradd_conv_memory(const gradd_launch_t *r, gradd_conv_made_t made);

/* The definition: plain loops in f32 and f64, sums in double. */
gradd_status_t gradd_conv_ref(const gradd_launch_t *r);

/* Columns: the patches of x as a matrix, piece by piece, and a matrix product; f32 and f64. */
gradd_status_t gradd_conv_columns_prepare(const gradd_infer_t *c, gradd_prepared_t *out);
void gradd_conv_columns_unprepare(gradd_prepared_t *prepared);
gradd_status_t gradd_conv_columns(const gradd_launch_t *r);

/* Channel by channel; f32 and f64. Taken where every channel of x has a group of its own. */
bool gradd_conv_depthwise_accepts(const gradd_infer_t *c);
gradd_status_t gradd_conv_depthwise_prepare(const gradd_infer_t *c, gradd_prepared_t *out);
void gradd_conv_depthwise_unprepare(gradd_prepared_t *prepared);
gradd_status_t gradd_conv_depthwise(const gradd_launch_t *r);

/* The same over channels-last tensors; f32 and bf16. Taken where a channel of x makes one of y. */
bool gradd_conv_depthwise_last_accepts(const gradd_infer_t *c);
gradd_status_t gradd_conv_depthwise_last_prepare(const gradd_infer_t *c, gradd_prepared_t *out);
void gradd_conv_depthwise_last_unprepare(gradd_prepared_t *prepared);
gradd_status_t gradd_conv_depthwise_last(const gradd_launch_t *r);

/* By oneDNN, f32 and bf16, where it has a kernel that is worth its reorders. */
bool gradd_conv_onednn_accepts(const gradd_infer_t *c);
/* Of a relation; `dtype` is that of what is made: a weight's gradient of bf16 may be f32. */
bool gradd_conv_onednn_has(const gradd_conv_t *v, gradd_conv_made_t made, gradd_dtype_t dtype);
gradd_status_t gradd_conv_onednn_prepare(const gradd_conv_t *v, gradd_conv_made_t made,
                                         gradd_dtype_t dtype, gradd_prepared_t *out);
void gradd_conv_onednn_unprepare(gradd_prepared_t *prepared);
gradd_status_t gradd_conv_onednn(const void *state, const gradd_conv_memory_t *m);

/* The same for launches, which are made in parts: of some images, or of a band of rows of one. Of a
 * gradient of a weight each is added to the sum of those before, in f32, where that costs little.
 * So the sum has another order than without parts; other results have it where the library has
 * another way to compute a band. */
gradd_status_t gradd_conv_parts_prepare(const gradd_infer_t *c, gradd_prepared_t *out);
void gradd_conv_parts_unprepare(gradd_prepared_t *prepared);
gradd_status_t gradd_conv_parts(const gradd_launch_t *r);

#endif
