/* Adam update and gradient norm. See adamw.h. */
#include "kernels/cpu/adamw.h"

#include <math.h>

/* Scalars of one step, rounded once as torch rounds them: computed in double, used in float. */
typedef struct coefficients_s {
    float b1, c1, b2, c2; /* c = 1 - b */
    float step_size, eps, decay_before, decay_after, l2, v_scale, grad_scale;
} coefficients_t;

static coefficients_t coefficients(const gradd_adam_t *h, float grad_scale) {
    double t = (double)h->step;
    double bc1 = h->bias_correction ? 1 - pow(h->beta1, t) : 1;
    double bc2 = h->bias_correction ? 1 - pow(h->beta2, t) : 1;
    bool torch = h->mode == GRADD_ADAMW_TORCH;
    double decay = 1 - h->lr * h->weight_decay;
    return (coefficients_t){
        .b1 = (float)h->beta1,
        .c1 = (float)(1 - h->beta1),
        .b2 = (float)h->beta2,
        .c2 = (float)(1 - h->beta2),
        .step_size = (float)(torch ? h->lr / bc1 : h->lr * sqrt(bc2) / bc1),
        .eps = (float)h->eps,
        .decay_before = (float)(torch ? decay : 1),
        .decay_after = (float)(h->mode == GRADD_ADAMW_TRANSFORMERS ? decay : 1),
        .l2 = (float)(h->mode == GRADD_ADAM_L2 ? h->weight_decay : 0),
        .v_scale = (float)(torch ? 1 / sqrt(bc2) : 1),
        .grad_scale = grad_scale,
    };
}

static void update(const coefficients_t *c, const gradd_adam_span_t *s, int64_t from, int64_t to) {
    const float *p = s->p, *m = s->m, *v = s->v, *g = s->g;
    float *op = s->out_p, *om = s->out_m, *ov = s->out_v;
    coefficients_t k = *c;
#pragma omp simd
    for (int64_t i = from; i < to; i++) {
        float gi = g[i] * k.grad_scale + k.l2 * p[i];
        float mi = m[i] * k.b1 + gi * k.c1;
        float vi = v[i] * k.b2 + gi * gi * k.c2;
        float pi = p[i] * k.decay_before;
        pi -= k.step_size * mi / (sqrtf(vi) * k.v_scale + k.eps);
        om[i] = mi;
        ov[i] = vi;
        op[i] = pi * k.decay_after;
    }
}

#define BLOCK ((int64_t)4096)

void gradd_adam_update(const gradd_adam_t *hyper, float grad_scale, const gradd_adam_span_t *span) {
    coefficients_t c = coefficients(hyper, grad_scale);
    int64_t blocks = (span->n + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(static) if (blocks > 4)
    for (int64_t b = 0; b < blocks; b++) {
        int64_t to = (b + 1) * BLOCK;
        update(&c, span, b * BLOCK, to < span->n ? to : span->n);
    }
}

static double block_squares(const float *x, int64_t n) {
    double lanes[8] = {0};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int l = 0; l < 8; l++)
            lanes[l] += (double)x[i + l] * (double)x[i + l];
    double sum = 0;
    for (; i < n; i++)
        sum += (double)x[i] * (double)x[i];
    for (int l = 0; l < 8; l++)
        sum += lanes[l];
    return sum;
}

/* Partial sums of fixed blocks, added in block order: the same bits for any number of threads. */
#define NORM_GROUP 256

double gradd_sum_squares(const float *x, int64_t n) {
    int64_t blocks = (n + BLOCK - 1) / BLOCK;
    double total = 0, partial[NORM_GROUP];
    for (int64_t base = 0; base < blocks; base += NORM_GROUP) {
        int64_t group = blocks - base < NORM_GROUP ? blocks - base : NORM_GROUP;
#pragma omp parallel for schedule(static) if (group > 8)
        for (int64_t b = 0; b < group; b++) {
            int64_t from = (base + b) * BLOCK, left = n - from;
            partial[b] = block_squares(x + from, left < BLOCK ? left : BLOCK);
        }
        for (int64_t b = 0; b < group; b++)
            total += partial[b];
    }
    return total;
}
