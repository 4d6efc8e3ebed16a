/* One element of the Adam family's update, for every device. See kernels/contract/adam.h. */
#ifndef GRADD_KERNELS_MATH_ADAM_H
#define GRADD_KERNELS_MATH_ADAM_H

#include <math.h>

#include "kernels/contract/adam.h"
#include "kernels/math/bf16.h"
#include "kernels/math/f16.h"
#include "kernels/math/host_device.h"

/* Scalars of one step, rounded once as torch rounds them: computed in double, used in float. */
typedef struct gradd_adam_coefficients_s {
    float b1, c1, b2, c2; /* c = 1 - b */
    float step_size, eps, decay_before, decay_after, l2, v_scale, grad_scale;
} gradd_adam_coefficients_t;

static inline gradd_adam_coefficients_t gradd_adam_coefficients(const gradd_adam_t *h,
                                                                float grad_scale) {
    double t = (double)h->step;
    double bc1 = h->bias_correction ? 1 - pow(h->beta1, t) : 1;
    double bc2 = h->bias_correction ? 1 - pow(h->beta2, t) : 1;
    bool torch = h->mode == GRADD_ADAMW_TORCH;
    double decay = 1 - h->lr * h->weight_decay;
    gradd_adam_coefficients_t c;
    c.b1 = (float)h->beta1;
    c.c1 = (float)(1 - h->beta1);
    c.b2 = (float)h->beta2;
    c.c2 = (float)(1 - h->beta2);
    c.step_size = (float)(torch ? h->lr / bc1 : h->lr * sqrt(bc2) / bc1);
    c.eps = (float)h->eps;
    c.decay_before = (float)(torch ? decay : 1);
    c.decay_after = (float)(h->mode == GRADD_ADAMW_TRANSFORMERS ? decay : 1);
    c.l2 = (float)(h->mode == GRADD_ADAM_L2 ? h->weight_decay : 0);
    c.v_scale = (float)(torch ? 1 / sqrt(bc2) : 1);
    c.grad_scale = grad_scale;
    return c;
}

/* As torch.nn.utils.clip_grad_norm_: min(1, max_norm / (norm + 1e-6)). NaN where the norm is. */
static inline double gradd_clip_factor(double max_norm, double norm) {
    const double factor = max_norm / (norm + 1e-6);
    return factor > 1 ? 1 : factor;
}

typedef struct gradd_adam_one_s {
    float p, m, v;
} gradd_adam_one_t;

GRADD_HD gradd_adam_one_t gradd_adam_one(const gradd_adam_coefficients_t *k, float p, float g,
                                         float m, float v) {
    gradd_adam_one_t out;
    g = g * k->grad_scale + k->l2 * p;
    out.m = m * k->b1 + g * k->c1;
    out.v = v * k->b2 + g * g * k->c2;
    out.p = p * k->decay_before;
    out.p -= k->step_size * out.m / (sqrtf(out.v) * k->v_scale + k->eps);
    out.p *= k->decay_after;
    return out;
}

/* The master weight, or the parameter if it has been overwritten since. */
GRADD_HD float gradd_adam_master_bf16(float master, gradd_bf16_t p) {
    return gradd_f32_bf16(master).bits == p.bits ? master : gradd_bf16_f32(p);
}

GRADD_HD float gradd_adam_master_f16(float master, gradd_f16_t p) {
    return gradd_f32_f16(master).bits == p.bits ? master : gradd_f16_f32(p);
}

#endif
