/* Taps of a resampling along one axis: by nearest elements, lines, cubics, or filters that widen
 * where the axis shrinks (antialias). See windows.h for ownership and errors.
 */
#ifndef GRADD_KERNELS_DESCRIBE_RESAMPLE_H
#define GRADD_KERNELS_DESCRIBE_RESAMPLE_H

#include "kernels/describe/windows.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum gradd_resample_kind_e {
    GRADD_RESAMPLE_NEAREST,
    GRADD_RESAMPLE_LINEAR,
    GRADD_RESAMPLE_CUBIC
} gradd_resample_kind_t;

/* PyTorch's rules. */
typedef struct gradd_torch_resample_s {
    gradd_resample_kind_t kind;
    bool exact;         /* nearest-exact */
    bool align_corners; /* first and last elements stay where they are */
    bool antialias;
    bool narrow;  /* places are computed in f32, as for values in f32 and halves */
    double scale; /* of the axis, as the caller gave it; 0 = it follows from the sizes */
} gradd_torch_resample_t;

gradd_status_t gradd_windows_torch(int64_t n, int64_t out, const gradd_torch_resample_t *how,
                                   gradd_windows_t *windows);

/* ONNX's Resize. */
typedef enum gradd_place_e {
    GRADD_PLACE_HALF_PIXEL,
    GRADD_PLACE_HALF_PIXEL_SYMMETRIC,
    GRADD_PLACE_PYTORCH_HALF_PIXEL,
    GRADD_PLACE_ALIGN_CORNERS,
    GRADD_PLACE_ASYMMETRIC
} gradd_place_t;

typedef enum gradd_round_e {
    GRADD_ROUND_PREFER_FLOOR,
    GRADD_ROUND_PREFER_CEIL,
    GRADD_ROUND_FLOOR,
    GRADD_ROUND_CEIL
} gradd_round_t;

typedef struct gradd_onnx_resample_s {
    gradd_resample_kind_t kind;
    gradd_place_t place;
    gradd_round_t round;
    bool antialias, exclude_outside;
    double cubic_a, scale;
} gradd_onnx_resample_t;

gradd_status_t gradd_windows_onnx(int64_t n, int64_t out, const gradd_onnx_resample_t *how,
                                  gradd_windows_t *windows);

#ifdef __cplusplus
}
#endif
#endif
