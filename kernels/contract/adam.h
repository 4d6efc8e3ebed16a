/* The arguments of the Adam family's update, the same on every device.
 *
 * The new values of a stretch of elements go to separate memory, so that a caller can commit them
 * through a journal. All arithmetic, the moments and the result are f32; parameters and gradients
 * may be stored in bf16 or f16. Per element i, with g' = grad_scale * g[i]:
 *   mode 0 (L2):    g' += wd * p;  then Adam with the transformers form below
 *   mode 1 (AdamW, transformers): m = b1 m + (1-b1) g';  v = b2 v + (1-b2) g'^2
 *                   p -= lr_c * m / (sqrt(v) + eps), lr_c = lr * sqrt(1-b2^t) / (1-b1^t)
 *                   p -= lr * wd * p   (on the updated p)
 *   mode 2 (AdamW, torch): p -= lr * wd * p first;
 *                   p -= lr / (1-b1^t) * m / (sqrt(v) / sqrt(1-b2^t) + eps)
 * Sources: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019); the modes and
 * their order are those of ONNX Runtime Training's FusedAdam. Without bias correction both
 * denominators are 1.
 */
#ifndef GRADD_KERNELS_CONTRACT_ADAM_H
#define GRADD_KERNELS_CONTRACT_ADAM_H

#include <stdbool.h>
#include <stdint.h>

#include "shm/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum gradd_adam_mode_e {
    GRADD_ADAM_L2 = 0,
    GRADD_ADAMW_TRANSFORMERS = 1,
    GRADD_ADAMW_TORCH = 2,
} gradd_adam_mode_t;

typedef struct gradd_adam_s {
    double lr, beta1, beta2, eps, weight_decay;
    gradd_adam_mode_t mode;
    bool bias_correction;
    int64_t step; /* 1 for the first step */
} gradd_adam_t;

/* One group of elements; all arrays hold n entries. Parameter and gradient are given either in f32
 * or in a half (p16, g16, of the type `half`; then p and g are NULL). With both p16 and p, p holds
 * the master weights of p16: an element of p is used where it still rounds to p16, and p16 itself
 * where it has been overwritten since. In place (out_x == x) is allowed, too. */
typedef struct gradd_adam_span_s {
    const float *p, *m, *v, *g;
    const void *p16, *g16;
    float *out_p, *out_m, *out_v;
    int64_t n;
    gradd_dtype_t half; /* of p16 and g16: bf16 or f16 */
} gradd_adam_span_t;

/* New values, and what they replace. */
typedef struct gradd_adam_commit_s {
    const float *p, *m, *v;
    void *out_p;
    gradd_dtype_t dtype; /* of out_p: f32, or a half, to which p is rounded */
    float *out_master;   /* gets p as it is; or NULL */
    float *out_m, *out_v;
    int64_t n;
} gradd_adam_commit_t;

/* A stretch of elements, in f32, bf16 or f16. */
typedef struct gradd_span_s {
    const void *data;
    gradd_dtype_t dtype;
    int64_t n;
} gradd_span_t;

#ifdef __cplusplus
}
#endif
#endif
