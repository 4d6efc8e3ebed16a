/* Windows along one axis: for each of `out` results, which of the axis' n elements it is made of.
 *
 * A span is [out, 2]: the first element and how many there are, `step` apart. Pooling has windows
 * of one size, adaptive pooling divides the axis, and a resampling has a weight for each element
 * (taps). Spans and weights are constants of a plan, made when its sizes are known. Taps turned
 * around say which results an element is part of: they are the windows of the backward.
 *
 * Ownership: the arrays are the struct's, given back with gradd_windows_finish, which accepts half
 * built ones. Errors: NOMEM, LIMIT, GRAPH. Engine thread.
 */
#ifndef GRADD_KERNELS_DESCRIBE_WINDOWS_H
#define GRADD_KERNELS_DESCRIBE_WINDOWS_H

#include "kernels/contract/op.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gradd_windows_s {
    int64_t n, out, width; /* width: of the largest span, at least 1 */
    int64_t *span;         /* Owned: [out, 2] */
    double *weight;        /* Owned: [out, width], behind a span's end 0; NULL = none */
} gradd_windows_t;

/* What a pooling says about one axis. */
typedef struct gradd_pool_axis_s {
    int64_t kernel, stride, dilation;
    int64_t before, after; /* padding */
    bool ceil;             /* a last window that reaches beyond the padding counts */
} gradd_pool_axis_t;

/* Number of windows; a last one begins within the axis or the padding in front of it. */
gradd_status_t gradd_pool_count(int64_t n, const gradd_pool_axis_t *axis, int64_t *out_count);
/* Of a pooling; with weights of 1 / the number of elements, or of those and the padding. */
gradd_status_t gradd_windows_pool(int64_t n, const gradd_pool_axis_t *axis, gradd_windows_t *out);
gradd_status_t gradd_windows_average(int64_t n, const gradd_pool_axis_t *axis, bool with_padding,
                                     gradd_windows_t *out);
/* Windows that divide the axis into `count` parts, which may overlap; with weights, or none. */
gradd_status_t gradd_windows_adaptive(int64_t n, int64_t count, bool weights, gradd_windows_t *out);
/* Room for `out` spans of at most `width` elements with weights; all are empty. */
gradd_status_t gradd_windows_room(int64_t n, int64_t out, int64_t width, gradd_windows_t *windows);
/* From [out, 2] of spans with a step, and weights ([out, width], or NULL), to the results that each
 * element is part of. With a step above 1 a span holds results in between that it is not part of.
 * Ends and beginnings of spans must not fall. */
gradd_status_t gradd_windows_turned(const gradd_windows_t *windows, int64_t step,
                                    gradd_windows_t *out);
void gradd_windows_finish(gradd_windows_t *windows);

/* Checks a span that a node is given: known, [out, 2], within n elements. */
gradd_status_t gradd_check_span(const gradd_infer_t *c, int input, int64_t n, int64_t step);

/* The constant spans, and weights in that type. */
gradd_val_t gradd_windows_span(gradd_builder_t *b, const gradd_windows_t *windows);
gradd_val_t gradd_windows_weight(gradd_builder_t *b, const gradd_windows_t *windows,
                                 gradd_dtype_t dtype);
/* Taps(x) along an axis, in f32 for halves. */
gradd_val_t gradd_emit_taps(gradd_builder_t *b, gradd_val_t x, int axis,
                            const gradd_windows_t *windows);

#ifdef __cplusplus
}
#endif
#endif
