/* The optimizer of a session: AdamW by the device's kernel, SGD, clipping, learning rates. See
 * gradd_train.h; AdamW's modes are in kernels/contract/adam.h.
 */
#include <math.h>
#include <string.h>

#include "kernels/math/adam.h"
#include "server/device/device.h"
#include "server/plan/plan.h"
#include "train/session.h"

/* ---- clipping -------------------------------------------------------------------------------- */

static double square_norm(const train_parameter_t *p, const gradd_device_t *d,
                          gradd_status_t *status) {
    const gradd_span_t span = {p->gradient, p->type.dtype, gradd_type_count(&p->type)};
    double sum = 0;
    if (!*status) *status = d->backend->norm2(d->queue, &span, 1, &sum);
    return sum;
}

static gradd_status_t find_scale(const gradd_train_session_t *s, float *out_scale,
                                 double *out_norm) {
    const double most = s->options.optimizer.max_norm;
    gradd_status_t status = GRADD_OK;
    double sum = 0;
    *out_scale = 1;
    *out_norm = 0;
    if (!(most > 0)) return GRADD_OK;
    for (int k = 0; k < s->n_trained; k++) {
        const train_parameter_t *p = &s->state->parameters[s->trained[k]];
        if (p->has_gradient) sum += square_norm(p, s->device, &status);
    }
    *out_norm = sqrt(sum);
    *out_scale = (float)gradd_clip_factor(most, *out_norm);
    return status;
}

/* ---- updates --------------------------------------------------------------------------------- */

static gradd_status_t adam(const gradd_train_session_t *s, train_parameter_t *p, float scale) {
    const gradd_train_optimizer_t *o = &s->options.optimizer;
    const gradd_adam_t hyper = {.lr = s->state->progress.learning_rate,
                                .beta1 = o->beta1,
                                .beta2 = o->beta2,
                                .eps = o->eps,
                                .weight_decay = o->weight_decay,
                                .mode = o->mode,
                                .bias_correction = o->bias_correction,
                                .step = p->steps + 1};
    const gradd_adam_span_t span = {.p = p->data,
                                    .m = p->moments[0],
                                    .v = p->moments[1],
                                    .g = p->gradient,
                                    .out_p = p->data,
                                    .out_m = p->moments[0],
                                    .out_v = p->moments[1],
                                    .n = gradd_type_count(&p->type)};
    return s->device->backend->adam(s->device->queue, &hyper, scale, &span);
}

/* The scalars of SGD, rounded once. */
typedef struct sgd_s {
    float rate, momentum, decay, scale;
    bool first; /* the momentum begins with the gradient */
} sgd_t;

static void sgd_plain(const sgd_t *o, float *restrict p, const float *restrict g, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++)
        p[i] -= o->rate * (g[i] * o->scale + o->decay * p[i]);
}

static void sgd_momentum(const sgd_t *o, float *restrict p, float *restrict m,
                         const float *restrict g, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        const float d = g[i] * o->scale + o->decay * p[i];
        m[i] = o->first ? d : o->momentum * m[i] + d;
        p[i] -= o->rate * m[i];
    }
}

static void sgd(const gradd_train_session_t *s, train_parameter_t *p, float scale) {
    const gradd_train_optimizer_t *o = &s->options.optimizer;
    const sgd_t scalars = {.rate = s->state->progress.learning_rate,
                           .momentum = (float)o->momentum,
                           .decay = (float)o->weight_decay,
                           .scale = scale,
                           .first = !p->steps};
    const int64_t n = gradd_type_count(&p->type);
    if (o->momentum)
        sgd_momentum(&scalars, p->data, p->moments[0], p->gradient, n);
    else
        sgd_plain(&scalars, p->data, p->gradient, n);
}

/* ---- the step -------------------------------------------------------------------------------- */

/* torch's limits: what lies beyond them makes NaNs, or nothing that was meant. */
gradd_status_t optimizer_check(const gradd_train_optimizer_t *o) {
    const bool is_adam = o->kind == GRADD_TRAIN_ADAMW;
    if ((unsigned)o->kind > GRADD_TRAIN_SGD)
        return GRADD_FAIL(TENSOR, "an optimizer of kind %d", (int)o->kind);
    if (is_adam && (unsigned)o->mode > GRADD_ADAMW_TORCH)
        return GRADD_FAIL(TENSOR, "AdamW of mode %d", (int)o->mode);
    const struct {
        const char *name;
        double value, end; /* from 0 on, below this */
    } numbers[] = {
        {"beta1",        is_adam ? o->beta1 : 0,                           1       },
        {"beta2",        is_adam ? o->beta2 : 0,                           1       },
        {"eps",          is_adam ? o->eps : 0,                             INFINITY},
        {"momentum",     o->kind == GRADD_TRAIN_SGD ? o->momentum : 0,     INFINITY},
        {"weight_decay", o->kind ? o->weight_decay : 0,                    INFINITY},
        {"max_norm",     o->kind && !isinf(o->max_norm) ? o->max_norm : 0, INFINITY},
    };
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        if (!(numbers[i].value >= 0 && numbers[i].value < numbers[i].end))
            return GRADD_FAIL(TENSOR, "the optimizer's %s is %g, expected a number from 0 on%s",
                              numbers[i].name, numbers[i].value,
                              numbers[i].end < 2 ? ", below 1" : "");
    return GRADD_OK;
}

static int n_moments(const gradd_train_optimizer_t *o) {
    return o->kind == GRADD_TRAIN_ADAMW ? 2 : o->momentum != 0;
}

/* Moments of another kind of optimizer: AdamW has two, SGD the momentum or none. */
static bool has_others(const train_parameter_t *p, int n) {
    int there = 0;
    while (there < GRADD_TRAIN_MOMENTS && p->moments[there])
        there++;
    return there ? there != n : n == GRADD_TRAIN_MOMENTS && p->steps;
}

/* An optimizer that follows one of another kind starts without any, as a new one of torch does. */
static gradd_status_t make_moments(gradd_train_session_t *s) {
    for (int k = 0; k < s->n_trained; k++) {
        train_parameter_t *p = &s->state->parameters[s->trained[k]];
        if (p->has_gradient && has_others(p, n_moments(&s->options.optimizer))) {
            state_drop_moments(p);
            p->changed = true;
        }
        for (int j = 0; p->has_gradient && j < n_moments(&s->options.optimizer); j++)
            GRADD_TRY(state_make_moment(p, j));
    }
    return GRADD_OK;
}

static gradd_status_t update(gradd_train_session_t *s, float scale) {
    const bool is_adam = s->options.optimizer.kind == GRADD_TRAIN_ADAMW;
    for (int k = 0; k < s->n_trained; k++) {
        train_parameter_t *p = &s->state->parameters[s->trained[k]];
        if (!p->has_gradient) continue;
        if (is_adam)
            GRADD_TRY(adam(s, p, scale));
        else
            sgd(s, p, scale);
        p->steps++;
        p->changed = true;
    }
    s->state->progress.step++;
    s->state->waits = false;
    return GRADD_OK;
}

/* As many as the plan of the last step had, which are awake; where that was one, others are woken
 * if the updates pay for it. Updates and norms have the same bits with any number. */
static int threads_of(const gradd_train_session_t *s) {
    enum { UPDATE_BYTES = 7 * sizeof(float), LEAST = 4 * 4096 }; /* smaller ones are not shared */
    plan_cost_t cost = {0};
    if (s->plan_threads > 1) return s->plan_threads;
    for (int k = 0; k < s->n_trained; k++) {
        const train_parameter_t *p = &s->state->parameters[s->trained[k]];
        const int64_t n = gradd_type_count(&p->type);
        if (!p->has_gradient || n <= LEAST) continue;
        cost.bytes += UPDATE_BYTES * (double)n;
        cost.launches++;
    }
    return plan_threads(&cost, s->device->info.threads);
}

gradd_status_t gradd_train_optimizer_step(gradd_train_session_t *s, double *out_norm) {
    const gradd_device_t *d = s->device;
    float scale;
    double norm;
    if (s->options.optimizer.kind == GRADD_TRAIN_NO_OPTIMIZER)
        return GRADD_FAIL(UNSUPPORTED, "the session has no optimizer");
    GRADD_TRY(make_moments(s));
    GRADD_TRY(d->backend->queue_enter(d->queue, threads_of(s)));
    gradd_status_t status = find_scale(s, &scale, &norm);
    if (!status) status = update(s, scale);
    const gradd_status_t waited = d->backend->wait(d->queue, NULL);
    if (status || waited) return status ? status : waited;
    if (out_norm) *out_norm = norm;
    return GRADD_OK;
}

gradd_status_t gradd_train_set_optimizer(gradd_train_session_t *s,
                                         const gradd_train_optimizer_t *optimizer) {
    GRADD_TRY(optimizer_check(optimizer));
    s->options.optimizer = *optimizer;
    return GRADD_OK;
}

/* ---- learning rates -------------------------------------------------------------------------- */

static gradd_status_t check_rate(float rate) {
    if (isfinite(rate) && rate >= 0) return GRADD_OK;
    return GRADD_FAIL(TENSOR, "a learning rate of %g", (double)rate);
}

float gradd_train_learning_rate(const gradd_train_session_t *s) {
    return s->state->progress.learning_rate;
}

gradd_status_t gradd_train_set_learning_rate(gradd_train_session_t *s, float rate) {
    GRADD_TRY(check_rate(rate));
    s->state->progress.learning_rate = rate;
    return GRADD_OK;
}

gradd_status_t gradd_train_schedule_step(gradd_train_session_t *s) {
    if (!s->state->course.has_schedule)
        return GRADD_FAIL(UNSUPPORTED, "the session has no schedule");
    state_schedule_rate(s->state);
    return GRADD_OK;
}

gradd_status_t gradd_train_set_linear_schedule(gradd_train_session_t *s, int64_t warmup,
                                               int64_t total, float initial) {
    GRADD_TRY(check_rate(initial));
    if (warmup < 0 || total < 0)
        return GRADD_FAIL(TENSOR, "a schedule of %lld steps, %lld of them to warm up",
                          (long long)total, (long long)warmup);
    s->state->progress.initial_learning_rate = initial;
    s->state->course.has_schedule = true;
    s->state->course.warmup = warmup;
    s->state->course.total = total;
    state_schedule_rate(s->state);
    return GRADD_OK;
}
